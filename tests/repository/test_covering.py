"""What runs by default holds each pair of values, and is no more than that needs."""

from itertools import combinations, product

import pytest

from tests.covering import cover, is_in, others_long

CASES = [
    case for case in product(("sum", "mean"), (1, 2, 3), ("a", "b", "c", "d"), (True, False)) if case[:2] != ("sum", 3)
]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 13)])
def test_each_combination_of_values_that_there_is_is_in_a_case(strength: int, most: int) -> None:
    chosen = [CASES[place] for place in cover(CASES, strength)]
    assert len(chosen) <= most
    for places in combinations(range(4), strength):
        assert {tuple(case[p] for p in places) for case in chosen} == {tuple(case[p] for p in places) for case in CASES}


@pytest.mark.covering(1)
@pytest.mark.parametrize("one", [1, 2, 3])
@pytest.mark.parametrize("other", [True, False])
def test_cases_that_add_no_value_are_long(request: pytest.FixtureRequest, one: int, other: bool) -> None:
    assert (one, other) in {(1, True), (2, False), (3, True)} or request.node.get_closest_marker("long")


def test_each_test_is_in_one_part() -> None:
    names = [f"tests/test_runs.py::test_a_run[{number}]" for number in range(400)]
    parts = [[name for name in names if is_in(f"{part}/8", name)] for part in range(1, 9)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(30 < len(part) < 70 for part in parts)
    with pytest.raises(pytest.UsageError, match="--slice 9/8: give K/N"):
        is_in("9/8", "a")


def test_cases_that_are_named_are_not_long() -> None:
    assert [(p.values, bool(p.marks)) for p in others_long("abc", "b")] == [
        (("a",), True),
        (("b",), False),
        (("c",), True),
    ]
    with pytest.raises(AssertionError, match="d"):
        others_long("abc", "d")
