"""Engines in Lightning, Fabric and Accelerate against one process on the union of the batches."""

import pytest

from tests.deepspeed.fronts import EXPECTED, all_of
from tests.support.front_ends.deepspeed import Recipe, check, expected_of
from tests.support.workers import Workers

CASES = {
    "lightning 0": ("lightning", Recipe((4, 1), stage=0, clip=0.05)),
    "lightning 1": (
        "lightning",
        Recipe((2, 4), stage=1, accumulate=2, clip=0.02, weighting="samples", optimizer="adamw"),
    ),
    "lightning 2": ("lightning", Recipe((0, 3), stage=2, weighting="count")),
    "lightning 3": ("lightning", Recipe((1, 4), stage=3, accumulate=2, weighting="active")),
    "fabric 0": ("fabric", Recipe((1, 3), stage=0)),
    "fabric 1": ("fabric", Recipe((0, 3), stage=1, weighting="samples", optimizer="adamw")),
    "fabric 2": ("fabric", Recipe((4, 1), stage=2, clip=0.05)),
    "fabric 3": ("fabric", Recipe((1, 4), stage=3, weighting="count")),
    "accelerate 1": ("accelerate", Recipe((2, 5), stage=1, accumulate=2, optimizer="adamw")),
    "accelerate 2": ("accelerate", Recipe((0, 3), stage=2, clip=0.05, weighting="active")),
    "accelerate 3": ("accelerate", Recipe((4, 1), stage=3, accumulate=2)),
    "accelerate samples": ("accelerate", Recipe((1, 3), stage=3, weighting="samples")),
}


@pytest.mark.parametrize("front", ["lightning", "fabric", "accelerate"])
def test_a_framework_trains_as_one_process_does(workers: Workers, front: str) -> None:
    cases = [case for case in CASES.values() if case[0] == front]
    outcomes = workers.outcomes(2, all_of, cases, deadline=150.0)
    failed = [f"rank {rank}: {one.error}\n{one.trace[-2500:]}" for rank, one in enumerate(outcomes) if one.error]
    assert not failed, "\n".join(failed)
    for place, (_, recipe) in enumerate(cases):
        check([one.value[place] for one in outcomes], expected_of(recipe, **EXPECTED[front]))
