"""Loops in which finished ranks run placeholders: every rank has as many steps as the longest one."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from torch_join._base.attributes import setting
from torch_join._base.devices import on_device
from torch_join._base.errors import JoinError, JoinValueError, JoinWarning, UnsupportedError, name_ranks
from torch_join._base.weighting import count_samples, counter, weighted
from torch_join._control.codec import is_closed
from torch_join._control.failures import telling_failures
from torch_join._handover import objects as _objects
from torch_join._participants.clears import innermost_optimizer
from torch_join._participants.kinds import holds_metrics, refuse_engines
from torch_join._schedule.active_ranks import ReadStep, early_termination
from torch_join._schedule.placeholders import Placeholder, WeighedLosses, make_placeholder, without_rows
from torch_join._tail.reader import Reader
from torch_join._tail.schedules import Certain, Schedule, wrong_length
from torch_join._tail.step import Step
from torch_join._tail.tail_log import TailLog

T = TypeVar("T")


class PlaceholderLoop(Reader[Any]):
    """A loop in which finished ranks run placeholders: reads this rank's batches, and then placeholders.

    With certain lengths and no counting, ranks exchange nothing. Otherwise there is one exchange per step. A rank with
    a batch sends its message when the step starts, and waits for the other ranks' messages in its backward, or when the
    next step starts. A rank without a batch waits for them at once, unless lengths are certain.

    Args:
        kind: The kind of placeholder.
        source: The reader of this rank's own batches.
        driver: The loop's `LoopDriver`.
        lengths: By rank, the number of batches; `None` where it is not certain.
        first: The loop's first step.
        number: The loop's number in its `with`.

    Attributes:
        losses: Weighs the losses of the steps.
        lengths: All ranks' numbers of batches, if these are certain.
        step: Which ranks have a batch in the current or last step.

    Raises:
        UnsupportedError: An object passed to `Join` cannot take part.
    """

    def __init__(
        self,
        kind: Placeholder,
        source: Reader[Any],
        driver: Any,
        lengths: Sequence[int | None],
        first: int,
        number: int,
    ) -> None:
        given, options = driver.given, driver.options
        _check_given(given)
        self._source, self._kind, self._first, self._name, self._around = source, kind, first, number, ExitStack()
        self._log: TailLog = driver.tail_log
        self._members, self._channel = self._log.members, self._log.channel
        self._throws, self._note = options.throw_on_early_termination, driver.remarks.note
        self.lengths = None if options.may_break or None in lengths else [length or 0 for length in lengths]
        self._count = counter(options.weighting, self._members.name, count_samples)
        models = [thing for thing in given if isinstance(thing, nn.Module)]
        optimizers = [inner for thing in given if (inner := innermost_optimizer(thing)) is not None]
        world_size = self._members.world_size
        self.losses = WeighedLosses(options.weighting, world_size, models, optimizers, first)
        self.step = ReadStep(tuple(range(world_size)), False)
        self._next = first  # the next step to take
        self._has_begun = self._has_arrived = False  # whether that step has begun; whether its exchange is pending
        self._counted, self._last = 0.0, None
        self._logged = -1, 0  # the last step with a logged value, and the number of earlier values in that step
        self.losses.step = self._channel.before_meeting = self.receive

    def schedule(self, step: Step) -> Schedule:
        """Return the loop's schedule: each rank has as many steps as the longest rank has batches."""
        if self.lengths is None:
            return Together(step, self)
        return Certain(step, self, [max(self.lengths)] * self._members.world_size, False, self._first)

    def entered(self) -> ExitStack:
        """Wrap the steps, whose losses are weighed; `close` ends this too."""
        self._around.enter_context(self.losses.entered())
        return self._around

    def finish(self) -> int:
        """End the loop; all ranks call this. Return how many batches this rank had."""
        self.losses.end()
        self._channel.before_meeting = lambda: None
        return self._source.taken - self._source.first

    def close(self) -> None:
        """Undo all changes and break reference cycles: an error's traceback may keep the loop's iterator."""
        self._around.close()
        self.losses.behind.close()
        self.losses.step = self._channel.before_meeting = lambda: None

    # ------------------------------------------------------------ batches

    def has_next(self, ahead: int = 1) -> bool:
        if self.lengths is not None:
            continues = self._next + ahead <= max(self.lengths)
            if not continues and self._source.has_next():  # this call also lets the iterator reach its end
                raise wrong_length(self._members.name, self.lengths[self._members.rank], self._next, True)
            return continues
        if not self._has_begun:
            self._begin()
        return self._source.has_next() or bool(self.receive().active_ranks)

    def take(self) -> Any:
        if not self._has_begun:
            self._begin()
        self._has_begun = False
        number, rank, has_batch = self._next, self._members.rank, self._source.has_next()
        if number > self._first:
            self.losses.note_asked()
        if self._throws and len(self.receive().active_ranks) < self._members.world_size:
            raise early_termination(rank, not has_batch)
        if has_batch:
            self._last = self._source.take()
        if number == self._first and len(active := self.receive().active_ranks) < self._members.world_size:
            self._share(active[0])
        batch = self._last if has_batch else make_placeholder(self._kind, self._last)
        self.losses.begin(number, not has_batch, batch)
        self._next += 1
        return batch

    def _begin(self) -> None:
        """Start the next step: send this rank's count and, unless lengths are certain, whether it has a batch."""
        self.losses.before = self.receive().active_ranks or self.losses.before
        self._has_begun = True
        rank, has_batch = self._members.rank, self._source.has_next()
        number = self._number = self._next  # the step of the exchange
        self._counted = self._source.count(self._count) if has_batch and self._count is not None else 0.0
        if self.lengths is not None:
            if has_batch != (number < self.lengths[rank]):
                raise wrong_length(self._members.name, self.lengths[rank], number, has_batch)
            active = tuple(rank for rank, length in enumerate(self.lengths) if number < length)
            self.step = ReadStep(active, number + 1 >= max(self.lengths))
            self._note(active, number)
        if self.lengths is None or self._count is not None:
            notice = None if has_batch and not self._source.at_last else {"last": True} if has_batch else {"end": True}
            self._channel.arrive(self._counted, notice)
            self._has_arrived = True

    def receive(self) -> ReadStep:
        """Wait for the other ranks' messages if the current exchange is pending; return which ranks are active.

        Raises:
            JoinValueError: Some ranks have left the loop.
        """
        if self._has_arrived:
            self._has_arrived = False
            result, ranks = self._channel.wait(), range(self._members.world_size)
            if left := [rank for rank in ranks if result.notices.get(rank) == {}]:
                raise JoinValueError(
                    f"{name_ranks(self._members.named(left)).capitalize()} left the loop with `break` while others"
                    " continued, but with placeholder= each step needs all ranks. Leave it at the same step on all"
                    " ranks."
                )
            active = tuple(rank for rank in ranks if "end" not in result.notices.get(rank, ()))
            is_last = all("last" in result.notices.get(rank, ()) for rank in active)
            if self.lengths is not None:
                active, is_last = self.step.active_ranks, self.step.is_last_step
            self.step = ReadStep(active, is_last, self._counted, result.total)
            self._note(active, self._number)
        return self.step

    def _share(self, source: int) -> None:
        """Send a batch's structure from rank `source` to ranks that have had no batch; all ranks call this."""
        with self._log.own_collectives(), on_device(self._members.group):
            packed = None
            if self._members.rank == source:
                form = without_rows(self._last) if self._kind == "rows" else self._last
                packed = _objects.pack(form, "A placeholder batch")
            form = _objects.broadcast(packed, source, self._members.group)
        if self._last is None:
            self._last = form

    # ------------------------------------------------------------ in a step

    def weigh(self, value: Tensor) -> Tensor:
        """See `Join.weigh`."""
        if value.requires_grad:
            raise JoinError(
                "join.weigh() got a value that requires grad, but Join already weights its backward. Call backward()"
                " on the loss without join.weigh(); for torch.autograd.grad, weigh grad_outputs."
            )
        return weighted(value, self.losses.factor)

    def shaped(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or zeros of the active ranks' shape if a finished rank's shape differs; all ranks call this.

        The zeros depend on `tensor`, so that every rank runs the same backward.
        """
        if len(active := self.receive().active_ranks) == self._members.world_size:
            return tensor
        shapes = self._channel.gather([*tensor.shape], of=list[int])
        if not self.losses.joined or shapes[self._members.rank] == shapes[active[0]]:
            return tensor
        return tensor.new_zeros(shapes[active[0]]) + 0.0 * tensor.sum()

    def bring_buffers(self) -> None:
        """Give all ranks the newest buffers, if rank 0 has finished, before it saves; all ranks call this."""
        if 0 not in (active := self.receive().active_ranks):
            self.losses.before = active
            self.losses.give_buffers()

    def logged_values(self, values: T) -> T | None:
        """Return the values for rank 0 to log: the lowest active rank's, if rank 0 has finished; all ranks call this.

        Returns `None` on rank 0 if the values cannot be sent.

        Raises:
            JoinError: The lowest active rank does not call this in this step.
        """
        if 0 in (active := self.receive().active_ranks):
            return values
        step, count = self.losses.number, 0
        if self._logged[0] == step:
            count = self._logged[1] + 1
        self._logged = step, count
        key, leader = f"logged/{self._name}/{step}/{count}", active[0]
        if self._members.rank == leader:
            self._channel.post(key, values if is_closed(values) else None)
        if self._members.rank != 0:
            return values
        check = partial(self._check_logs, key, leader, step)
        with telling_failures(self._channel), setting(self._channel, suspect=check):
            sent = self._channel.read(key)
        if sent is None:
            JoinWarning.warn(
                f"Values that rank {leader} logged in step {step} were dropped: rank 0, which writes the log, has"
                " finished, and only numbers, strings, lists and tensors can be sent to it. Log only such values."
            )
        return cast(T | None, sent)

    def _check_logs(self, key: str, leader: int, step: int) -> None:
        """Check, while rank 0 waits for values to log, whether the rank that should send them has passed the step.

        Raises:
            JoinError: It has passed the step without sending the values.
        """
        _, status = self._channel.health().answers.get(leader, (False, None))
        has_passed = status is not None and (status.step is None or status.step > step)
        if has_passed and not self._channel.posted(key):
            raise JoinError(
                f"Rank 0 has finished and waits for the values that rank {leader} logs in step {step}, but that rank"
                " completed the step without logging. With placeholder=, call `log` on all ranks, the same number of"
                " times."
            )


class Together(Schedule):
    """Gives all ranks the same number of steps; each step's exchange shows whether there is another one."""

    def begin(self, step: int) -> bool:
        has_next = self._reader.has_next()
        self._current.is_last, self._current.ending = False, ()
        self._tail_log.change(tuple(range(self._tail_log.members.world_size)) if has_next else ())
        return True


def _check_given(given: Sequence[Any]) -> None:
    refuse_engines(given)
    custom = (each for each in given if isinstance(each, Joinable) and not isinstance(each, (nn.Module, Optimizer)))
    if (own := next(custom, None)) is not None:
        raise UnsupportedError(
            f"A {type(own).__name__}, which is a Joinable, was passed to Join with placeholder=, where every rank"
            " runs every step and no hooks run. Do not pass it, and do the work of its hooks in the step."
        )
    if any(map(holds_metrics, given)):
        raise UnsupportedError(
            "A metric was passed to Join with placeholder=, where it would count placeholders. Do not pass it, and"
            " update it only `if not join.joined`; after the loop, compute() combines all ranks."
        )
