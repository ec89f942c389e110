"""Units that are gathered for nothing, that begin to train in the middle of a loop, and what a joined rank keeps."""

from typing import Any

import pytest
import torch

from tests.core.sharded.test_exactness import check
from tests.support.sharded import Recipe, Trained, differences
from tests.support.sharding import PATIENCE, Padded, Training
from tests.support.workers import Workers


def test_what_was_gathered_ahead_and_is_not_used(workers: Workers) -> None:
    recipe = Recipe((5, 2), kind="skipping")
    check(workers, {f"reshard={it}": recipe.but(options={"prefetch": True, "reshard": it}) for it in (False, True)})


class Unfreezing(Training):
    """A block trains from the second step on."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        super().__init__(rank, recipe)
        self.model.blocks[1].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, epoch: int, step: int, batch: Any) -> None:
        self.model.blocks[1].requires_grad_(epoch > 0 or step > 0)
        super().step(epoch, step, batch)


class PaddedUnfreezing(Unfreezing, Padded):
    pass


def train_unfreezing(rank: int, recipe: Recipe) -> tuple[Trained, Trained]:
    return Unfreezing(rank, recipe).run(), PaddedUnfreezing(rank, recipe).run()


@pytest.mark.parametrize("clears", ["zero_grad", "zero_grad to zero"])
@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_a_block_that_is_unfrozen_in_the_loop(workers: Workers, api: str, clears: str) -> None:
    recipe = Recipe((7, 3), api=api, clears=clears)
    for rank, (mine, wanted) in enumerate(workers.run(2, train_unfreezing, recipe, **PATIENCE)):
        wanted = wanted._replace(moments={})
        assert max(differences(mine._replace(moments={}), rank, wanted, recipe).values()) <= recipe.tolerance


def holds_gathered(rank: int) -> bool:
    recipe = Recipe((5, 2))
    training = Training(rank, recipe)
    with training.joined() as join:
        for step, batch in enumerate(join.batches(recipe.batches(0, rank))):
            training.step(0, step, batch)
    return training.model._get_fsdp_state()._comm_ctx.all_gather_state is not None


def test_a_joined_rank_keeps_no_output_of_a_gather(workers: Workers) -> None:
    assert workers.run(2, holds_gathered, **PATIENCE) == [False, False]
