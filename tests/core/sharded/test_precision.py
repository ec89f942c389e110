"""Sharded models in lower precision, against FSDP itself on ranks that are padded with batches that count nothing."""

from typing import Any

import pytest
import torch

from tests.covering import others_long
from tests.support.front_ends.sharded import PATIENCE, Padded, Training, train, train_padded
from tests.support.sharded import Batch, Recipe, Trained, differences, expected_of
from tests.support.workers import Workers

LOW, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
SECOND: list[dict[str, Any]] = [
    {"param_dtype": LOW, "reduce_dtype": FULL},
    {"param_dtype": LOW, "reduce_dtype": LOW},
    {"param_dtype": LOW},
    {"reduce_dtype": HALF},
]
FIRST: list[dict[str, Any]] = [
    {"param_dtype": LOW, "reduce_dtype": FULL},
    {"param_dtype": LOW, "reduce_dtype": LOW},
    {"param_dtype": LOW},
    {"reduce_dtype": LOW},
]


def check_bits(workers: Workers, recipes: list[Recipe]) -> None:
    wanted = workers.run(3, train_padded, recipes, **PATIENCE)
    found = workers.run(3, train, recipes, **PATIENCE)
    for rank in range(3):
        for recipe, theirs, mine in zip(recipes, wanted[rank], found[rank], strict=True):
            for name, value in theirs.state.items():
                assert torch.equal(mine.state[name], value), (recipe, name)
            assert max(float(value.abs().max()) for value in theirs.state.values()) < 10


@pytest.mark.parametrize("first", others_long([0, 1], 0))
@pytest.mark.parametrize("api", others_long(["fsdp2", "fsdp1"], "fsdp2"))
def test_mixed_precision_is_the_same_bit_for_bit(workers: Workers, api: str, first: int) -> None:
    recipe = Recipe((4, 7, 0), api=api, dtype=FULL)
    policies = [{"precision": policy} for policy in (SECOND if api == "fsdp2" else FIRST)]
    synced = [recipe.but(options=options) for options in policies]
    windows = [recipe.but(options=options, accumulate=3, no_sync=True) for options in policies]
    check_bits(workers, synced[first::2] + windows[1 - first :: 2])


@pytest.mark.parametrize("api", others_long(["fsdp2", "fsdp1"], "fsdp1"))
def test_steps_that_a_scaler_skips(workers: Workers, api: str) -> None:
    recipe = Recipe((4, 7, 0), api=api, dtype=FULL, scaler=2.0**127, optimizer="sgd")  # infinite here and there
    check_bits(workers, [recipe, recipe.but(clip=0.3), recipe.but(accumulate=3, no_sync=True)])


@pytest.mark.parametrize("api", others_long(["fsdp2", "fsdp1"], "fsdp2"))
def test_scaler_and_clipping_in_float32(workers: Workers, api: str) -> None:
    recipes = [
        Recipe((2, 5), api=api, dtype=FULL, scaler=4096.0, optimizer="sgd"),
        Recipe((5, 2), api=api, dtype=FULL, clip=0.3, optimizer="sgd"),  # FSDP1 clips no float64
        Recipe((0, 4), api=api, dtype=FULL, scaler=4096.0, clip=0.3, optimizer="sgd", accumulate=2),
    ]
    outcomes = workers.run(2, train, recipes, **PATIENCE)
    for index, recipe in enumerate(recipes):
        wanted = expected_of(recipe)
        for rank in range(2):
            found = differences(outcomes[rank][index], rank, wanted, recipe)
            assert max(found.values()) < recipe.tolerance, (recipe, found)


class Fused(Training):
    """An optimizer that scales, and skips steps, by itself; a loss of one rank is infinite in the tail."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        super().__init__(rank, recipe)
        kind: Any = torch.optim.AdamW if recipe.api == "fsdp2" else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=0.01, fused=True)

    def step(self, epoch: int, step: int, batch: Batch) -> None:
        x, y = batch
        # Of FSDP1's scaler torch sums what each rank has found, and a fused optimizer skips at 1 only.
        infinite = step == 5 and self.rank == epoch % 2 and self.recipe.api == "fsdp2"
        super().step(epoch, step, (x * float("inf"), y) if infinite else batch)


class PaddedFused(Fused, Padded):
    pass


def train_fused(rank: int, recipe: Recipe) -> tuple[Trained, Trained]:
    return Fused(rank, recipe).run_epochs(), PaddedFused(rank, recipe).run_epochs()


@pytest.mark.covering(1)
@pytest.mark.parametrize("clip", [0.0, 0.3], ids=["not unscaled", "unscaled"])
@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_fused_optimizers_under_a_scaler(workers: Workers, api: str, clip: float) -> None:
    recipe = Recipe((7, 4), api=api, dtype=FULL, scaler=4096.0, clip=clip)
    for mine, wanted in workers.run(2, train_fused, recipe, **PATIENCE):
        for name, value in wanted.state.items():
            assert bool(value.isfinite().all())
            assert torch.equal(mine.state[name], value), name
