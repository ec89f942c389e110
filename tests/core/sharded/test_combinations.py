"""The larger product of combinations, in plain loops."""

from itertools import product

import pytest

from tests.core.sharded.test_exactness import check
from tests.support.sharded import Recipe
from tests.support.workers import Workers

KINDS = ["mlp", "checkpointed", "either", "skipping", "repeating", "frozen", "unused"]
LENGTHS = {2: [(5, 2), (0, 4), (3, 6)], 3: [(4, 7, 0), (0, 3, 5), (5, 5, 2)], 4: [(2, 5, 0, 4), (0, 6, 3, 1)]}
WAYS = {
    "each": Recipe(),
    "windows": Recipe(window=2),
    "no sync": Recipe(window=3, no_sync=True),
    "iterable": Recipe(loop="iterable", forwards=2),
    "plain": Recipe(loop="plain", window=2, no_sync=True),
    "heartbeat": Recipe(may_break=True, clip=0.3, scheduled=True),
    "evaluates": Recipe(evaluates="same with", optimizer="sgd", doubled=True),
    "masked": Recipe(masked=1, window=2, no_sync=True, optimizer="sgd"),
}


def combinations(api: str, world_size: int) -> dict[str, Recipe]:
    found = {}
    weightings = ["world", "active", "samples"]
    for number, (kind, (name, recipe)) in enumerate(product(KINDS, WAYS.items())):
        # torch's FSDP1 clips no float64, and does not sync what was accumulated in modules that the last step skips.
        if api == "fsdp1" and (recipe.clip or (recipe.no_sync and kind in ("either", "skipping", "unused"))):
            continue
        lengths = LENGTHS[world_size][number % len(LENGTHS[world_size])]
        weighting = weightings[number // 2 % 3]
        found[f"{kind} {name}"] = recipe.but(api=api, lengths=lengths, kind=kind, weighting=weighting)
    return found


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_combinations(workers: Workers, api: str, world_size: int) -> None:
    check(workers, combinations(api, world_size), deadline=600.0)
