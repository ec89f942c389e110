"""Tests that are skipped on other devices than the CPU are there, and are named once; so are the quick ones."""

from pathlib import Path

import pytest

from tests.conftest import ALL_TESTS
from tests.cpu_only import entries, matches, why_only_on_a_cpu

ROOT = Path(__file__).parents[2]


QUICK = (ROOT / "tests/quick.txt").read_text().splitlines()


def test_each_entry_names_a_test(request: pytest.FixtureRequest) -> None:
    named = [entry for entry, _ in entries()]
    tests = request.config.stash[ALL_TESTS]
    if not {entry.partition("::")[0] for entry in (*named, *QUICK)} <= {test.partition("::")[0] for test in tests}:
        pytest.skip("only a run of all files has collected them")
    assert len(tests) > len(named)
    counts = {entry: sum(matches(entry, test) for test in tests) for entry in named}
    assert [entry for entry, count in counts.items() if count == 0] == []
    assert {*QUICK} <= {*tests}  # what `scripts/test --quick` runs
    twice = [test for test in tests if sum(matches(entry, test) for entry in named) > 1]
    assert twice == []


def test_a_reason_is_found_for_what_is_named_only() -> None:
    assert matches("a.py::test_x", "a.py::test_x")
    assert matches("a.py::test_x", "a.py::test_x[1-b]")
    assert matches("a.py::test_x[*-b]", "a.py::test_x[1-b]")
    assert not matches("a.py::test_x[*-b]", "a.py::test_x[1-c]")
    assert not matches("a.py::test_x", "a.py::test_xy")
    entry, reason = next(entries())
    assert why_only_on_a_cpu(entry) == reason
    assert why_only_on_a_cpu("tests/a.py::test_x") is None
