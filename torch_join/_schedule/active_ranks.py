"""Which ranks have a batch at which step of an epoch.

A rank is active from the epoch's first step until its own end. Ranks announce their end one step
ahead: whoever asks at step t knows who is active at t and at t + 1, so that the last step of the
epoch is known when it begins.
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
    """Which ranks have a batch, as they tell each other between steps.

    Args:
        channel: Where they do.
        throws: Whether to raise on all ranks when the first one runs out.
        first_step: Where the epoch begins.

    Attributes:
        step: The current step.
        active_ranks: The ranks that have a batch at it; asked for many times in a step, so it is kept.
        has_met: Whether this rank has heard what all ranks have said of the current step.
        counted, total: What this rank's batch counts, where batches are counted, and all of the step once it has heard.
    """

    def __init__(self, channel: Channel, throws: bool, first_step: int = 0) -> None:
        self._channel = channel
        self._throws = throws
        self.active_ranks: tuple[int, ...] = ()
        self._ends: list[int | None] = [None] * channel.world_size  # `None` while a rank has not come to its end
        self.has_met, self._is_meeting = True, False
        self._lock = threading.RLock()  # another thread may look whether the step is the last one
        self._notices: dict[int, dict[str, Any]] = {}
        self.counted = self.total = 0.0
        self.step = first_step
        self._find_active()
        meet = weakref.WeakMethod(self.meet)
        channel.before_meeting = lambda: (now := meet()) and now()

    def announce(self, ends: Mapping[int, int]) -> None:
        """Note the number of batches, counted from the epoch's start, of ranks that know theirs."""
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
        """Whose batch this rank trains on at the current step."""
        return Share(self._channel.rank, self.step) if self._channel.rank in self.active_ranks else None

    def ended_last(self, rank: int) -> bool:
        """Whether no other rank has, or may still have, more batches than `rank`."""
        ends = [float("inf") if end is None else end for end in self._ends]
        return ends[rank] == max(ends)

    def check_termination(self) -> None:
        """Raise on every rank, if it is to throw, where some rank has a batch at the current step and another has none.

        Raises:
            EarlyTerminationError: So it is.
        """
        if self._throws and self.in_tail:
            raise early_termination(self._channel.rank, self._channel.rank not in self.active_ranks)

    @property
    def in_tail(self) -> bool:
        """Whether some rank has no batch at the current step while another has one."""
        return 0 < len(self.active_ranks) < self._channel.world_size

    def arrive(self, count: float, notice: dict[str, Any] | None, waits: bool) -> bool:
        """Go on to the next step, and say this rank's part; see `Lockstep.arrive`."""
        waits = waits or self.in_tail
        self._channel.arrive(count, notice)
        self.step += 1
        self._find_active()
        self.counted, self.has_met = count, False
        if waits := waits or self.in_tail:
            self.meet()
        return waits

    def poll(self) -> None:
        """Read what others have said so far, without waiting; see `Channel.poll`."""
        with self._lock:
            if not self._is_meeting:
                self._is_meeting = True
                try:
                    self._channel.poll()
                finally:
                    self._is_meeting = False

    def meet(self) -> dict[int, dict[str, Any]]:
        """Hear what all ranks have said of the current step, unless this rank has; see `Lockstep.meet`."""
        with self._lock:
            # Not in the handler of a signal that comes while this very thread waits, or reads: what is known counts.
            if not (self.has_met or self._is_meeting):
                self._is_meeting = True
                try:
                    self._take()
                finally:
                    self._is_meeting, self.has_met = False, True
        return self._notices

    def leave(self, ranks: list[int], count: float, total: float) -> None:
        """Go on without ranks that leave the epoch at the current step; then batches count this, here and in all."""
        self.announce(dict.fromkeys(ranks, self.step))
        self.counted, self.total = count, total

    def _take(self) -> None:
        result = self._channel.wait()
        self.announce({rank: notice["end"] for rank, notice in result.notices.items() if "end" in notice})
        self.total, self._notices = result.total, result.notices
        self.check_termination()


@dataclass(frozen=True)
class ReadStep:
    """Which ranks have a batch at a step, in a loop that reads several steps ahead: as its reader has found.

    Attributes:
        active_ranks: These ranks.
        is_last_step: Whether it is the last in which any rank has a batch.
        counted: What this rank's batch counts, where batches are counted.
        total: What all ranks' batches count together.
        taken: How many of this rank's own batches somebody has trained on when it is over.
    """

    active_ranks: tuple[int, ...]
    is_last_step: bool
    counted: float = 0
    total: float = 0
    taken: int = 0

    def ended_last(self, rank: int) -> bool:
        """Whether no other rank has more batches than `rank`, if this is the last step."""
        return rank in self.active_ranks


def early_termination(rank: int, joined: bool) -> EarlyTerminationError:
    """Return the error of a rank that throws where the first one joins; in the words of torch's own `Join`."""
    if joined:
        return EarlyTerminationError(f"Rank {rank} exhausted all inputs.")
    return EarlyTerminationError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
