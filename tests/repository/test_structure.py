"""How the sources are laid out: the contracts of import-linter, and `scripts/structure.py`, can fail."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import structure

ROOT = Path(structure.__file__).parent.parent


def test_the_repository_is_laid_out_as_the_rules_say() -> None:
    assert [*structure.violations(ROOT)] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch_join import name_ranks", "name_ranks is no public name of torch_join"),
        ("from torch_join.integration import Join", "Join is no public name of torch_join.integration"),
        ("join._driver", "_driver is private in torch_join"),
        ("getattr(join, '_driver')", "_driver is private in torch_join"),
        ("self._driver", "_driver is private in torch_join"),  # of a base of torch_join's
        ("from torch_join import integration; integration.os", "os is no public name of torch_join.integration"),
        ("import torch_join.integration as i; i.os", "os is no public name of torch_join.integration"),
        ("import_module('torch_join._tail')", "torch_join._tail is private"),
        ("from torch_join import Join, integration", None),
        ("self._driver = 1; self._driver", None),
        ("join.__init__, join._timeout", None),  # the last is Lightning's, too
    ],
)
def test_names_that_are_not_offered_are_found(source: str, expected: str | None, tmp_path: Path) -> None:
    for name, text in {
        "torch_join/__init__.py": "__all__ = ['Join']",
        "torch_join/integration.py": "__all__ = ['name_ranks']",
        "torch_join/join.py": "self._driver = self._timeout = 1",
        "accelerate_join/x.py": source,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, structure.__file__, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (
        (0, "") if expected is None else (1, f"accelerate_join/x.py:1: {expected}")
    )


BROKEN = {
    "torch_join/_base/weighting.py": ("from torch_join._tail import tail", "torch_join only look down"),
    "torch_join/join.py": ("def f():\n    import lightning_join", "know torch_join and not each other"),
    "accelerate_join/_loaders.py": ("import lightning_join", "know torch_join and not each other"),
    "lightning_join/fabric.py": ("from torch_join._tail import tail", "they import what it offers"),
    "lightning_join/_compat.py": ("import lightning_join._loops", "Those of lightning_join too"),
    "torch_join/_control/codec.py": ("import torch_join._control.channel", "No circles"),
    "pytorch_lightning_join/__init__.py": ("import accelerate_join", "once more, and knows nothing else"),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="import-linter asks for Python 3.11")
@pytest.mark.parametrize("where", BROKEN)
def test_import_linter_finds(where: str, tmp_path: Path) -> None:
    for package in ("torch_join", "lightning_join", "pytorch_lightning_join", "accelerate_join"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source, contract = BROKEN[where]
    with (tmp_path / where).open("a") as file:
        file.write(source)
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    assert done.returncode == 1
    assert any(contract in line for line in broken), done.stdout
