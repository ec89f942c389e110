"""The current step of a loop: where in it the ranks meet, and which ranks are active."""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch_join._base.attributes import setting
from torch_join._control.reports import BarrierResult
from torch_join._tail.reader import LoaderWatch
from torch_join._tail.tail_log import TailLog


class Step:
    """The steps of a loop, one after the other; after `defer`, the active ranks are not known until `meet`.

    Args:
        tail_log: Receives the ranks that are active.
        follow_up: Called after a deferred meeting, on a rank that has an input.

    Attributes:
        has_arrived: Whether this rank has sent its message for a meeting, but not received the other ranks'.
        is_last: Whether no rank has an input after this step, as far as the loaders can tell.
        ending: The ranks that are known to be in their last step.
        check: Called with the result of each meeting, in a loop with rebalanced batches.
    """

    check: Callable[[BarrierResult], None] | None = None

    def __init__(self, tail_log: TailLog, follow_up: Callable[[], None]) -> None:
        self.tail_log, self._members = tail_log, tail_log.members
        self._follow_up = weakref.WeakMethod(follow_up)  # a cycle would keep the group after the loop
        self._lock = threading.RLock()  # a backward on several devices has several threads
        self.reset()

    def reset(self) -> None:
        """Reset to the state before the first step."""
        self._due: tuple[float, bool] | None = None  # this rank's message for a deferred meeting
        self._receives = self.has_arrived = self.is_last = False
        self.check = None  # else a cycle would keep the group
        self.ending: Sequence[int] = ()

    @property
    def batch_count(self) -> float | None:
        """The count of this rank's batch, if batches are counted; does not wait for other ranks."""
        if self._members.count is None:
            return None
        return self._members.counted if self._due is None else self._due[0]

    def know(self, number: int, lengths: Sequence[int]) -> None:
        """Move to the step of this number; all ranks' numbers of batches are certain."""
        self.is_last = number + 1 >= max(lengths)
        self.ending = [rank for rank, length in enumerate(lengths) if length == number + 1]
        self.tail_log.change(tuple(rank for rank, length in enumerate(lengths) if length > number))

    def defer(self, count: float, is_last: bool = False) -> None:
        """Defer the meeting until this rank first communicates in its step, since it may leave the loop before that.

        Args:
            count: The count of this rank's batch.
            is_last: Whether the batch is known to be its last.
        """
        self._due = count, is_last
        self.tail_log.has_to_meet = True

    def drop(self) -> bool:
        """Leave the step if no rank relies on this one in it; return whether none does."""
        is_free = self._due is not None and not self.has_arrived
        if is_free:
            self._due = None
        return is_free

    def arrive(self) -> None:
        """Send this rank's message for a deferred meeting; does not wait for other ranks."""
        with self._lock:
            if self._due is not None and not (self.has_arrived or self._receives):
                with self.tail_log.telling():
                    self._send(True, *self._due)
                self.has_arrived = True

    def meet(self) -> None:
        """Hold the deferred meeting, if any: wait until this rank knows which ranks are active."""
        if self._due is None:
            return
        with self._lock:  # the other threads wait until one has the result
            if self._due is None or self._receives:  # another thread has the result, or the follow-up called this
                return
            self.arrive()
            self._receives, self.has_arrived = True, False
            try:
                with self.tail_log.telling():
                    self._receive(has_input=True)
                    if (follow_up := self._follow_up()) is not None:
                        follow_up()
            finally:
                self._due, self._receives = None, False
                self.tail_log.has_to_meet = False

    def meet_now(self, has_input: bool, count: float = 0.0, is_last: bool = False) -> None:
        """Meet the active ranks at once; send whether this rank has an input, and whether that is its last."""
        self._due, self.has_arrived = None, False
        if not has_input:
            self.tail_log.check_backwards_ended()
        self._send(has_input, count, is_last)
        with nullcontext() if has_input else self.watching_loaders():
            self._receive(has_input)

    def watching_loaders(self) -> AbstractContextManager[None]:
        """Watch the other ranks' loaders while this rank, which has no batch, waits for them to read their next one."""
        channel = self.tail_log.channel
        return setting(channel, suspect=LoaderWatch(channel, self._members).check)

    def _send(self, has_input: bool, count: float, is_last: bool) -> None:
        notice = {} if not has_input else {"last": True} if is_last else None
        self.tail_log.channel.arrive(count, notice, self._members.active)
        if has_input and self.check is None:  # else this rank's batch may come from another rank
            self._members.counted = count

    def _receive(self, has_input: bool) -> None:
        result = self.tail_log.channel.wait()
        if self.check is not None:
            self.check(result)
        if has_input:  # else keep the last step's count: its backward may come after the loop
            self._members.total = result.total
        self.tail_log.change(tuple(rank for rank in self._members.active if result.notices.get(rank) != {}))
        active = self._members.active
        self.ending = [rank for rank in active if result.notices.get(rank)]
        self.is_last = bool(active) and len(self.ending) == len(active)
