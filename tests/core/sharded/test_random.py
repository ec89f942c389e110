"""A random search over sharded models' trainings: each ends right, or with an error that is promised."""

import pytest

from tests.support.front_ends.sharded import train
from tests.support.many import seeds
from tests.support.sharded_search import draw
from tests.support.sharded_verdict import check
from tests.support.workers import Workers

# torch says so where a model that recomputes by reentrant checkpoints is evaluated.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@seeds(range(12, 14))  # of the few none is refused, which takes until a collective times out
def test_a_few(workers: Workers, seed: int) -> None:
    recipe = draw(seed)
    check(workers, recipe, train, [recipe])
