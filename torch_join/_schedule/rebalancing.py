"""Rebalancing over several epochs."""

from collections.abc import Callable
from typing import Any

from torch_join._base.errors import JoinError, JoinPerformanceWarning, JoinTypeError
from torch_join._base.membership import Membership
from torch_join._control.channel import Channel
from torch_join._schedule.batch_exchange import Exchange, connections_of, find_problem
from torch_join._schedule.packing import pack
from torch_join._schedule.plan import Plan
from torch_join._schedule.rebalancer import Meet, Rebalancer, Source

_AT_ONCE = 2**30  # the most bytes of batches that a rank gives away in one step
_Begin = tuple[int | None, bool, int, int, bool, str, str]  # exchanged at an epoch's start, in `Rebalancing.begin`


class Rebalancing:
    """The state that outlives an epoch: the group that sends batches, made in the first epoch that may need it.

    Args:
        members: The ranks.
        enabled: Whether batches are rebalanced at all; if not, there is never anything to do.

    Attributes:
        current: The current epoch's rebalancer, if there is anything to rebalance in it.
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
        """How many batches this rank has given away, and received, in the current or last epoch."""
        return (0, 0) if self.current is None else (self.current.donated, self.current.received)

    def begin(
        self,
        channel: Channel,
        source: Source,
        length: int | None,
        meet: Meet | None = None,
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
        """Start an epoch; all ranks meet.

        Args:
            channel: The ranks' channel.
            source: This rank's batches.
            length: Their number from here on, if known.
            meet: See `Rebalancer`.
            lead: See `Rebalancer`.
            count: See `Rebalancer`.
            step: The number of the first step.
            taken: How many of this rank's batches were trained on in the steps before.
            max_sent_per_step: How many this rank may give away in a step; by default as its first batch allows.
            is_certain: Whether that length is certain.
            leaves: Whether this rank has left the epoch before, and neither trains nor gives.
            meets: Whether all meet before each step even if all ranks' lengths are certain.
            always: Whether to plan even if all ranks are certain to have the same number of batches.

        Returns:
            The epoch's rebalancer; `None` if all ranks are certain to have the same number of batches.

        Raises:
            JoinError: This rank cannot send batches.
            PeerFailedError: Another rank cannot.
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
            channel.gather(None)  # raises the error that they report
        if self._exchange is None:
            # A rank on which an error has ended the last exchange has none, while others may have theirs.
            self._exchange = Exchange(self._members.group, channel, [name for *_, name in everyone])
            if self._exchange.is_new:
                channel.gather(None)  # all have read the addresses of the others
                self._exchange.tidy()
        plan = Plan(lengths, [most for _, _, most, *_ in everyone], [taken for *_, taken, _, _, _ in everyone])
        plan.leave([rank for rank, (*_, left, _, _) in enumerate(everyone) if left])
        self.current = Rebalancer(channel, self._exchange, source, plan, lead, count, step, meets or not is_known, meet)
        self.current.begin()
        return self.current

    def close(self) -> None:
        """End, when all ranks are done with the batches that they were given."""
        self.current, exchange, self._exchange = None, self._exchange, None
        if exchange is not None:
            exchange.close()

    def abandon(self) -> None:
        """End after an error, without waiting; does nothing after `close`."""
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
