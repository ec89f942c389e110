"""Engines in plain loops against one process on the union of the batches."""

from typing import Any

import pytest

from tests.support.front_ends.deepspeed import Recipe, check, expected_of, train
from tests.support.workers import Workers

# Over stages, lengths, weightings, windows, clipping, optimizers and how ZeRO is set: nearly each pair of them once.
RECIPES = {
    "stage 0": Recipe((4, 1), stage=0, accumulate=2, clip=0.02, weighting="samples", optimizer="adamw"),
    "stage 1": Recipe((2, 4), stage=1, weighting="active", clip=0.05),
    "stage 1, no batch": Recipe((0, 3), stage=1, accumulate=2, weighting="count"),
    "stage 1, overlapping": Recipe((4, 1), stage=1, accumulate=2, options={"overlap_comm": True}),
    "stage 1, as they are": Recipe((2, 4), stage=1, optimizer="adamw", options={"contiguous_gradients": False}),
    "stage 2": Recipe((4, 1), stage=2, weighting="count", optimizer="adamw"),
    "stage 2, no batch": Recipe((0, 3), stage=2, clip=0.05, weighting="samples"),
    "stage 2, offloaded": Recipe(
        (2, 4), stage=2, accumulate=2, clip=0.02, options={"offload_optimizer": {"device": "cpu"}}
    ),
    "stage 2, all-reduced": Recipe((2, 4), stage=2, accumulate=2, options={"reduce_scatter": False}),
    "stage 3": Recipe((2, 4), stage=3, accumulate=2, weighting="samples"),
    "stage 3, no batch": Recipe((0, 3), stage=3, clip=0.05, optimizer="adamw"),
    "stage 3, rank 0 first": Recipe((4, 5), stage=3, weighting="count", model="reentrant", seed=1075),
    "stage 3, offloaded": Recipe(
        (4, 1),
        stage=3,
        weighting="active",
        options={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ),
    "stage 3, whole": Recipe((2, 4), stage=3, options={"stage3_param_persistence_threshold": 10000}),
    "stage 3, nothing ahead": Recipe(
        (2, 4), stage=3, options={"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    ),
}
OF_THREE = {
    "stage 1": Recipe((1, 3, 5), stage=1, accumulate=2, clip=0.02, weighting="samples", optimizer="adamw"),
    "stage 2": Recipe((5, 0, 2), stage=2, weighting="active"),
    "stage 3": Recipe((5, 0, 2), stage=3, accumulate=2, weighting="count"),
}


def train_all(rank: int, recipes: list[Recipe]) -> list[Any]:
    return [train(rank, recipe) for recipe in recipes]


@pytest.mark.parametrize("recipes", [RECIPES, OF_THREE], ids=["two", "three"])
def test_an_engine_trains_as_one_process_does(workers: Workers, recipes: dict[str, Recipe]) -> None:
    given = list(recipes.values())
    world_size = len(given[0].lengths)
    outcomes = workers.outcomes(world_size, train_all, given, deadline=180.0)
    failed = [f"rank {rank}: {one.error}\n{one.trace[-2500:]}" for rank, one in enumerate(outcomes) if one.error]
    assert not failed, "\n".join(failed)
    for place, (name, recipe) in enumerate(recipes.items()):
        print(name, check([one.value[place] for one in outcomes], expected_of(recipe)))
