"""Rebalancing in one epoch after the other."""

from collections.abc import Callable
from typing import Any

from torch_join._base.errors import JoinError, JoinPerformanceWarning, JoinTypeError
from torch_join._base.membership import Membership
from torch_join._control.channel import Channel
from torch_join._schedule.batch_exchange import Exchange, connections_of, find_problem
from torch_join._schedule.packing import pack
from torch_join._schedule.plan import Plan
from torch_join._schedule.rebalancer import Meet, Rebalancer, Source

_AT_ONCE = 2**30  # bytes of batches that a rank gives away in one step, at most
_Begin = tuple[int | None, bool, int, int, bool, str, str]  # of an epoch: see `Rebalancing.begin`


class Rebalancing:
    """What outlives an epoch: the group over which batches travel, made in the first one that may need it.

    Args:
        members: The ranks.
        enabled: Whether batches are rebalanced at all; else there is never anything to do.

    Attributes:
        current: What goes through the current epoch, if there is anything to rebalance in it.
    """

    def __init__(self, members: Membership, enabled: bool = True) -> None:
        self._members = members
        self._exchange: Exchange | None = None
        self.enabled = enabled and members.world_size > 1
        self.current: Rebalancer | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that this rank has given away."""
        return self._exchange.nbytes if self._exchange is not None else 0

    @property
    def exchanged(self) -> tuple[int, int]:
        """How many batches this rank has given away in the current epoch, or the last one, and how many it got."""
        return (0, 0) if self.current is None else (self.current.donated, self.current.received)

    def begin(
        self,
        channel: Channel,
        source: Source,
        length: int | None,
        meet: Meet,
        *,
        lead: int = 1,
        count: Callable[[Any], float] | None = None,
        step: int = 0,
        taken: int = 0,
        max_sent_per_step: int | None = None,
        is_certain: bool = True,
        leaves: bool = False,
        meets: bool = True,
        always: bool = False,
    ) -> Rebalancer | None:
        """Begin an epoch; all ranks meet.

        Args:
            channel: The ranks' channel.
            source: This rank's batches.
            length: How many there are from here on, if that is known.
            meet: Meets all ranks that have a batch.
            lead: See `Rebalancer`.
            count: See `Rebalancer`.
            step: The number of the first step.
            taken: How many of this rank's batches were trained on in the steps before.
            max_sent_per_step: How many this rank may give away in a step; by default what its first batch allows.
            is_certain: Whether there can be no other number.
            leaves: Whether this rank has left the epoch before, and neither trains nor gives.
            meets: Whether all meet before each step also where there can be no other number on any rank.
            always: Whether there is a plan also where all ranks are certain to have as many batches.

        Returns:
            What goes through the epoch; `None` if all ranks are certain to have as many batches.

        Raises:
            JoinError: Nothing can be sent from here.
            PeerFailedError: The same of another rank.
        """
        self.current = None
        max_sent_per_step = max_sent_per_step_of(source) if max_sent_per_step is None else max_sent_per_step
        problem = find_problem()
        mine = length, is_certain, max_sent_per_step, taken, leaves, problem, connections_of(self._members.group)
        everyone = channel.gather(mine, of=_Begin)
        lengths = [length for length, *_ in everyone]
        is_known = all(certain for _, certain, *_ in everyone) and None not in lengths
        if is_known and len({*lengths}) == 1 and not always:
            return None
        if problem:
            raise JoinError(problem)
        if any(theirs for *_, theirs, _ in everyone):
            channel.gather(None)  # which raises what they tell
        if self._exchange is None:
            # A rank on which an error has ended the last one has none, as others may have.
            self._exchange = Exchange(self._members.group, channel, [name for *_, name in everyone])
            if self._exchange.is_new:
                channel.gather(None)  # all have read where the others are
                self._exchange.tidy()
        plan = Plan(lengths, [most for _, _, most, *_ in everyone], [taken for *_, taken, _, _, _ in everyone])
        plan.leave([rank for rank, (*_, left, _, _) in enumerate(everyone) if left])
        self.current = Rebalancer(channel, self._exchange, source, plan, lead, count, step, meets or not is_known)
        self.current.begin(meet)
        return self.current

    def close(self) -> None:
        """End, when all ranks are done with what they were given."""
        self.current, exchange, self._exchange = None, self._exchange, None
        if exchange is not None:
            exchange.close()

    def abandon(self) -> None:
        """End after an error, and wait for nobody; does nothing after `close`."""
        self.current, exchange, self._exchange = None, self._exchange, None
        if exchange is not None:
            exchange.abandon()


def max_sent_per_step_of(source: Source) -> int:
    """Return how many batches may be given away in a step, by the size of the first one; 0 if none can be."""
    if not source.read(1):
        return 0
    batch = source.peek()
    try:
        _, contents = pack(batch)
    except JoinTypeError as error:
        JoinPerformanceWarning.warn(
            f"{error}. So this rank trains on all of its batches itself: yield tensors in lists and dictionaries."
        )
        return 0
    return max(1, _AT_ONCE // max(1, sum(map(len, contents))))
