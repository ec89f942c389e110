"""Units that are gathered for nothing, that begin to train in the middle of a loop, and what a joined rank keeps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.sharded.test_exactness import check
from tests.support.inside import channel_of, keys_of
from tests.support.sharded import EPOCHS, Batch, Recipe, weights
from tests.support.sharding import PATIENCE, Training
from tests.support.workers import Workers


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
                counts.append(keys_of(channel_of(join)))
    return counts


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_a_long_tail_leaves_little_in_the_store(workers: Workers, api: str) -> None:
    counts = workers.run(2, keys_in_the_tail, api, **PATIENCE)[1]
    assert counts[1] < counts[0] + 40  # the records of a step or two


# Whether a block trains from a step on; None: as before.
FREEZES: dict[str, Callable[[int, int], bool | None]] = {
    "unfreezes": lambda epoch, step: epoch > 0 or step > 0,
    "unfreezes in the tail": lambda epoch, step: True if (epoch, step) == (0, 4) else None,
    "freezes in the tail": lambda epoch, step: False if (epoch, step) == (0, 4) else None,
    "toggles": lambda _, step: step % 2 == 0,
}


class Freezing(Training):
    """The active ranks freeze and unfreeze a block, and change its mode alike."""

    def __init__(self, rank: int, recipe: Recipe, how: str) -> None:
        super().__init__(rank, recipe)
        self.how = how
        self.set(self.model, how == "freezes in the tail")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def set(self, model: Any, trains: bool | None) -> None:
        if trains is not None:
            model.blocks[1].requires_grad_(trains).train(trains)

    def step(self, epoch: int, step: int, batch: Batch) -> None:
        self.set(self.model, FREEZES[self.how](epoch, step))
        super().step(epoch, step, batch)


def train_freezing(rank: int, recipe: Recipe, hows: list[str]) -> list[tuple[dict[str, Tensor], list[bool]]]:
    found = []
    for how in hows:
        training = Freezing(rank, recipe, how)
        state = training.run().state
        block = training.model.blocks[1]
        found.append((state, [block.training, *(p.requires_grad for p in block.parameters())]))
    return found


def reference_freezing(recipe: Recipe, how: str) -> dict[str, Tensor]:
    net = recipe.model()
    net.blocks[1].requires_grad_(how == "freezes in the tail")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(EPOCHS):
        data = [recipe.batches(epoch, rank) for rank in range(recipe.world_size)]
        for step in range(max(recipe.lengths)):
            if (trains := FREEZES[how](epoch, step)) is not None:
                net.blocks[1].requires_grad_(trains)
            here = {rank: mine[step] for rank, mine in enumerate(data) if step < len(mine)}
            counts = weights(recipe.weighting, recipe.world_size, {rank: len(x) for rank, (x, _) in here.items()})
            optimizer.zero_grad()
            for rank, batch in here.items():
                for loss in recipe.losses(net, batch, rank):
                    (counts[rank] * loss).backward()
            if recipe.clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
            optimizer.step()
    return net.state_dict()


SECOND = Recipe((6, 3))
FROZEN = {
    "FSDP2": SECOND,
    "FSDP2 clip": SECOND.but(lengths=(0, 5, 2), weighting="samples", clip=0.3),
    "FSDP2 to zero": SECOND.but(clears="zero_grad to zero"),
    "FSDP1": SECOND.but(api="fsdp1", weighting="samples"),
    "FSDP1 no batch": SECOND.but(lengths=(0, 5, 2), api="fsdp1"),
    "FSDP1 flat": SECOND.but(api="fsdp1", options={"original": False}),
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_block_that_is_frozen_and_unfrozen_in_the_loop(workers: Workers, name: str) -> None:
    recipe = FROZEN[name]
    hows = ["unfreezes"] if name == "FSDP1 flat" else [*FREEZES]
    ranks = workers.run(recipe.world_size, train_freezing, recipe, hows, **PATIENCE)
    for index, how in enumerate(hows):
        wanted = reference_freezing(recipe, how)
        for found in ranks:
            state, flags = found[index]
            assert max(float((state[key] - wanted[key]).abs().max()) for key in wanted) <= recipe.tolerance, how
            assert flags == ranks[0][index][1], how


def holds_gathered(rank: int) -> bool:
    recipe = Recipe((5, 2))
    training = Training(rank, recipe)
    with training.joined() as join:
        for step, batch in enumerate(join.batches(recipe.batches(0, rank))):
            training.step(0, step, batch)
    return training.model._get_fsdp_state()._comm_ctx.all_gather_state is not None


def test_a_joined_rank_keeps_no_output_of_a_gather(workers: Workers) -> None:
    assert workers.run(2, holds_gathered, **PATIENCE) == [False, False]
