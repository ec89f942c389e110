"""A random search over Lightning's trainings of sharded models: each ends as one process does.

`-m long` runs 300 of them, or as many as TORCH_JOIN_CASES says, from the seed TORCH_JOIN_SEED on.
"""

import os
from pathlib import Path

import pytest

from tests.support.lightning_recipes import train_by_lightning
from tests.support.sharded import Recipe
from tests.support.sharded_search import draw_for_lightning
from tests.support.sharded_verdict import CASES, verdict
from tests.support.workers import Workers

# torch says so where a model that recomputes by reentrant checkpoints is evaluated.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
FEW = range(5)
FIRST = int(os.environ.get("TORCH_JOIN_SEED", FEW.stop))
FOUND = {
    # A rank that had no batch when the others learned in which order to prefetch.
    "prefetch, a rank without a batch": Recipe(
        (0, 1, 3, 4), api="fsdp1", kind="unused", options={"prefetch": "BACKWARD_PRE"}
    ),
    # What an evaluation has prefetched for modules that did not run.
    "prefetch, evaluation": Recipe(
        (0, 3, 3), api="fsdp1", kind="skipping", evaluates="same with", options={"prefetch": "BACKWARD_PRE"}
    ),
    "prefetch, evaluation, fully_shard": Recipe(
        (5, 0, 4), kind="skipping", evaluates="same with", options={"prefetch": True}
    ),
    # Which ranks were active in the tail of the epoch before.
    "hybrid sharding, a second tail": Recipe((5, 5, 3, 6), options={"mesh": (2, 2)}),
    # A stream that is shorter in the epoch after the checkpoint, in which torchdata looks for the place.
    "a shorter stream": Recipe((0, 2), api="fsdp1", loop="iterable", framework={"saves": 2}),
}


def check(workers: Workers, recipe: Recipe, folder: Path) -> None:
    found = verdict(workers, recipe, train_by_lightning, recipe, str(folder))
    assert found.startswith(("right", "refused")), f"{recipe}\n{found}"


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(workers: Workers, name: str, tmp_path: Path) -> None:
    check(workers, FOUND[name], tmp_path)


@pytest.mark.parametrize("seed", FEW)
def test_a_few(workers: Workers, seed: int, tmp_path: Path) -> None:
    check(workers, draw_for_lightning(seed), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_many(workers: Workers, seed: int, tmp_path: Path) -> None:
    check(workers, draw_for_lightning(seed), tmp_path)
