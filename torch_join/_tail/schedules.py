"""How the ranks find out which ranks are active at each step of a loop over `batches`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch_join._base.errors import JoinValueError, raise_any
from torch_join._schedule.plan import Share
from torch_join._tail.reader import Reader
from torch_join._tail.step import Step


class Schedule:
    """Determines which ranks are active at each step.

    Args:
        step: The loop's steps.
        reader: This rank's batches.

    Attributes:
        lengths: All ranks' numbers of batches, if these are certain.
        expected: By rank, the number of batches that it reported, which may prove wrong; `None` if unknown.
        presumes_all: Whether this rank assumes that all ranks are active in this step, until one reports a `break`.
    """

    lengths: list[int] | None = None
    expected: Sequence[int | None] = ()
    presumes_all = False

    def __init__(self, step: Step, reader: Reader[Any]) -> None:
        self._current, self._reader, self._tail_log = step, reader, step.tail_log

    @property
    def share(self) -> Share | None:
        """The owner and index of this rank's batch in the current step, if it may be another rank's."""
        return None

    def begin(self, step: int) -> bool:
        """Start a step.

        Returns:
            Whether the active ranks are known; if not, this rank has a batch, and the meeting is deferred.
        """
        raise NotImplementedError

    def check(self, step: int) -> None:
        """Raise for problems that the other ranks could not know in time; called when the active ranks are known."""


class EachBatch(Schedule):
    """The ranks meet at each batch."""

    def begin(self, step: int) -> bool:
        has_next, count = self._reader.has_next(), self._tail_log.members.count
        counted = self._reader.count(count) if has_next and count is not None else 0
        self._current.meet_now(has_next, counted, self._reader.at_last)
        return True


class EachUse(Schedule):
    """Each rank meets the others at its first communication in a step, since it may `break` before that.

    A rank that runs out of batches compares state with the other ranks at the top of a step. These compare at the same
    step: they know from that rank's length, or from its notice at its last step, that it has no batch.

    Args:
        step: The loop's steps.
        reader: This rank's batches.
        lengths: All ranks' numbers of batches; `None` for each that is not certain.
        look: Called with the step's number at the top of a step in which another rank should have no batch.
    """

    def __init__(
        self, step: Step, reader: Reader[Any], lengths: Sequence[int | None], look: Callable[[int], None]
    ) -> None:
        super().__init__(step, reader)
        self.expected, self._look = lengths, look

    def begin(self, step: int) -> bool:
        self._current.meet()  # for the previous step, if this rank has not communicated in it
        if not self._reader.has_next():
            self._current.meet_now(False)
            return True
        if step in self.expected or self._current.ending:
            self._look(step)
        count = self._tail_log.members.count
        self._current.defer(0 if count is None else self._reader.count(count), self._reader.at_last)
        self._tail_log.remember_gradients()
        return False


class Certain(Schedule):
    """The ranks' numbers of batches are certain, and are exchanged at the start of the loop.

    Args:
        step: The loop's steps.
        reader: This rank's batches.
        lengths: All ranks' numbers of batches.
        throws: Whether all ranks raise when the first one runs out.
        first: The loop's first step.
    """

    def __init__(self, step: Step, reader: Reader[Any], lengths: list[int], throws: bool, first: int) -> None:
        super().__init__(step, reader)
        self.lengths: list[int] = lengths
        self._mine = lengths[self._tail_log.members.rank]
        self._throws, self._first = throws, first

    def begin(self, step: int) -> bool:
        # When a loop starts, a loader may communicate on all ranks, even on one without a batch (Accelerate's does).
        if step == self._first or self._mine <= step:
            self._check(step)
        self._current.know(step, self.lengths)
        return True

    def check(self, step: int) -> None:
        # Read the loader only now, when joined ranks follow its collectives.
        if self._first < step < self._mine:
            self._check(step)

    def _check(self, step: int) -> None:
        """Raise if this rank's length proves wrong or, in every second step, if another rank has failed."""
        if self._throws and min(self.lengths) <= step:
            return  # all ranks know this, and raise
        has_next = self._reader.has_next()
        if has_next != (step < self._mine):
            raise wrong_length(self._tail_log.members.name, self._mine, step, has_next)
        if step % 2:
            raise_any(self._tail_log.channel.failure())


def wrong_length(rank: int, length: int, step: int, goes_on: bool) -> JoinValueError:
    """Return the error for a loader whose length, taken as certain, proves wrong at a step."""
    does = "goes on after that" if goes_on else f"ended after {step} batches"
    return JoinValueError(
        f"The loader of rank {rank} reported the length {length} but {does}, which the other ranks cannot detect in"
        " time. Fix its sampler, do not change the sampler in the loop, or use Join(..., may_break=True)."
    )
