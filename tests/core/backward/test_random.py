"""A random search over programs with collectives at random places of forward, loss and backward."""

from tests.core.backward.programs import draw, train
from tests.support.many import seeds
from tests.support.run import TOLERANCE, difference, reference, same_bits
from tests.support.workers import Workers


@seeds(range(3))
def test_a_few(workers: Workers, seed: int) -> None:
    recipe = draw(seed)
    results = workers.run(recipe.world_size, train, recipe, deadline=60.0, timeout=20.0)
    expected = reference(recipe)
    wanted = [*expected.parameters, *expected.buffers]
    for result in results:
        assert difference(result, wanted) <= TOLERANCE, recipe
        assert same_bits(result, results[0]), recipe
