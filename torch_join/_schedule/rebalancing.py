"""Rebalancing, in one epoch and across epochs: a rank trains on its own batches, and on other ranks' batches."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch_join._base.errors import JoinError, JoinPerformanceWarning, JoinTypeError, JoinValueError
from torch_join._base.membership import Membership
from torch_join._control.channel import Channel
from torch_join._control.reports import BarrierResult
from torch_join._schedule.batch_exchange import Exchange, arrived, connections_of, find_problem
from torch_join._schedule.packing import pack
from torch_join._schedule.plan import Plan, Row, Share

_AT_ONCE = 2**30  # the most bytes of batches that a rank sends in one step
_Begin = tuple[int | None, bool, int, int, bool, str, str]  # exchanged at an epoch's start, in `Rebalancing.begin`


class Source(Protocol):
    """This rank's own batches.

    Attributes:
        lead: How many rows are planned besides the current one.
        taken: How many batches were trained on before.
    """

    lead: int
    taken: int

    def read(self, ahead: int) -> int:
        """Read until `ahead` batches are waiting, or to the end; return how many are waiting."""

    def peek(self) -> Any:
        """Return the first waiting batch."""

    def reserve(self, count: int) -> list[Any]:
        """Return the next batches, for one step: at most `count`."""


class _Step(NamedTuple):
    row: Row
    unknown: tuple[int, ...]  # ranks whose number of batches was unknown when this step was planned
    donated: int  # how many batches this rank sends
    batch: Any = None  # the batch, or its future; `None` once it was taken
    foreign: bool = False
    counted: float | None = None  # the batch's count, once it has arrived


# Meets all ranks that have a batch: sums the counts of their batches, and shares their notices.
Meet = Callable[[float, dict[str, Any]], BarrierResult]


class Rebalancer:
    """Runs one epoch: plans which batch each rank trains on, and sends and receives batches.

    Each row of the plan is made some steps ahead, so that batches are sent while earlier steps run. All ranks meet
    before each row. A rank that unexpectedly reaches its end sends the number of its batches left. If other ranks must
    then read further to be sure of their batches, all ranks meet again. With certain lengths the rows need no meeting.
    The driver still makes ranks meet, since the plan would rely on a rank that has left the loop.

    Args:
        channel: The channel for meetings and failure reports.
        exchange: Sends batches to other ranks.
        source: This rank's batches.
        plan: Plans the epoch.
        count: Returns the count of a batch, if batches are counted; called on the rank that trains on it.
        step: The number of the first step.
        meets: Whether all ranks meet before each row.
        meet: Holds a meeting; by default over `channel`.

    Attributes:
        step: The current step.
        total: The sum of all ranks' counts at the current step, if batches are counted.
        donated: How many batches this rank has sent for finished steps.
        received: How many batches of other ranks this rank has trained on in finished steps.
        max_sent_per_step: By rank, how many batches it may send in one step.
        lost: How many batches no rank trains on, since they were sent to ranks that have left the epoch.
    """

    def __init__(
        self,
        channel: Channel,
        exchange: Exchange,
        source: Source,
        plan: Plan,
        count: Callable[[Any], float] | None,
        step: int,
        meets: bool,
        meet: Meet | None,
    ) -> None:
        self._channel = channel
        self._meet: Meet = meet or (lambda count, notice: channel.barrier(count, notice or None))
        self._exchange = exchange
        self._source = source
        self._plan = plan
        self._count = count
        self._steps: deque[_Step] = deque()
        self.step, self.meets, self.max_sent_per_step = step, meets, plan.max_sent_per_step
        self.donated = self.received = self.lost = 0
        self.total = 0.0
        self._notices: dict[int, dict[str, Any]] = {}  # from the first meeting before the current step

    # ------------------------------------------------------------ the epoch

    def begin(self) -> None:
        """Plan the first rows."""
        for _ in range(1 + self._source.lead):
            self._settle(0)
            self._plan_row()
        if self._count is not None and self.meets:
            self.total = self._meet(self.count(), {}).total

    def advance(self, notice: dict[str, Any] | None = None) -> None:
        """Move to the next step, and plan another one; all ranks that meet receive `notice`."""
        done = self._steps.popleft()
        share = done.row[self._channel.rank]
        self.donated += done.donated
        self.received += share is not None and share.owner != self._channel.rank
        self.step += 1
        self._exchange.wait_until_received(self.step)
        self._settle(self.count(), notice)
        self._plan_row()

    def _settle(self, count: float, notice: dict[str, Any] | None = None) -> None:
        """Read and meet until it is certain that all ranks have the batches that the next row needs."""
        rank, message, met = self._channel.rank, notice or {}, False
        while True:
            read = self._plan.ahead
            waiting = self._source.read(read[rank])
            if not self.meets:
                return
            is_news = waiting < read[rank] and waiting != self._plan.left[rank]
            result = self._meet(0 if met else count, {**message, "left": waiting} if is_news else message)
            if not met:
                self.total, self._notices = result.total, result.notices
            message, met = {}, True
            self._plan.announce({rank: notice["left"] for rank, notice in result.notices.items() if "left" in notice})
            if all(now <= before for now, before in zip(self._plan.ahead, read, strict=True)):
                return

    def _plan_row(self) -> None:
        unknown = tuple(rank for rank, left in enumerate(self._plan.left) if left is None)
        row, me, step = self._plan.plan(), self._channel.rank, self.step + len(self._steps)
        share = row[me]
        is_own = share is not None and share.owner == me
        receivers = [rank for rank, each in enumerate(row) if each is not None and each.owner == me and rank != me]
        batches = self._source.reserve(is_own + len(receivers))
        if len(batches) < is_own + len(receivers):
            raise JoinValueError(
                f"The loader of rank {self._channel.global_ranks[me]} ended before its reported length, on which"
                " other ranks rely, because its sampler yields fewer items than its __len__ returns. Fix the sampler,"
                " or train without rebalance=True."
            )
        for receiver, batch in zip(receivers, batches[is_own:], strict=True):
            self._exchange.give(batch, receiver, step)
        foreign = share is not None and not is_own
        batch = self._exchange.expect(share.owner) if share is not None and foreign else batches[0] if is_own else None
        self._steps.append(_Step(row, unknown, len(receivers), batch, foreign))

    def leave(self, ranks: list[int], count: float, total: float) -> None:
        """Continue without ranks that leave the epoch at the current step; no rank trains on batches sent to them."""
        self.total = total
        self._plan.leave(ranks)
        for index, step in enumerate(self._steps):
            shares = [share for rank in ranks if (share := step.row[rank]) is not None]
            self.lost += sum(share.owner not in ranks for share in shares)
            row = tuple(None if rank in ranks else share for rank, share in enumerate(step.row))
            self._steps[index] = step._replace(row=row)

    def unknown_at(self, step: int) -> tuple[int, ...]:
        """Return the ranks whose number of batches was unknown when a coming step was planned."""
        index = step - self.step
        return self._steps[index].unknown if 0 <= index < len(self._steps) else ()

    def place(self) -> dict[str, Any]:
        """Return the plan's state for a checkpoint, as of the next step; it is equal on all ranks.

        Returns:
            The next `step`; by rank, how many batches were `left` when that step was planned, `None` if unknown; by
            rank, the `max_sent_per_step`; and the ranks that are `gone`, which train on no more batches.
        """
        rows, unknown = [step.row for step in self._steps], self.unknown_at(self.step + 1)
        planned = [share.owner for row in rows[1:] for share in row if share is not None]
        left = [None if n is None else n + planned.count(rank) for rank, n in enumerate(self._plan.left)]
        return {
            "step": self.step + 1,
            "left": [None if rank in unknown else n for rank, n in enumerate(left)],
            "max_sent_per_step": self.max_sent_per_step,
            "gone": [rank for rank, share in enumerate(rows[0]) if share is None] if rows else [],
        }

    def end(self) -> None:
        """End the epoch, perhaps before its last step; all ranks call this at the same step.

        This rank receives the batches sent for steps that are not run, so that none is left over for the next epoch.
        """
        for step in self._steps:
            if step.foreign:
                arrived(step.batch, self._channel)
        self._steps.clear()
        self._exchange.flush()

    @property
    def ahead(self) -> int:
        """How many batches this rank must have read before the next row is planned, unless it reaches its end."""
        return self._plan.ahead[self._channel.rank]

    @property
    def steps(self) -> int | None:
        """The number of the last step plus one; `None` while unknown."""
        left = self._plan.steps_left
        return None if left is None else self.step + sum(any(step.row) for step in self._steps) + left

    # ------------------------------------------------------------ the current step

    def take(self, ahead: int = 0) -> Any:
        """Return the batch that this rank trains on, once it has arrived, at the current step or a later one.

        Raises:
            PeerFailedError: The rank that sends it has failed.
        """
        self.count(ahead)
        step = self._steps[ahead]
        self._steps[ahead] = step._replace(batch=None, foreign=False)  # so that nothing here keeps it alive
        return arrived(step.batch, self._channel) if step.foreign else step.batch

    def count(self, ahead: int = 0) -> float:
        """Return the count of this rank's batch, once it has arrived; 0 without a batch, or if batches are not counted.

        Raises:
            PeerFailedError: The rank that sends it has failed.
        """
        if self._count is None or not self.has_batch(ahead):
            return 0
        step = self._steps[ahead]
        if step.counted is None:
            batch = arrived(step.batch, self._channel) if step.foreign else step.batch
            step = self._steps[ahead] = step._replace(batch=batch, foreign=False)
            self._steps[ahead] = step._replace(counted=self._count(batch))
        return self._steps[ahead].counted or 0

    def has_batch(self, ahead: int = 0) -> bool:
        """Whether this rank has a batch at the current step, or at a later one."""
        return bool(self._steps) and self._steps[ahead].row[self._channel.rank] is not None

    @property
    def share(self) -> Share | None:
        """The owner and index of the batch that this rank trains on at the current step."""
        return self._steps[0].row[self._channel.rank] if self._steps else None

    # ------------------------------------------------------------ in lockstep: see `ExchangedActiveRanks`

    has_met = True  # all ranks meet before each step

    def arrive(self, count: float, notice: dict[str, Any] | None, waits: bool) -> bool:
        self.advance(notice)
        return True

    def meet(self) -> dict[int, dict[str, Any]]:
        return self._notices

    @property
    def counted(self) -> float:
        return self.count()

    @property
    def active_ranks(self) -> tuple[int, ...]:
        row = self._steps[0].row if self._steps else ()
        return tuple(rank for rank, share in enumerate(row) if share is not None)

    @property
    def is_last_step(self) -> bool:
        return bool(self.active_ranks) and not any(self._steps[1].row)


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
        message = length, is_certain, max_sent_per_step, *own
        answers = channel.gather(message, of=_Begin)
        lengths = [length for length, *_ in answers]
        is_known = all(certain for _, certain, *_ in answers) and None not in lengths
        if is_known and len({*lengths}) == 1 and not always:
            return None
        if problem:
            raise JoinError(problem)
        if any(text for *_, text, _ in answers):
            channel.gather(None)  # raises the error that those ranks report
        if self._exchange is None:
            # A rank whose last exchange ended with an error has no connections, while other ranks may have theirs.
            self._exchange = Exchange(self._members.group, channel, [name for *_, name in answers])
            if self._exchange.is_new:
                channel.gather(None)  # all ranks have read each other's addresses
                self._exchange.tidy()
        plan = Plan(lengths, [most for _, _, most, *_ in answers], [taken for *_, taken, _, _, _ in answers])
        plan.leave([rank for rank, (*_, left, _, _) in enumerate(answers) if left])
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
