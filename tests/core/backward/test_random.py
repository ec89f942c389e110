"""A random search over programs with collectives at random places of forward, loss and backward.

`-m long` runs 300 of them, or as many as TORCH_JOIN_CASES says, from the seed TORCH_JOIN_SEED on.
"""

import os

import pytest
import torch

from tests.core.backward.recipes import draw, reference, train
from tests.support.sharded_verdict import CASES
from tests.support.workers import Workers

FEW = range(5)
FIRST = int(os.environ.get("TORCH_JOIN_SEED", FEW.stop))


def check(workers: Workers, seed: int) -> None:
    recipe = draw(seed)
    results = workers.run(recipe.world_size, train, recipe, deadline=60.0, timeout=20.0)
    wanted = reference(recipe)
    for result in results:
        for ours, theirs in zip(result, wanted, strict=True):
            assert (ours - theirs).abs().max() <= 1e-10, recipe
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True)), recipe


@pytest.mark.parametrize("seed", FEW)
def test_a_few(workers: Workers, seed: int) -> None:
    check(workers, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_many(workers: Workers, seed: int) -> None:
    check(workers, seed)
