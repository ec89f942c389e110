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

FEW = range(12)
FIRST = int(os.environ.get("TORCH_JOIN_SEED", FEW.stop))


def check(workers: Workers, recipe: Recipe, folder: Path) -> None:
    found = verdict(workers, recipe, train_by_lightning, recipe, str(folder))
    assert found.startswith(("right", "refused")), f"{recipe}\n{found}"


@pytest.mark.parametrize("seed", FEW)
def test_a_few(workers: Workers, seed: int, tmp_path: Path) -> None:
    check(workers, draw_for_lightning(seed), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_many(workers: Workers, seed: int, tmp_path: Path) -> None:
    check(workers, draw_for_lightning(seed), tmp_path)
