"""The driver of participants inside the steps of a lockstep loop."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from torch_join._base.membership import MeetingPoint, Membership, Role
from torch_join._base.weighting import count_samples
from torch_join._collectives.backwards import late
from torch_join._collectives.tap import Call, CollectiveTap
from torch_join._compat.operators import in_backward
from torch_join._control.channel import Channel
from torch_join._participants.options import Options
from torch_join._participants.participant import Driver, Participant
from torch_join._participants.ray import RayParticipant, runs_in_ray
from torch_join._schedule.rebalancing import Rebalancing
from torch_join._tail.remarks import LOG
from torch_join._tail.tail_log import DONE, TailLog

P = TypeVar("P", bound=Participant)


def _refuse(call: Call) -> None:
    raise late(call.operation)


class StepDriver(Driver):
    """The driver of loops that a framework runs: joined ranks mirror the active ranks' actions in a step.

    In such a loop all ranks run every step, and know which ranks are active. So a joined rank serves one step at a
    time, until the active ranks report its end.

    Args:
        channel: The channel between all ranks of the job.
        options: The user's options.
        sizes: Returns a batch's number of samples.

    Attributes:
        members: Which ranks are active.
        tail_log: Where participants announce their actions, and where joined ranks mirror them.
        has_loss: Whether this rank has a loss in this step; on a joined rank, whether the lowest active rank has one.
        parting: Plain values that the front end of the lowest active rank sends to those of joined ranks at the end of
            its step; these find them here.
        framework: See `Remarks`.
        synced_backwards: The number of synced backwards so far, the same on all ranks.
        rebalancing: Rebalances batches, if that is enabled.
    """

    # For participants: there is always a meeting before the step.
    meets_at = MeetingPoint.TOP
    sees_steps = True
    tail_log: TailLog
    has_loss = True
    synced_backwards = 0
    framework = LOG.name

    def __init__(
        self,
        channel: Channel,
        options: Options = Options(),  # noqa: B008  frozen
        sizes: Callable[[Any], int] = count_samples,
    ) -> None:
        group = dist.group.WORLD if dist.is_initialized() else None
        self.options = options
        self.parting: list[Any] = []
        self.members = Membership(group, options.weighting, sizes=sizes)
        self.rebalancing = Rebalancing(self.members, options.rebalance)
        self.tail_log = TailLog(self.members)
        self.tail_log.open(channel)
        self.tail_log.backwards.always = options.backward_collectives
        self.tail_log.backwards.reset()
        if runs_in_ray():
            self.add(RayParticipant)

    def before_forward(self, count: Callable[[], float], waits: bool = True) -> bool:
        """Do nothing, since the ranks have met."""
        return True

    # ------------------------------------------------------------ called by the framework's loop

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks that have a batch, inside a step of the tail; otherwise `None`."""
        members = self.members
        return members.active if members.role is not Role.EVEN and not self.tail_log.on_all else None

    def add(self, make: Callable[[Driver, int], P]) -> P:
        """Add a participant in steps, and install it; `make` is called with this object and an index."""
        participant = make(self, len(self.tail_log.participants))
        self.tail_log.participants.append(participant)
        participant.enter()
        return participant

    def close(self) -> None:
        """Remove all that was installed."""
        self.tail_log.close()
        self.rebalancing.abandon()
        self.members.group = None  # so that a group that is destroyed closes its connections at once

    @contextmanager
    def step(self, active: tuple[int, ...], listens: bool = True) -> Iterator[None]:
        """Wrap an active rank's part of a step, in whose communication joined ranks take part.

        Args:
            active: The ranks that have a batch.
            listens: Whether joined ranks take part in collectives too, or only follow announcements of participants.
        """
        tail_log, members = self.tail_log, self.members
        tail_log.begin_step(active)
        if not members.uneven:
            yield
            return
        if listens:
            tail_log.agreement.compare(members.rank, active)
        members.take_role(Role.TAIL)
        if listens:
            tail_log.tap.install()
        try:
            yield
            tail_log.announce(-1, DONE, (tail_log.in_pieces, self.has_loss, self.parting))
            self.parting = []
        finally:
            members.take_role(Role.EVEN)
            tail_log.tap.remove()

    def backward(self) -> AbstractContextManager[None]:
        """Wrap an active rank's backward, after a step in the tail: collectives raise, except DDP's and ours.

        Joined ranks have no counterpart for them. Hooks before and after it issue the same collectives on all ranks.
        """
        has_joined = self.members.has_joined
        return self.tail_log.listening(CollectiveTap(_refuse, lambda rank: in_backward() and has_joined(rank)))

    @contextmanager
    def serving_backward(self, active: tuple[int, ...]) -> Iterator[None]:
        """Wrap autograd's part of an active rank's backward, after a step in the tail; it is served like a step."""
        tail_log = self.tail_log
        with self.step(active, listens=False):
            tail_log.tap.install()
            yield

    def follow(self, active: tuple[int, ...]) -> bool:
        """Serve, on a joined rank, the active ranks in a step, until they have finished it.

        Returns:
            Whether their backward is served like a step, too.
        """
        self.tail_log.begin_step(active)
        backwards = self.tail_log.backwards
        in_pieces, self.has_loss, reported = self.tail_log.follow(DONE)
        self.parting += reported
        backwards.in_pieces = in_pieces or backwards.in_pieces
        return backwards.in_pieces

    def leave_tail(self) -> None:
        """Record that all ranks have finished an evaluation, some before others."""
        for each in self.tail_log.participants:
            each.leave_tail()
