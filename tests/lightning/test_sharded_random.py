"""A random search over Lightning's trainings of sharded models: each ends as one process does."""

from pathlib import Path

import pytest

from tests.support.front_ends.lightning_sharded import train
from tests.support.many import seeds
from tests.support.sharded import Recipe
from tests.support.sharded_search import draw_for_lightning
from tests.support.sharded_verdict import check
from tests.support.workers import Workers

# torch says so where a model that recomputes by reentrant checkpoints is evaluated.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
FOUND = {
    # A rank that had no batch when the others learned in which order to prefetch.
    "prefetch, a rank without a batch": Recipe(
        (0, 1, 3, 4), api="fsdp1", model="unused", options={"prefetch": "BACKWARD_PRE"}
    ),
    # What an evaluation has prefetched for modules that did not run.
    "prefetch, evaluation": Recipe(
        (0, 3, 3), api="fsdp1", model="skipping", evaluation="same with", options={"prefetch": "BACKWARD_PRE"}
    ),
    "prefetch, evaluation, fully_shard": Recipe(
        (5, 0, 4), model="skipping", evaluation="same with", options={"prefetch": True}
    ),
    # Which ranks were active in the tail of the epoch before.
    "hybrid sharding, a second tail": Recipe((5, 5, 3, 6), options={"mesh": (2, 2)}),
    # A stream that is shorter in the epoch after the checkpoint, in which torchdata looks for the place.
    "a shorter stream": Recipe((0, 2), api="fsdp1", iterable=True, framework={"saves": 2}),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(workers: Workers, name: str, tmp_path: Path) -> None:
    check(workers, FOUND[name], train, FOUND[name], str(tmp_path))


@seeds(range(2))
def test_a_few(workers: Workers, seed: int, tmp_path: Path) -> None:
    recipe = draw_for_lightning(seed)
    check(workers, recipe, train, recipe, str(tmp_path))
