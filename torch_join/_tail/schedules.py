"""How the ranks find out which ranks are active at each step of a loop over `batches`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch_join._base.errors import JoinValueError, UnsupportedError, name_ranks, raise_any
from torch_join._control.reports import BarrierResult
from torch_join._schedule.rebalancing import Rebalancer, Rebalancing
from torch_join._tail.reader import Reader
from torch_join._tail.step import Step
from torch_join._tail.tail_log import TailLog


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
        record: Called with the step's number at the top of a step in which another rank should have no batch.
    """

    def __init__(
        self, step: Step, reader: Reader[Any], lengths: Sequence[int | None], record: Callable[[int], None]
    ) -> None:
        super().__init__(step, reader)
        self.expected, self._record = lengths, record

    def begin(self, step: int) -> bool:
        self._current.meet()  # for the previous step, if this rank has not communicated in it
        if not self._reader.has_next():
            self._current.meet_now(False)
            return True
        if step in self.expected or self._current.ending:
            self._record(step)
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
        self._own_length = lengths[self._tail_log.members.rank]
        self._throws, self._first = throws, first

    def begin(self, step: int) -> bool:
        # When a loop starts, a loader may communicate on all ranks, even on one without a batch (Accelerate's does).
        if step == self._first or self._own_length <= step:
            self._check(step)
        self._current.know(step, self.lengths)
        return True

    def check(self, step: int) -> None:
        # Read the loader only now, when joined ranks follow its collectives.
        if self._first < step < self._own_length:
            self._check(step)

    def _check(self, step: int) -> None:
        """Raise if this rank's length proves wrong or, in every second step, if another rank has failed."""
        if self._throws and min(self.lengths) <= step:
            return  # all ranks know this, and raise
        has_next = self._reader.has_next()
        if has_next != (step < self._own_length):
            raise wrong_length(self._tail_log.members.name, self._own_length, step, has_next)
        if step % 2:
            raise_any(self._tail_log.channel.failure())


def wrong_length(rank: int, length: int, step: int, has_next: bool) -> JoinValueError:
    """Return the error for a loader whose length, taken as certain, proves wrong at a step."""
    does = "goes on after that" if has_next else f"ended after {step} batches"
    return JoinValueError(
        f"The loader of rank {rank} reported the length {length} but {does}, which the other ranks cannot detect in"
        " time. Fix its sampler, do not change the sampler in the loop, or use Join(..., may_break=True)."
    )


def refuse_model_parallel(tail_log: TailLog) -> None:
    """Raise if several ranks compute a batch together.

    Raises:
        UnsupportedError: Some participant has model-parallel groups.
    """
    if any(each.model_parallel_groups for each in tail_log.participants):
        raise UnsupportedError(
            "rebalance=True cannot be combined with tensor parallelism: a batch sent to another rank would have to"
            " reach all ranks that compute it together. Train without rebalance=True."
        )


class PlannedReader(Reader[Any]):
    """Reads the batches that a plan assigns to this rank; `source` reads those of its own loader."""

    def __init__(self, plan: Rebalancer, source: Reader[Any]) -> None:
        self._plan, self._source = plan, source
        self._taken = plan.step - 1  # the step of the last batch taken

    def has_next(self, ahead: int = 1) -> bool:
        return self._plan.has_batch(self._taken + ahead - self._plan.step)

    def take(self) -> Any:
        self._taken += 1
        return self._plan.take(self._taken - self._plan.step)

    @property
    def trained_on(self) -> int:
        return self._source.trained_on

    def drop(self) -> None:
        self._source.drop()


class Planned(Schedule):
    """Rebalances batches if the ranks have different numbers of them.

    Args:
        step: The loop's steps.
        reader: This rank's batches.
        rebalancing: Rebalances the batches.
        place: In a resumed loop, the value that `Rebalancer.place` returned.
    """

    def __init__(self, step: Step, reader: Reader[Any], rebalancing: Rebalancing, place: dict[str, Any] | None) -> None:
        super().__init__(step, reader)
        self._rebalancing, self._place = rebalancing, place

    def read(self) -> Reader[Any]:
        """Make a plan for this rank's batches, if there is anything to rebalance; all ranks meet.

        Returns:
            A reader of the batches that this rank trains on.

        Raises:
            UnsupportedError: The loader has a state that users save, or ranks compute a batch together.
        """
        refuse_model_parallel(self._tail_log)
        self._rebalancing.current = None  # drop the last loop's plan: not every reader starts a new one
        return self._reader.rebalanced(self._begin)

    def _begin(self, source: Reader[Any]) -> Reader[Any] | None:
        length, members, place = source.certain_length(), self._tail_log.members, self._place
        resumed: dict[str, Any] = {}
        if place is not None:
            resumed = {"step": place["step"], "is_certain": length is not None}
            resumed["max_sent_per_step"] = place["max_sent_per_step"][members.rank]
            resumed["leaves"] = members.rank in place["gone"]
            if not place.get("is_new", False):
                resumed["always"] = True  # plan even if all ranks have equal numbers of batches left
                length = place["left"][members.rank]
            elif length is not None:
                length -= source.taken
        plan = self._rebalancing.begin(self._tail_log.channel, source, length, self._meet, **resumed)
        return None if plan is None else PlannedReader(plan, source)

    @property
    def presumes_all(self) -> bool:  # type: ignore[override]
        plan = self._rebalancing.current  # `None` after the `with`
        return plan is not None and not (plan.meets or self._tail_log.members.uneven)

    def begin(self, step: int) -> bool:
        plan, members = self._rebalancing.current, self._tail_log.members
        assert plan is not None
        self._current.meet()
        if members.meets_late:
            self._tail_log.remember_gradients()
        if step > plan.step:  # the first step is already planned
            with self._tail_log.own_collectives():
                plan.advance()
        if not plan.meets and len(plan.active_ranks) < members.world_size:
            plan.total = self._meet(plan.count(), {}).total
        if plan.has_batch():
            members.counted, members.total = plan.count(), plan.total
        self._tail_log.change(plan.active_ranks)
        self._current.is_last = plan.is_last_step
        if not self.presumes_all:
            return True
        # Sent here, so that other ranks do not wait for anything inside this rank's step.
        self._current.defer(plan.count(), plan.is_last_step)
        self._current.arrive()
        models = self._tail_log.models()
        if not models or not all(model.forwards_alone for model in models):
            self._current.meet()
        return False

    def _meet(self, count: float, notice: dict[str, Any]) -> BarrierResult:
        self._tail_log.channel.arrive(count, notice or None, self._tail_log.members.active)
        result = self._tail_log.channel.wait()
        self.check_barrier(result)
        return result

    def check_barrier(self, result: BarrierResult) -> None:
        """Check the notices that ranks sent to a meeting.

        Raises:
            JoinValueError: Some ranks have left the loop.
            PeerFailedError: Another rank has failed, perhaps after it sent its notice.
        """
        if self.presumes_all:
            raise_any(self._tail_log.channel.failure())
        members = self._tail_log.members
        left = members.named(rank for rank, notice in result.notices.items() if not notice)
        if 0 < len(left) < len(members.active):
            raise JoinValueError(
                f"{name_ranks(left).capitalize()} left the loop with `break` while others continued and, with"
                " rebalance=True, relied on its batches. Leave the loop at the same step on all ranks."
            )
