"""The README's table of differences is the one that the code prints."""

import re
from pathlib import Path

import pytest

from benchmarks.exactness import PROGRAMS, TOLERANCE
from tests.repository.test_examples import run

README = Path(__file__).resolve().parents[2] / "README.md"


def rows(text: str) -> dict[str, list[str]]:
    """The table's cells, by their row's name."""
    lines = re.search(r"^\|  \| torch's Join \|(?:.*\n\|)*.*", text, re.MULTILINE)
    assert lines, text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]
    return {name: others for name, *others in cells}


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    return rows(run("-m benchmarks.exactness --markdown"))


def test_the_readmes_table_is_the_one_that_is_printed(printed: dict[str, list[str]]) -> None:
    committed = rows(README.read_text())
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
