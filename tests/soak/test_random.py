"""Random runs on all front ends: each from a seed, noted in a log with how it ended.

`scripts/test -m long tests/soak` runs many, from `TORCH_JOIN_SEED` on; `TORCH_JOIN_SOAK_LOG` names the log.
"""

import importlib
import random
import time
from typing import Any

import pytest

from tests.support.front_ends import FRONT_ENDS
from tests.support.many import note, seeds
from tests.support.run import OPTIMIZERS, TOLERANCE, Run, difference, reference, same_bits
from tests.support.workers import Workers

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def draw(seed: int) -> tuple[str, Run]:
    """Return a front end, and a run that it can do."""
    pick = random.Random(seed)
    front_end = pick.choice([name for name in FRONT_ENDS if name != "deepspeed"])
    lengths = [0]
    while not any(lengths):
        lengths = [pick.choice((0, 1, 2, 3, 5)) for _ in range(pick.choice((2, 3, 3)))]
    accumulate = pick.choice((1, 1, 2, 3))
    if front_end == "transformers" and max(lengths) % accumulate:
        accumulate = 1  # Trainer divides an epoch's last window by the number of batches that this one has
    counts = accumulate == 1 and front_end != "sharded"
    weighting = pick.choice(["world", "active", "samples", *(["count"] if counts else [])])
    return front_end, Run(
        tuple(lengths),
        epochs=pick.choice((1, 2, 3)),
        optimizer=pick.choice([*OPTIMIZERS]),
        weighting=weighting,
        accumulate=accumulate,
        clip=pick.choice((None, None, 0.1)),
        scheduler=pick.choice((None, "step")),
        ragged=weighting in ("samples", "count") or pick.random() < 0.5,
        iterable=pick.random() < 0.4,
        seed=seed,
    )


@seeds(range(0), 300)
def test_it_trains_as_one_process_does(workers: Workers, seed: int) -> None:
    front_end, run = draw(seed)
    module = importlib.import_module(f"tests.support.front_ends.{front_end}")
    began, ended = time.monotonic(), "failed"
    try:
        ranks: list[Any] = workers.run(run.world_size, module.parameters, run, deadline=90.0)
        assert all(same_bits(mine, ranks[0]) for mine in ranks), f"{front_end}: the ranks of {run} differ"
        found = difference(ranks[0], reference(run).parameters)
        assert found < TOLERANCE, f"{front_end}: {run} is {found} off"
        ended = "right"
    finally:
        note(seed, f"{front_end}: {run}", ended, time.monotonic() - began)
