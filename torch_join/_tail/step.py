"""The current step of a loop of the user's: where in it the ranks meet, and who they find to be active."""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from torch_join._base.attributes import setting
from torch_join._control.failures import telling_failures
from torch_join._control.reports import BarrierResult
from torch_join._tail.reader import LoaderWatch
from torch_join._tail.tail_log import TailLog


class Telling:
    """Tell the other ranks what is raised inside, and raise what was raised before.

    Whoever swallows that gets it again at the next meeting, to which the others do not come.

    Attributes:
        raised: What was raised before.
    """

    raised: BaseException | None = None

    def __init__(self, tail_log: TailLog) -> None:
        self._tail_log = tail_log

    def __enter__(self) -> None:
        if self.raised is not None:
            raise self.raised

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        try:
            telling_failures(self._tail_log.channel).__exit__(kind, error, traceback)
        except BaseException as instead:
            self._note(instead)
            raise
        self._note(error)

    def _note(self, error: BaseException) -> None:
        if self._tail_log.members.world_size > 1:
            self.raised = error


class Step:
    """One step after the other; where a meeting is put off, nothing is known of who is active until `meet`.

    Args:
        tail_log: Goes on with the ranks that are active.
        telling: See `Telling`.
        follow_up: Does what follows from who is active, on a rank that has an input.

    Attributes:
        has_arrived: Whether this rank has come to a meeting, and has yet to hear what the others say.
        is_last: Whether no rank has an input after this step, as far as the loaders can tell.
        ending: The ranks whose last step it is known to be.
        check: Called with all that is heard, in a loop in which batches are rebalanced.
    """

    check: Callable[[BarrierResult], None] | None = None

    def __init__(self, tail_log: TailLog, telling: Telling, follow_up: Callable[[], None]) -> None:
        self._tail_log, self._members = tail_log, tail_log.members
        self._telling = telling
        self._follow_up = weakref.WeakMethod(follow_up)  # a circle would keep the group after the loop
        self._lock = threading.RLock()  # in a backward on several devices there are several threads
        self.reset()

    def reset(self) -> None:
        """Begin anew, as before the first step."""
        self._due: tuple[float, bool] | None = None  # what to say at a meeting that was put off
        self._hears = self.has_arrived = self.is_last = False
        self.check = None  # else a circle would keep the group
        self.ending: Sequence[int] = ()

    def know(self, number: int, lengths: Sequence[int]) -> None:
        """Go on to the step of this number, where all ranks' numbers of batches are certain."""
        self.is_last = number + 1 >= max(lengths)
        self.ending = [rank for rank, length in enumerate(lengths) if length == number + 1]
        self._tail_log.change(tuple(rank for rank, length in enumerate(lengths) if length > number))

    def defer(self, count: float, is_last: bool = False) -> None:
        """Put the meeting off until this rank first does something with others: it may leave the loop before that.

        Args:
            count: What this rank's batch counts.
            is_last: Whether it is known to be its last.
        """
        self._due = count, is_last
        self._tail_log.has_to_meet = True

    def drop(self) -> bool:
        """Leave, if no rank counts on this one in this step; return whether that is so."""
        is_free = self._due is not None and not self.has_arrived
        if is_free:
            self._due = None
        return is_free

    def arrive(self) -> None:
        """Say that this rank is here, if that was put off; waits for nobody."""
        with self._lock:
            if self._due is not None and not (self.has_arrived or self._hears):
                with self._telling:
                    self._say(True, *self._due)
                self.has_arrived = True

    def meet(self) -> None:
        """Wait until it is known who is active, if that was put off."""
        if self._due is None:
            return
        with self._lock:  # the other threads wait for what one hears
            if self._due is None or self._hears:  # it was that one, or what follows asks
                return
            self.arrive()
            self._hears, self.has_arrived = True, False
            try:
                with self._telling:
                    self._hear(has_input=True)
                    if (follow_up := self._follow_up()) is not None:
                        follow_up()
            finally:
                self._due, self._hears = None, False
                self._tail_log.has_to_meet = False

    def meet_now(self, has_input: bool, count: float = 0.0, is_last: bool = False) -> None:
        """Meet the ranks that were active, and say whether this one has an input, and whether that is its last."""
        self._due, self.has_arrived = None, False
        if not has_input:
            self._tail_log.check_backwards_ended()
        self._say(has_input, count, is_last)
        with nullcontext() if has_input else self.watching_loaders():
            self._hear(has_input)

    def watching_loaders(self) -> AbstractContextManager[None]:
        """Put around what a rank without a batch waits for, and others come to when they have read their next one."""
        channel = self._tail_log.channel
        return setting(channel, suspect=LoaderWatch(channel, self._members).look)

    def _say(self, has_input: bool, count: float, is_last: bool) -> None:
        notice = {} if not has_input else {"last": True} if is_last else None
        self._tail_log.channel.arrive(count, notice, self._members.active)
        if has_input and self.check is None:  # else the batch that this rank has may be another's
            self._members.counted = count

    def _hear(self, has_input: bool) -> None:
        result = self._tail_log.channel.wait()
        if self.check is not None:
            self.check(result)
        if has_input:  # else the last step's count: its backward may come after the loop
            self._members.total = result.total
        self._tail_log.change(tuple(rank for rank in self._members.active if result.notices.get(rank) != {}))
        active = self._members.active
        self.ending = [rank for rank in active if result.notices.get(rank)]
        self.is_last = bool(active) and len(self.ending) == len(active)
