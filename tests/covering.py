"""Which cases of a product of parameters run by default; the others are `long`.

A test with many parameters is marked `@pytest.mark.covering(strength)`. Whichever values that many of its parameters
have together in some case, they have in one that runs by default (a covering array). With a strength of 2 that is each
pair of values, with 1 each value.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest


def cover(cases: Sequence[Sequence[Hashable]], strength: int) -> list[int]:
    """Return the places of cases that cover all: one that covers the most of what is left, and so on.

    Of several, it is one whose values have been chosen least, so that they take turns.
    """
    contents = [{*combinations(enumerate(case), strength)} for case in cases]
    left, chosen = set().union(*contents), []
    uses: Counter[Hashable] = Counter()
    while left:
        best = max(
            range(len(cases)),
            key=lambda place: (len(contents[place] & left), -sum(uses[value] for value in enumerate(cases[place]))),
        )
        left -= contents[best]
        uses.update(enumerate(cases[best]))
        chosen.append(best)
    return sorted(chosen)


def mark_others_long(items: Sequence[pytest.Item]) -> None:
    """Mark what is covered by other cases of its test."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("covering")
        assert marker is not None
        short = [case for case in cases if not case.get_closest_marker("long")]
        # The values of one parameter are the same objects in all cases.
        chosen = cover([[*map(id, case.callspec.params.values())] for case in short], *marker.args)
        for place, case in enumerate(short):
            if place not in chosen:
                case.add_marker(pytest.mark.long)


def is_in(part: str, name: str) -> bool:
    """Return whether a test is in a part such as `"3/40"`, the third of 40. Its part depends on its name alone."""
    number, count = map(int, part.split("/"))
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--slice {part}: give K/N with 1 <= K <= N, as in 3/40")
    return crc32(name.encode()) % count == number - 1


def others_long(values: Iterable[Any], *short: Any) -> list[Any]:
    """Return a parameter for each value, of which all but some are `long`."""
    values = [*values]
    assert {*short} <= {*values}, {*short} - {*values}
    return [pytest.param(value, marks=() if value in short else pytest.mark.long) for value in values]
