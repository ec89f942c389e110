"""The gradients at the end of a tail: a rank that had joined gets its own into the state that the others' are in."""

import math
from collections.abc import Sequence

import torch.distributed as dist

from torch_join._base.errors import JoinError
from torch_join._shadow.zero_gradient import broadcast_gradient
from torch_join.joinables._gradients.evidence import Gradients, holds_something
from torch_join.joinables._gradients.verdicts import CHANGED, State
from torch_join.joinables.part import Driver


def settle(
    driver: Driver,
    group: dist.ProcessGroup,
    gradients: Gradients,
    states: Sequence[State],
    source: int,
    accumulates: bool,
    mine_accumulate: bool,
) -> None:
    """Clear, on every rank, what was cleared on the source, and send what was changed there.

    Args:
        driver: What the model's part belongs to.
        group: The model's process group.
        gradients: Those of this rank.
        states: What has become of the source's (on other ranks that were active to the end: of their own).
        source: The rank whose state all take.
        accumulates: Whether the source is amid an accumulation: each rank then has its own share.
        mine_accumulate: Whether this rank is, or was when it joined.

    Raises:
        JoinError: The source has changed its share by hand, and this rank, which had joined, cannot.
    """
    joined = driver.members.rank != source and not driver.members.last_joiner
    mine: list[int] = []
    if driver.members.rank == source and not accumulates:
        # A norm that is infinite does not tell whether they are unscaled.
        odd = [state.norm is not None and not math.isfinite(state.norm) for state in states]
        mine = [index for index, state in enumerate(states) if state.verdict == CHANGED or odd[index]]
    elif joined:
        if accumulates:
            raise_if_lost(gradients, states)
        mine = gradients.differing(states, mine_accumulate)
    # All send the same, whatever each has seen.
    changed = {index for found in driver.server.channel.gather(mine, of=list[int]) for index in found}
    if joined:
        gradients.follow(states, mine_accumulate, None)
    for index in sorted(changed):
        broadcast_gradient(gradients.parameters[index], source, group)


def raise_if_lost(gradients: Gradients, states: Sequence[State]) -> None:
    """Raise on a joined rank that holds a share of a gradient which the source has changed by hand.

    Raises:
        JoinError: It does.
    """
    for index, (parameter, state) in enumerate(zip(gradients.parameters, states, strict=True)):
        if state.verdict == CHANGED and holds_something(parameter.grad):
            raise JoinError(
                f"A gradient (parameter {index}, of shape {tuple(parameter.shape)}) was changed by hand while it was"
                " accumulated, and the loop has ended before it was averaged. This rank had joined and holds a share"
                " of it, which it cannot change alike. Change gradients only right before the optimizer's step."
            )
