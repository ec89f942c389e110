"""A random search over sharded models' trainings, each from a seed: it ends right, or with an error that is promised.

`-m long` runs 300 of them, or as many as TORCH_JOIN_CASES says, from the seed TORCH_JOIN_SEED on.
"""

import os

import pytest

from tests.support.sharded_search import draw
from tests.support.sharded_verdict import CASES, verdict
from tests.support.sharding import train
from tests.support.workers import Workers

# torch says so where a model that recomputes by reentrant checkpoints is evaluated.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
FEW = range(8, 13)  # none of them is refused, which takes until a collective times out
FIRST = int(os.environ.get("TORCH_JOIN_SEED", FEW.stop))


def check(workers: Workers, seed: int) -> None:
    recipe = draw(seed)
    found = verdict(workers, recipe, train, [recipe])
    assert found.startswith(("right", "refused")), f"seed {seed}: {recipe}\n{found}"


@pytest.mark.parametrize("seed", FEW)
def test_a_few(workers: Workers, seed: int) -> None:
    check(workers, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_many(workers: Workers, seed: int) -> None:
    check(workers, seed)
