"""Units that are gathered for nothing, that begin to train in the middle of a loop, and what a joined rank keeps."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.core.sharded.test_exactness import check
from tests.support.inside import DELETES_AFTER_PLACE, channel_of, store_of
from tests.support.sharded import EPOCHS, Batch, Recipe, weights
from tests.support.sharding import PATIENCE, Training
from tests.support.workers import Workers
from torch_join.joinables._sharded.following import Following


def test_what_was_gathered_ahead_and_is_not_used(workers: Workers) -> None:
    recipe = Recipe((5, 2), kind="skipping")
    check(workers, {f"reshard={it}": recipe.but(options={"prefetch": True, "reshard": it}) for it in (False, True)})


def keys_in_the_tail(rank: int, api: str) -> list[int]:
    recipe = Recipe((1, 60), api=api)
    training = Training(rank, recipe)
    counts = []
    with training.joined() as join:
        for step, batch in enumerate(join.batches(recipe.batches(0, rank))):
            training.step(0, step, batch)
            if step in (10, 59):
                time.sleep(0.8)  # threads delete four times a second
                counts.append(store_of(channel_of(join)).num_keys())
    return counts


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_a_long_tail_leaves_little_in_the_store(workers: Workers, api: str) -> None:
    counts = workers.run(2, keys_in_the_tail, api, **PATIENCE)[1]
    assert counts[1] < counts[0] + 40  # the records of a step or two


def train_with_one_who_reads_late(rank: int, recipe: Recipe) -> float:
    answer = Following.answer

    def late(self: Following, kind: str, payload: Any) -> None:
        answer(self, kind, payload)
        time.sleep(0.4)  # threads delete four times a second

    at_once = mock.patch.object(*DELETES_AFTER_PLACE, 0)
    with at_once, mock.patch.object(Following, "answer", late if rank == 3 else answer):
        training = Training(rank, recipe)
        with training.joined() as join:
            for step, batch in enumerate(join.batches(recipe.batches(0, rank))):
                training.step(0, step, batch)
    return float(sum(parameter.full_tensor().sum() for parameter in training.model.parameters()))


def test_a_record_stays_until_all_have_read_it(workers: Workers) -> None:
    recipe = Recipe((2, 1, 1, 1), options={"reshard": 2})  # ranks 0 and 1 gather together in backward
    assert len({*workers.run(4, train_with_one_who_reads_late, recipe, **PATIENCE)}) == 1


class Unfreezing(Training):
    """A block trains from the second step on."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        super().__init__(rank, recipe)
        self.model.blocks[1].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self, epoch: int, step: int, batch: Batch) -> None:
        self.model.blocks[1].requires_grad_(epoch > 0 or step > 0)
        super().step(epoch, step, batch)


def train_unfreezing(rank: int, recipes: list[Recipe]) -> list[dict[str, Tensor]]:
    return [Unfreezing(rank, recipe).run().state for recipe in recipes]


def reference_unfreezing(recipe: Recipe) -> dict[str, Tensor]:
    net = recipe.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(EPOCHS):
        data = [recipe.batches(epoch, rank) for rank in range(recipe.world_size)]
        for step in range(max(recipe.lengths)):
            net.blocks[1].requires_grad_(epoch > 0 or step > 0)
            here = {rank: mine[step] for rank, mine in enumerate(data) if step < len(mine)}
            counts = weights(recipe.weighting, recipe.world_size, {rank: len(x) for rank, (x, _) in here.items()})
            optimizer.zero_grad()
            for rank, batch in here.items():
                for loss in recipe.losses(net, batch, rank):
                    (counts[rank] * loss).backward()
            optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("weighting", ["world", "samples"])
def test_a_block_that_is_unfrozen_in_the_loop(workers: Workers, weighting: str) -> None:
    second = Recipe((6, 3), weighting=weighting)
    first = second.but(api="fsdp1")
    recipes = [second, second.but(clears="zero_grad to zero"), first, first.but(options={"original": False})]
    for states in workers.run(2, train_unfreezing, recipes, **PATIENCE):
        for recipe, mine in zip(recipes, states, strict=True):
            wanted = reference_unfreezing(recipe)
            assert max(float((mine[name] - wanted[name]).abs().max()) for name in wanted) <= recipe.tolerance, recipe


def holds_gathered(rank: int) -> bool:
    recipe = Recipe((5, 2))
    training = Training(rank, recipe)
    with training.joined() as join:
        for step, batch in enumerate(join.batches(recipe.batches(0, rank))):
            training.step(0, step, batch)
    return training.model._get_fsdp_state()._comm_ctx.all_gather_state is not None


def test_a_joined_rank_keeps_no_output_of_a_gather(workers: Workers) -> None:
    assert workers.run(2, holds_gathered, **PATIENCE) == [False, False]
