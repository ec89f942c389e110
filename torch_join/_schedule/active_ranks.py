"""Which ranks have a batch at which step of an epoch.

A rank is active from the epoch's first step until its own end. Each rank announces its end one step ahead. So at step
t, all ranks know which of them are active at t and at t + 1, and the epoch's last step is known when it starts.
"""

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_join._base.errors import EarlyTerminationError
from torch_join._control.channel import Channel
from torch_join._schedule.plan import Share


class ExchangedActiveRanks:
    """Knows which ranks have a batch, from the messages that ranks exchange between steps.

    Args:
        channel: The channel for the exchange.
        throws: Whether to raise on all ranks when the first one runs out.
        first_step: The epoch's first step.

    Attributes:
        step: The current step.
        active_ranks: The ranks that have a batch at the current step; stored, since each step reads it many times.
        has_met: Whether this rank has received all ranks' messages about the current step.
        counted, total: The count of this rank's batch, if batches are counted, and the sum of all counts once received.
    """

    def __init__(self, channel: Channel, throws: bool, first_step: int = 0) -> None:
        self._channel = channel
        self._throws = throws
        self.active_ranks: tuple[int, ...] = ()
        self._ends: list[int | None] = [None] * channel.world_size  # `None` until a rank's end is known
        self.has_met, self._is_meeting = True, False
        self._lock = threading.RLock()  # another thread may ask whether the step is the last one
        self._notices: dict[int, dict[str, Any]] = {}
        self.counted = self.total = 0.0
        self.step = first_step
        self._find_active()
        meet = weakref.WeakMethod(self.meet)
        channel.before_meeting = lambda: (now := meet()) and now()

    def announce(self, ends: Mapping[int, int]) -> None:
        """Note, by rank, the number of batches from the epoch's start, for ranks that know their number."""
        for rank, end in ends.items():
            self._ends[rank] = end
        if ends:
            self._find_active()

    def _find_active(self) -> None:
        self.active_ranks = tuple([rank for rank, end in enumerate(self._ends) if end is None or end > self.step])

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last in which any rank has a batch."""
        self.meet()
        return all(end is not None and end <= self.step + 1 for end in self._ends) and bool(self.active_ranks)

    @property
    def share(self) -> Share | None:
        """The owner and index of the batch that this rank trains on at the current step."""
        return Share(self._channel.rank, self.step) if self._channel.rank in self.active_ranks else None

    def check_termination(self) -> None:
        """Raise on every rank, if `throws`, when some rank has a batch at the current step and another has none.

        Raises:
            EarlyTerminationError: Some rank has run out of batches.
        """
        if self._throws and self.in_tail:
            raise early_termination(self._channel.rank, self._channel.rank not in self.active_ranks)

    @property
    def in_tail(self) -> bool:
        """Whether some rank has no batch at the current step while another has one."""
        return 0 < len(self.active_ranks) < self._channel.world_size

    def arrive(self, count: float, notice: dict[str, Any] | None, waits: bool) -> bool:
        """Send this rank's message and move to the next step; see `Lockstep.arrive`."""
        waits = waits or self.in_tail
        self._channel.arrive(count, notice)
        self.step += 1
        self._find_active()
        self.counted, self.has_met = count, False
        if waits := waits or self.in_tail:
            self.meet()
        return waits

    def poll(self) -> None:
        """Read the messages received so far, without waiting; see `Channel.poll`."""
        with self._lock:
            if not self._is_meeting:
                self._is_meeting = True
                try:
                    self._channel.poll()
                finally:
                    self._is_meeting = False

    def meet(self) -> dict[int, dict[str, Any]]:
        """Receive all ranks' messages about the current step, unless received already; see `Lockstep.meet`."""
        with self._lock:
            # A signal handler may call this while its own thread waits or reads: it then uses the messages so far.
            if not (self.has_met or self._is_meeting):
                self._is_meeting = True
                try:
                    self._take()
                finally:
                    self._is_meeting, self.has_met = False, True
        return self._notices

    def leave(self, ranks: list[int], count: float, total: float) -> None:
        """Continue without ranks that leave the epoch at the current step; set this batch's count and the total."""
        self.announce(dict.fromkeys(ranks, self.step))
        self.counted, self.total = count, total

    def _take(self) -> None:
        result = self._channel.wait()
        self.announce({rank: notice["end"] for rank, notice in result.notices.items() if "end" in notice})
        self.total, self._notices = result.total, result.notices
        self.check_termination()


@dataclass(frozen=True)
class ReadStep:
    """Which ranks have a batch at a step, as found by the reader of a loop that reads several steps ahead.

    Attributes:
        active_ranks: The ranks that have a batch.
        is_last_step: Whether this is the last step in which any rank has a batch.
        counted: The count of this rank's batch, if batches are counted.
        total: The sum of all ranks' counts.
        taken: How many of this rank's own batches any rank has trained on when the step is over.
    """

    active_ranks: tuple[int, ...]
    is_last_step: bool
    counted: float = 0
    total: float = 0
    taken: int = 0


def early_termination(rank: int, joined: bool) -> EarlyTerminationError:
    """Return the error to raise when the first rank joins, with the texts in torch."""
    if joined:
        return EarlyTerminationError(f"Rank {rank} exhausted all inputs.")
    return EarlyTerminationError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
