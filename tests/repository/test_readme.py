"""What README and docs say that can be looked at: the table of differences, the texts of others' errors, numbers."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import plots
from benchmarks.exactness import PROGRAMS, TOLERANCE
from tests.support import inside
from tests.support.commands import run

ROOT = Path(__file__).resolve().parents[2]
MIGRATING = ROOT / "docs" / "migrating.md"


def rows(text: str) -> dict[str, list[str]]:
    """The table's cells, by their row's name."""
    lines = re.search(r"^\|  \| torch's Join \|(?:.*\n\|)*.*", text, re.MULTILINE)
    assert lines, text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]
    return {name: others for name, *others in cells}


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    return rows(run("-m benchmarks.exactness --markdown"))


def test_the_table_is_the_one_that_is_printed(printed: dict[str, list[str]]) -> None:
    committed = rows(MIGRATING.read_text())
    assert list(committed) == list(printed) == ["", "---", *(program.name for program in PROGRAMS)]
    assert [committed[name] for name in ("", "---")] == [printed[name] for name in ("", "---")]
    for program in PROGRAMS:
        (theirs, ours, largest), now = committed[program.name], printed[program.name]
        # The last bits, and so what is next to zero, may differ from machine to machine.
        assert float(now[0]) == pytest.approx(float(theirs), rel=0.5, abs=TOLERANCE)
        assert max(float(ours), float(now[1])) <= TOLERANCE
        assert now[2] == largest


def test_torchs_join_is_off_where_something_has_a_state(printed: dict[str, list[str]]) -> None:
    off = {name: float(cells[0]) for name, cells in printed.items() if name not in ("", "---")}
    assert off.pop("SGD") <= TOLERANCE
    assert all(difference > 1e-3 for difference in off.values())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def sources(*packages: str) -> str:
    """Return the text of packages that are installed, each line joined to the next where a text goes on there."""
    paths = [Path(spec.origin).parent for name in packages if (spec := find_spec(name)) and spec.origin]
    text = "\n".join(each.read_text(errors="ignore") for path in paths for each in path.rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("lightning.pytorch", "across ranks is zero."),
        ("lightning.pytorch", "across ranks is zero, but local rank has zero length."),
        ("lightning.pytorch", "within local rank has zero length. Please make sure that it returns at least 1 batch."),
        ("accelerate", "as a result `join_uneven_inputs` will have no effect."),
        (
            "accelerate",
            "Overriding even_batches is only supported for map-style datasets, yet some dataloaders given were",
        ),
        (
            "torch.distributed.algorithms",
            "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
        ),
    ],
)
def test_texts_of_others_errors_are_theirs(package: str, text: str) -> None:
    assert text in (ROOT / "docs" / "hangs.md").read_text()
    assert text in sources(package)


def test_torchs_library_has_the_texts_of_its_errors() -> None:
    library = (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").read_bytes()
    page = (ROOT / "docs" / "hangs.md").read_text()
    for text in (
        "Detected mismatch between collectives on ranks",
        "Connection closed by peer",
        "Expected to have finished reduction in the prior iteration",
    ):
        assert text in page
        assert text.encode() in library


def test_numbers_of_connections_are_the_codes() -> None:
    """Seven children in each of two heaps, and a parent; a rank listens for half a minute."""
    page = " ".join((ROOT / "docs" / "faults.md").read_text().split())
    assert f"at most {2 * inside.CHILDREN + 1} connections per rank" in page
    assert f"after {inside.LISTENS:.0f} seconds at most" in page
    assert f"({inside.TIMEOUT.total_seconds() / 60:.0f} minutes by default)" in page


def test_the_picture_of_overheads_is_of_the_tables() -> None:
    measured = plots.rows(plots.TABLES.read_text())
    assert {row for group in plots.GROUPS.values() for row in group} <= measured.keys()
