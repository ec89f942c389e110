"""What docs/how-it-works.md says of the sources is so: its walks, its tables and its glossary."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from torch_join._base.membership import Role
from torch_join._tail.batch_loop import Place

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how-it-works.md").read_text()
STATION = re.compile(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", re.MULTILINE)


def walks(text: str) -> list[list[tuple[str, str]]]:
    """Return the stations, a file and a name in it, of each walk."""
    section = text.split("## Seven walks")[1].split("\n## ")[0]
    return [STATION.findall(walk) for walk in section.split("\n**")[1:]]


def there(path: str, name: str) -> bool:
    found: Any = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def test_each_walk_leads_somewhere() -> None:
    found = walks(TEXT)
    assert len(found) == 7
    for walk in found:
        assert 5 <= len(walk) <= 7
        assert [station for station in walk if not there(*station)] == []


def test_each_row_of_where_to_look_leads_somewhere() -> None:
    rows = TEXT.split("## Where to look")[1].split("\n## ")[0].strip().splitlines()[4:]
    for row in rows:
        file, *names = re.findall(r"`([^`]+)`", row.split(" | ")[1])
        assert names, row
        assert [name for name in names if not there(file, name)] == []


def test_a_walk_to_what_is_gone_is_noticed() -> None:
    assert not there("torch_join/join.py", "Join.gone")
    assert there("torch_join/join.py", "Join.batches")


def test_the_tables_have_each_place_and_role() -> None:
    section = TEXT.split("## The life of a `Join`")[1].split("\n## ")[0]
    found = [re.findall(r"^\| `(\w+)` \| `(\w+)` \| .+ \|$", table, re.MULTILINE) for table in section.split("`Role`")]
    assert [{name for pair in pairs for name in pair} for pairs in found] == [
        {place.value for place in Place},
        {role.value for role in Role},
    ]


def test_the_glossary_is_short() -> None:
    rows = TEXT.split("## Glossary")[1].split("\n## ")[0].strip().splitlines()[2:]
    assert 10 <= len(rows) <= 25


def test_files_that_docstrings_name_are_there() -> None:
    for package in ("torch_join", "lightning_join", "pytorch_lightning_join", "accelerate_join"):
        for path in (ROOT / package).rglob("*.py"):
            named = re.findall(r"`([\w/]+\.py)`", path.read_text())
            folders = (path.parent, ROOT / package, ROOT)
            assert [name for name in named if not any((folder / name).exists() for folder in folders)] == [], path


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/how-it-works.md"])
def test_files_that_pages_for_maintainers_name_are_there(page: str) -> None:
    named = re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", (ROOT / page).read_text())
    roots = (ROOT, ROOT / "torch_join", ROOT / "lightning_join")
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []
