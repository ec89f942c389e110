"""Loops of the user's in which finished ranks run placeholders: each rank has as many steps as the longest one."""

from collections.abc import Sequence
from typing import Any

from torch_join._base.devices import on_device
from torch_join._base.errors import JoinValueError, name_ranks
from torch_join._base.weighting import Count
from torch_join._handover import objects as _objects
from torch_join._schedule.active_ranks import ReadStep, early_termination
from torch_join._schedule.placeholders import Placeholder, WeighedLosses, make_placeholder, without_rows
from torch_join._tail.reader import Reader
from torch_join._tail.schedules import Schedule, wrong_length
from torch_join._tail.step import Step
from torch_join._tail.tail_log import TailLog


class PlaceholderReader(Reader[Any]):
    """Reads this rank's batches, and placeholders while other ranks have batches.

    Where lengths are certain and nothing is counted, nobody asks anybody. Else there is one exchange a step. A rank
    with a batch says so as the step begins, and hears the others where it asks who is active: in its backward, or as
    the next step begins. A rank without one waits for them at once, unless it knows that they go on.

    Args:
        source: What reads this rank's own batches.
        kind: What takes the place of a batch.
        losses: Weighs the steps' losses.
        tail_log: The ranks' log.
        lengths: All ranks' numbers of batches, where these are certain.
        count: Returns what a batch counts, where batches are counted.
        first: The loop's first step.
        throws: Whether all ranks raise where the first one runs out.

    Attributes:
        step: Who has a batch in the current step, or in the loop's last one.
    """

    def __init__(
        self,
        source: Reader[Any],
        kind: Placeholder,
        losses: WeighedLosses,
        tail_log: TailLog,
        lengths: Sequence[int] | None,
        count: Count | None,
        first: int,
        throws: bool,
    ) -> None:
        self._source, self._kind, self._losses, self._lengths = source, kind, losses, lengths
        self._log, self._members, self._channel = tail_log, tail_log.members, tail_log.channel
        self._count, self._first, self._throws = count, first, throws
        self.step = ReadStep(tuple(range(self._members.world_size)), False)
        self._next = first  # the step that is yet to be taken
        self._has_begun = self._has_arrived = False  # that step; at an exchange of which this rank has yet to hear
        self._counted, self._last = 0.0, None
        losses.step = self.hear
        self._channel.before_meeting = self.hear

    @property
    def pulling(self) -> bool:  # type: ignore[override]
        return self._source.pulling

    def has_next(self, ahead: int = 1) -> bool:
        if self._lengths is not None:
            return self._next + ahead <= max(self._lengths)
        if not self._has_begun:
            self._begin()
        return self._source.has_next() or bool(self.hear().active_ranks)

    def take(self) -> Any:
        if not self._has_begun:
            self._begin()
        self._has_begun = False
        number, rank, has = self._next, self._members.rank, self._source.has_next()
        if number > self._first:
            self._losses.note_asked()
        if self._throws and len(self.hear().active_ranks) < self._members.world_size:
            raise early_termination(rank, not has)
        if has:
            self._last = self._source.take()
        if number == self._first and len(active := self.hear().active_ranks) < self._members.world_size:
            self._share(active[0])
        batch = self._last if has else make_placeholder(self._kind, self._last)
        self._losses.begin(number, not has, batch)
        self._next += 1
        return batch

    def _begin(self) -> None:
        """Begin the next step: say whether this rank has a batch in it, unless all know, and what that counts."""
        self._losses.before = self.hear().active_ranks or self._losses.before
        self._has_begun = True
        rank, number, has = self._members.rank, self._next, self._source.has_next()
        self._counted = self._source.count(self._count) if has and self._count is not None else 0.0
        if self._lengths is not None:
            if has != (number < self._lengths[rank]):
                raise wrong_length(self._members.name, self._lengths[rank], number, has)
            active = tuple(rank for rank, length in enumerate(self._lengths) if number < length)
            self.step = ReadStep(active, number + 1 >= max(self._lengths))
        if self._lengths is None or self._count is not None:
            notice = None if has and not self._source.at_last else {"last": True} if has else {"end": True}
            self._channel.arrive(self._counted, notice)
            self._has_arrived = True

    def hear(self) -> ReadStep:
        """Wait for what the others say of the current step, if there is something yet to hear; return who is active.

        Raises:
            JoinValueError: Some of them have left the loop.
        """
        if self._has_arrived:
            self._has_arrived = False
            result, everyone = self._channel.wait(), range(self._members.world_size)
            if left := [rank for rank in everyone if result.notices.get(rank) == {}]:
                raise JoinValueError(
                    f"The loop of {name_ranks(self._members.named(left))} was left by `break` where others go on, with"
                    " placeholder=, where each step takes all ranks. Leave it on all of them at the same step."
                )
            active = tuple(rank for rank in everyone if "end" not in result.notices.get(rank, ()))
            is_last = all("last" in result.notices.get(rank, ()) for rank in active)
            if self._lengths is not None:
                active, is_last = self.step.active_ranks, self.step.is_last_step
            self.step = ReadStep(active, is_last, self._counted, result.total)
        return self.step

    def _share(self, source: int) -> None:
        """Give a batch's form to ranks that have had none; all ranks call this."""
        with self._log.own_collectives(), on_device(self._members.group):
            packed = None
            if self._members.rank == source:
                form = without_rows(self._last) if self._kind == "rows" else self._last
                packed = _objects.pack(form, "A batch that takes the place of others")
            form = _objects.broadcast(packed, source, self._members.group)
        if self._last is None:
            self._last = form


class Together(Schedule):
    """All ranks have as many steps, and one after the other finds out that there are no more.

    Args:
        step: The loop's steps.
        reader: Knows.
        tail_log: The ranks' log.
    """

    def __init__(self, step: Step, reader: PlaceholderReader, tail_log: TailLog) -> None:
        self._current, self._reader, self._tail_log = step, reader, tail_log

    def begin(self, step: int) -> bool:
        goes_on = self._reader.has_next()
        self._current.is_last, self._current.ending = False, ()
        self._tail_log.change(tuple(range(self._tail_log.members.world_size)) if goes_on else ())
        return True
