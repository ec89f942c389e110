"""Rebalancing across epochs."""

from torch_join._base.errors import JoinError, JoinPerformanceWarning, JoinTypeError
from torch_join._base.membership import Membership
from torch_join._control.channel import Channel
from torch_join._schedule.batch_exchange import Exchange, connections_of, find_problem
from torch_join._schedule.packing import pack
from torch_join._schedule.plan import Plan
from torch_join._schedule.rebalancer import Meet, Rebalancer, Source

_AT_ONCE = 2**30  # the most bytes of batches that a rank sends in one step
_Begin = tuple[int | None, bool, int, int, bool, str, str]  # exchanged at an epoch's start, in `Rebalancing.begin`


class Rebalancing:
    """The state that outlives an epoch: the group that sends batches, created in the first epoch that may need it.

    Args:
        members: The ranks.
        enabled: Whether batches are rebalanced at all.

    Attributes:
        current: The current epoch's rebalancer, if the epoch needs rebalancing.
    """

    def __init__(self, members: Membership, enabled: bool = True) -> None:
        self._members = members
        self._exchange: Exchange | None = None
        self.enabled = enabled and members.world_size > 1
        self.current: Rebalancer | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of batches that this rank has sent."""
        return self._exchange.nbytes if self._exchange is not None else 0

    @property
    def exchanged(self) -> tuple[int, int]:
        """How many batches this rank has sent, and received, in the current or last epoch."""
        return (0, 0) if self.current is None else (self.current.donated, self.current.received)

    def begin(
        self,
        channel: Channel,
        source: Source,
        length: int | None,
        meet: Meet | None = None,
        *,
        step: int = 0,
        max_sent_per_step: int | None = None,
        is_certain: bool = True,
        leaves: bool = False,
        always: bool = False,
    ) -> Rebalancer | None:
        """Start an epoch; all ranks meet.

        Args:
            channel: The ranks' channel.
            source: This rank's batches.
            length: The number of its batches from here on, if known.
            meet: Holds a meeting of the ranks if some length is not certain; by default, all ranks meet in each step.
            step: The number of the first step.
            max_sent_per_step: How many batches this rank may send in a step; by default, the first one's size decides.
            is_certain: Whether `length` is certain.
            leaves: Whether this rank has already left the epoch, and neither trains nor sends batches.
            always: Whether to plan even if all ranks are certain to have the same number of batches.

        Returns:
            The epoch's rebalancer; `None` if all ranks are certain to have the same number of batches.

        Raises:
            JoinError: This rank cannot send batches.
            PeerFailedError: Another rank cannot send batches.
        """
        self.current = None
        max_sent_per_step = max_sent_per_step_of(source) if max_sent_per_step is None else max_sent_per_step
        problem = find_problem()
        own = source.taken, leaves, problem, connections_of(self._members.group)
        mine = length, is_certain, max_sent_per_step, *own
        everyone = channel.gather(mine, of=_Begin)
        lengths = [length for length, *_ in everyone]
        is_known = all(certain for _, certain, *_ in everyone) and None not in lengths
        if is_known and len({*lengths}) == 1 and not always:
            return None
        if problem:
            raise JoinError(problem)
        if any(theirs for *_, theirs, _ in everyone):
            channel.gather(None)  # raises the error that those ranks report
        if self._exchange is None:
            # A rank whose last exchange ended with an error has no connections, while other ranks may have theirs.
            self._exchange = Exchange(self._members.group, channel, [name for *_, name in everyone])
            if self._exchange.is_new:
                channel.gather(None)  # all ranks have read each other's addresses
                self._exchange.tidy()
        plan = Plan(lengths, [most for _, _, most, *_ in everyone], [taken for *_, taken, _, _, _ in everyone])
        plan.leave([rank for rank, (*_, left, _, _) in enumerate(everyone) if left])
        meets, count = meet is None or not is_known, self._members.count
        self.current = Rebalancer(channel, self._exchange, source, plan, count, step, meets, meet)
        self.current.begin()
        return self.current

    def close(self) -> None:
        """Wait until other ranks have received the batches that this rank sent; then end."""
        self.current, exchange, self._exchange = None, self._exchange, None
        if exchange is not None:
            exchange.close()

    def abandon(self) -> None:
        """End after an error, without waiting; does nothing after `close`."""
        self.current, exchange, self._exchange = None, self._exchange, None
        if exchange is not None:
            exchange.abandon()


def max_sent_per_step_of(source: Source) -> int:
    """Return how many batches may be sent in a step, by the size of the first one; 0 if it cannot be sent."""
    if not source.read(1):
        return 0
    batch = source.peek()
    try:
        _, contents = pack(batch)
    except JoinTypeError as error:
        JoinPerformanceWarning.warn(
            f"{error}. So this rank trains on all of its batches itself. Yield tensors in lists and dictionaries."
        )
        return 0
    return max(1, _AT_ONCE // max(1, sum(map(len, contents))))
