"""Two optimizers of one sharded model, of which one steps every second time with what has been accumulated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.front_ends.sharded import PATIENCE, Training, train
from tests.support.sharded import Recipe, differences, expected_of
from tests.support.workers import Workers

SPLITS: dict[str, Callable[[str], bool]] = {
    "units": lambda name: "blocks.1" in name,
    "biases": lambda name: name.endswith("bias"),  # units have parameters of both
}


@dataclass(frozen=True)
class OfTwo(Recipe):
    """The second one is cleared before every second step, and steps after it."""

    by: str = "units"

    def optimizers(self, net: nn.Module, sharded: bool = False) -> list[torch.optim.Optimizer]:
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, p in net.named_parameters():
            found[SPLITS[self.by](name)].append(p)
        return [torch.optim.AdamW(found[0], lr=0.02), torch.optim.RMSprop(found[1], lr=0.01, momentum=0.5)]

    def in_turn(self, optimizers: list[Any], step: int) -> list[Any]:
        return optimizers[: 1 + step % 2]

    def in_turn_to_clear(self, optimizers: list[Any], step: int) -> list[Any]:
        return optimizers[: 2 - step % 2]


@pytest.mark.parametrize(("api", "split"), [("fsdp2", "units"), ("fsdp2", "biases"), ("fsdp1", "units")])
def test_two_optimizers(workers: Workers, api: str, split: str) -> None:
    for recipe in (OfTwo((2, 5)), OfTwo((0, 4), weighting="samples"), OfTwo((5, 2, 0))):
        recipe = recipe.but(api=api, by=split)
        wanted = expected_of(recipe)
        for rank, mine in enumerate(workers.run(recipe.world_size, train, [recipe], **PATIENCE)):
            assert all(each <= recipe.tolerance for each in differences(mine[0], rank, wanted, recipe).values())


def train_one_epoch(rank: int, recipe: Recipe) -> None:
    training = Training(rank, recipe)
    with training.joined() as join:
        for step, batch in enumerate(join.batches(recipe.batches(rank, 0))):
            training.step(0, step, batch)


@pytest.mark.parametrize("lengths", [(2, 5), (5, 0, 0)], ids=["seen", "not in the shard"])
def test_a_flat_gradient_that_is_cleared_in_part(workers: Workers, lengths: tuple[int, ...]) -> None:
    # In the second case the one active rank's shard holds no bias.
    recipe = OfTwo(lengths, api="fsdp1", by="biases")
    for outcome in workers.outcomes(len(lengths), train_one_epoch, recipe, **PATIENCE):
        with pytest.raises(RuntimeError, match=r"A gradient .* was modified by hand"):
            raise RuntimeError(outcome.error)
