"""Units that are gathered for nothing, that begin to train in the middle of a loop, and what a joined rank keeps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.core.sharded.exact import check
from tests.covering import others_long
from tests.support.front_ends.sharded import PATIENCE, Training
from tests.support.sharded import Recipe, Trained, differences, expected_of
from tests.support.workers import Workers


def test_what_was_gathered_ahead_and_is_not_used(workers: Workers) -> None:
    recipe = Recipe((5, 2), model="skipping")
    check(workers, {f"reshard={it}": recipe.but(options={"prefetch": True, "reshard": it}) for it in (False, True)})


# Whether a block trains from a step on; None: as before.
FREEZES: dict[str, Callable[[int, int], bool | None]] = {
    "unfreezes": lambda epoch, step: epoch > 0 or step > 0,
    "unfreezes in the tail": lambda epoch, step: True if (epoch, step) == (0, 4) else None,
    "freezes in the tail": lambda epoch, step: False if (epoch, step) == (0, 4) else None,
    "toggles": lambda _, step: step % 2 == 0,
}


@dataclass(frozen=True)
class Freezing(Recipe):
    """The active ranks freeze and unfreeze a block, and change its mode alike."""

    optimizer: str = "plain"
    how: str = "unfreezes"

    def before_step(self, net: Any, epoch: int, step: int) -> None:
        trains = FREEZES[self.how](epoch, step) if step >= 0 else None
        if (epoch, step) == (0, -1):
            trains = self.how == "freezes in the tail"
        if trains is not None:
            net.blocks[1].requires_grad_(trains).train(trains)

    def make_optimizer(self, parameters: Any, kind: str = "", sharded: bool = False) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)  # of what is frozen at first, too


def train_freezing(rank: int, recipe: Freezing, hows: list[str]) -> list[tuple[Trained, list[bool]]]:
    found = []
    for how in hows:
        training = Training(rank, recipe.but(how=how))
        trained = training.run_epochs()
        block = training.model.blocks[1]
        found.append((trained, [block.training, *(p.requires_grad for p in block.parameters())]))
    return found


SECOND = Freezing((6, 3))
FROZEN = {
    "FSDP2": SECOND,
    "FSDP2 clip": SECOND.but(lengths=(0, 5, 2), weighting="samples", clip=0.3),
    "FSDP2 to zero": SECOND.but(clears="zero_grad to zero"),
    "FSDP1": SECOND.but(api="fsdp1", weighting="samples"),
    "FSDP1 no batch": SECOND.but(lengths=(0, 5, 2), api="fsdp1"),
    "FSDP1 flat": SECOND.but(api="fsdp1", options={"original": False}),
}


@pytest.mark.parametrize("name", others_long(FROZEN, "FSDP2", "FSDP2 to zero", "FSDP1 no batch"))
def test_a_block_that_is_frozen_and_unfrozen_in_the_loop(workers: Workers, name: str) -> None:
    recipe = FROZEN[name]
    hows = ["unfreezes"] if name == "FSDP1 flat" else [*FREEZES]
    ranks = workers.run(recipe.world_size, train_freezing, recipe, hows, **PATIENCE)
    for index, how in enumerate(hows):
        wanted = expected_of(recipe.but(how=how))
        for rank, found in enumerate(ranks):
            trained, flags = found[index]
            assert max(differences(trained, rank, wanted, recipe).values()) <= recipe.tolerance, how
            assert flags == ranks[0][index][1], how
