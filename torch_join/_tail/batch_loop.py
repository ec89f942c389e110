"""One loop over `batches`: start, steps, `break`, end and measurement."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from enum import Enum
from typing import Any, cast

import torch

from torch_join._base.closing import is_left_on_purpose
from torch_join._base.errors import JoinDataWarning, JoinError, JoinValueError, name_ranks, raise_any
from torch_join._base.hyperparameters import Hyperparameters, compare, hyperparameters
from torch_join._base.sampler import Dealt, dealt_again
from torch_join._base.synced_steps import Synced, SyncedSteps
from torch_join._base.weighting import Window
from torch_join._compat.operators import collective_under_way
from torch_join._monitor.records import Stopwatch
from torch_join._schedule.placeholders import Placeholder
from torch_join._tail import nesting as _nesting
from torch_join._tail.placeholder_loop import PlaceholderLoop
from torch_join._tail.reader import Reader
from torch_join._tail.resuming import OVER, check_resumed
from torch_join._tail.schedules import Certain, EachBatch, EachUse, Planned, Schedule

# Exchanged when a loop starts.
_BEGIN = tuple[int | None, Hyperparameters, str, list[str], int, str, Dealt | None, list[Synced]]
# How a rank starts a loop: its code asks for a batch, or never asked (and it has no batches, or has some).
_ASKS, _EMPTY, _UNASKED = "asks", "empty", "unasked"


class Place(Enum):
    """Where this rank's user code is, as far as `Join` can tell."""

    OUTSIDE = "outside"  # in the `with`, before any loop
    LOOP = "loop"  # in a loop over `batches`
    LEFT = "left"  # after a loop that it left by `break`; the other ranks do not know this yet
    FINISHING = "finishing"  # after a `break` too, but finishing that loop, since it is about to communicate
    ENDED = "ended"  # after a loop that has ended on all ranks
    PLAIN = "plain"  # in or after a loop without `batches`, where the ranks meet at a model's forward


class BatchLoop:
    """A loop over `batches`.

    Args:
        driver: The loop's `LoopDriver`.
        reader: Reads the batches.
        asked: Whether this rank's code asked for a batch; if not, it has passed this loop by.
        number: The loop's number in its `with`, from 1.
        first: The step at which a resumed loop starts; -1 or `OVER` for other loops.

    Attributes:
        first: The first step, never negative.
        schedule: Determines which ranks are active at each step.
        stepped: Whether this rank's code has used the step's batch.
        forwarded: Whether a model passed to `Join` has run a forward in the loop.
        reads_ahead: Whether user code asked for a second batch before any such forward.
        uneven: Whether some rank has run out of batches before another.
        trains: The indices of the models that had a backward in this loop, run or mirrored by this rank.
        thread: The thread that iterates.
        source: Reads this rank's own batches, if batches are rebalanced.
        is_over: Whether all ranks have left the loop, but this rank still has to end the `with` around it.
        placeholders: Runs the loop, if finished ranks run placeholders in it.
        stopwatch: Measures the loop, if the user passed a monitor.
    """

    def __init__(self, driver: Any, reader: Reader[Any], asked: bool, number: int, first: int) -> None:
        self.driver = driver
        self.reader, self.asked, self.number, self._resumes_at = reader, asked, number, first
        self.first = max(0, first)
        self.schedule = Schedule(driver.step, reader)
        self.stepped = True
        self.forwarded = self.reads_ahead = self.uneven = self.is_over = False
        self.trains: set[int] = set()
        self.thread = threading.get_ident()
        self.source: Reader[Any] | None = None
        self.placeholders: PlaceholderLoop | None = None
        self.stopwatch: Stopwatch | None = None
        self._grad_enabled = torch.is_grad_enabled()
        self._left_at = 0  # the number of steps when this rank left by `break`
        self._even_until = 0  # in each step before this one, all ranks have a batch and another one after it

    @property
    def is_current(self) -> bool:
        """Whether this rank is in this loop."""
        driver = self.driver
        return driver is not None and driver.place is Place.LOOP and driver.loop is self

    def drop(self) -> None:
        """Undo all changes and break reference cycles: an error's traceback may keep the loop's iterator."""
        if self.placeholders is not None:
            self.placeholders.close()
        self.driver = None

    # ------------------------------------------------------------ start

    def begin(self, name: str, placeholder: Placeholder | None) -> bool:
        """Start the loop; all ranks meet. Return whether any rank asks for its batches."""
        driver, log, members = self.driver, self.driver.tail_log, self.driver.members
        for model in log.models():
            model.check_can_train(self.reader.has_next)
        way = _ASKS if self.asked else _UNASKED if self.reader.has_next() else _EMPTY
        given = driver.tail.given if driver.begins_with_loop else []
        length = self.reader.certain_length()
        called = name + (" with placeholders" if placeholder is not None else "")
        begin = length, hyperparameters(driver.given), way, given, self._resumes_at, called, self.reader.dealt
        answers = log.channel.gather((*begin, log.synced_steps()), of=_BEGIN)
        lengths, hyper, ways, all_given, steps, loops, datasets, synced = zip(*answers, strict=True)
        log.warn_if_mixed(synced)
        if driver.begins_with_loop:
            driver.tail.compare_given(all_given)
        compare(hyper, members.global_ranks)
        if _ASKS not in ways:
            return False
        check_resumed(members.global_ranks, steps, loops)
        if (text := dealt_again(datasets, *self.reader.dealer)) is not None:
            JoinDataWarning.warn(text)
        if self.asked:
            driver.tail.reads.forget()
        driver.tail.early_exit, driver.unasked = driver.unasked, None
        # With rebalancing or placeholders, a rank without its own batches gets some, so it must ask for them too.
        refused = (_UNASKED, _EMPTY) if driver.rebalancing.enabled or placeholder is not None else (_UNASKED,)
        if unasked := members.named(rank for rank, way in enumerate(ways) if way in refused):
            raise JoinError(
                f"{name_ranks(unasked).capitalize()} created an iterator over join.batches, but never took any of its"
                " batches while other ranks iterated over theirs. Call next() for each batch, or leave such loops at"
                " the same step on all ranks."
            )
        if placeholder is not None:
            members.weigh("world")
        if members.meets_late:
            log.tap.install()
        given_bytes = driver.rebalancing.nbytes  # measured before the first batches are sent
        if placeholder is None:
            self.schedule = self._choose_schedule(lengths)
        else:
            self.schedule = self._choose_placeholders(lengths, placeholder)
        driver.place, driver.step_number = Place.LOOP, self.first
        driver.steps.forget()
        own_length = lengths[members.rank] or 0
        if self.asked and placeholder is None and any(length is None or length > own_length for length in lengths):
            driver.tail.note(at_last=False)
        log.parting.begin_loop(log.channel)
        log.synced = {}
        for model in log.models():
            log.synced[model.index] = SyncedSteps()
            model.begin_loop()
        if driver.options.monitor is not None and self._resumes_at != OVER:
            self.stopwatch = Stopwatch(self.first, given_bytes)
        return True

    def _choose_schedule(self, lengths: Sequence[int | None]) -> Schedule:
        driver = self.driver
        driver.step.check = None
        rebalances = driver.rebalancing.enabled and (None in lengths or len({*lengths}) > 1)
        plan = driver.positions.plan
        if self.first > 0 and rebalances != (plan is not None) and not (plan or {}).get("is_new", False):
            now, then = ("with", "without") if rebalances else ("without", "with")
            raise JoinValueError(
                f"A loop {now} rebalance=True was resumed from a state that was written {then} rebalance=True, which"
                f" counts steps differently. Resume {then} rebalance=True, or from a state written after a loop."
            )
        if driver.rebalancing.enabled:
            source = self.reader
            planned = Planned(driver.step, source, driver.rebalancing, plan)
            self.reader = planned.read()
            if driver.rebalancing.current is not None:
                self.source = source
                driver.step.check = planned.check_barrier
                return planned
        if driver.options.may_break or (driver.members.meets_late and None not in lengths):
            return EachUse(driver.step, self.reader, lengths, driver.tail.record_at_top)
        if driver.members.meets_late or None in lengths:
            return EachBatch(driver.step, self.reader)
        known = cast(list[int], [*lengths])
        return Certain(driver.step, self.reader, known, driver.options.throw_on_early_termination, self.first)

    def _choose_placeholders(self, lengths: Sequence[int | None], kind: Placeholder) -> Schedule:
        driver, self.source = self.driver, self.reader
        self.reader = self.placeholders = PlaceholderLoop(kind, self.source, driver, lengths, self.first, self.number)
        driver.remarks.may_rebalance = False
        return self.placeholders.schedule(driver.step)

    # ------------------------------------------------------------ steps

    @staticmethod
    def go_through(begin: Callable[[], "BatchLoop | None"]) -> Iterator[Any]:
        """Start a loop and yield this rank's batches; then serve the other ranks."""
        if (loop := begin()) is None:
            return
        driver, placeholders = loop.driver, loop.placeholders
        has_models, stopwatch = bool(driver.tail_log.models()), loop.stopwatch
        try:
            with nullcontext() if placeholders is None else placeholders.entered():
                while True:
                    with driver.tail_log.telling():
                        if not loop._begin_step():
                            break
                        loop.stepped = not has_models
                        batch = loop.reader.take()
                        driver.tail_log.in_window = type(batch) is Window
                    if placeholders is not None and placeholders.losses.joined:
                        stopwatch = None  # measured up to this rank's last batch
                    if stopwatch is not None:
                        stopwatch.take()
                    yield batch
                    if stopwatch is not None:
                        stopwatch.ask(driver.step.batch_count)
                    loop.reads_ahead = loop.reads_ahead or not loop.forwarded
                    if not loop.is_current:
                        if loop.reader.has_next():
                            raise _nesting.left_behind()
                        return
                    driver.step_number += 1
            if placeholders is not None:
                loop.end_placeholders()
        except GeneratorExit:
            on_purpose = is_left_on_purpose()
            if loop.is_current and on_purpose and loop._is_at_end:
                loop._go_through_end()
            elif loop.is_current:
                loop.leave()
            if not on_purpose and driver.members.world_size == 1:  # an error ended the loop: do not measure it
                loop.stopwatch = None
            raise
        finally:
            if loop.is_current:
                driver.finish_loop()
        loop.measure()

    def _begin_step(self) -> bool:
        """Start a step with the active ranks; serve them if this rank has joined. Return whether it is active."""
        driver, schedule, number = self.driver, self.schedule, self.driver.step_number
        if number < self._even_until and self.reader.has_next():  # the common case, which must cost almost nothing
            driver.steps.skip()
            if number % 2:
                raise_any(driver.tail_log.channel.failure())
            return True
        driver.steps.begin()
        driver.tail_log.parting.end()
        rank = driver.members.rank
        if not schedule.begin(number):
            lengths, next_step = schedule.expected, number + 1
            if lengths and lengths[rank] == next_step and any(n is None or n > next_step for n in lengths):
                driver.tail.note()  # this step is expected to be the last one on this rank, but not on all
            return True
        is_active: bool = driver.go_on()
        if is_active and rank in driver.step.ending and not driver.step.is_last:
            driver.tail.note()
        schedule.check(number)
        if schedule.lengths is not None and driver.is_even:
            self._even_until = min(schedule.lengths) - 1  # the last step of the rank with the fewest batches
        return is_active

    def status(self) -> tuple[int, list[int]] | None:
        """See `Status`; called from another thread."""
        driver = self.driver  # a local name: another thread may reset the attribute
        if driver is None or not self.is_current or not (self.source or self.reader).pulling:
            return None
        ranks = collective_under_way(self.thread)
        return None if ranks is None else (driver.step_number, ranks)

    # ------------------------------------------------------------ end

    @property
    def _is_at_end(self) -> bool:
        """Whether this rank has certainly used its last batch, while other ranks have more."""
        driver, lengths = self.driver, self.schedule.lengths or self.schedule.expected
        if len({*lengths}) < 2 or isinstance(self.schedule, Planned) or lengths[driver.members.rank] is None:
            return False
        awaits = any(model.awaits_backward for model in driver.tail_log.models())
        return self.stepped and not awaits and lengths[driver.members.rank] == driver.step_number + 1

    def _go_through_end(self) -> None:
        """End a loop, closed after this rank's last batch, as if user code had asked for another batch."""
        driver, log = self.driver, self.driver.tail_log
        if self.stopwatch is not None:
            self.stopwatch.ask(driver.step.batch_count)
        driver.step_number += 1
        # An error raised while a generator closes is lost, so `telling` raises it again at this rank's next meeting.
        with suppress(BaseException):
            try:
                with driver.tail_log.telling():
                    self._begin_step()
            except BaseException:
                driver.place, log.has_to_meet = Place.LEFT, True
                log.tap.install()
                raise
            driver.finish_loop()
            self.measure()
            if driver.end_with_loop is not None:
                driver.place, log.has_to_meet, self.is_over = Place.LEFT, True, True
                log.tap.install()

    def leave(self, at_once: bool = True) -> None:
        """Leave the loop by `break`; `at_once` unless user code has run since the `break`."""
        driver, log, in_tail = self.driver, self.driver.tail_log, self.driver.members.announces
        if self.stopwatch is not None:
            self.stopwatch.leave(driver.step.batch_count)
        (self.source or self.reader).leave()
        log.remember_gradients()
        lengths, left_at = self.schedule.lengths, driver.step_number + 1
        self._left_at = left_at
        # If no rank can run out before another, there is no handover.
        hands_over = in_tail or lengths is None or min(lengths) <= left_at < max(lengths)
        driver.tail.leave_early(watches=at_once and hands_over and driver.members.world_size > 1)
        driver.place, log.has_to_meet = Place.LEFT, True
        self.stepped = driver.step.drop() or self.stepped
        log.parting.end()
        # Other ranks may still train, or wait at the end of the `with`: with the tap, this rank's next collective first
        # finishes the loop. All ranks must choose alike at a step that is, or may be, some rank's last one.
        is_last = (lengths is None or left_at in lengths) and not isinstance(self.schedule, Planned)
        if in_tail or is_last or driver.members.meets_late or driver.end_with_loop is not None:
            log.tap.install()
        else:
            log.tap.remove()

    def go_to_end(self) -> None:
        """Continue without batches until all ranks have joined."""
        driver = self.driver
        if driver.tail.early_exit is not None:
            driver.tail.early_exit.meet()
        if isinstance(self.schedule, EachUse) and self.forwarded and not self.stepped:
            raise JoinError(
                f"Rank {driver.members.name} left its loop at step {driver.step_number}, after taking a batch but"
                " before the model's forward, on which the other ranks already rely. Put the `break` at the end of a"
                " step."
            )
        with driver.tail_log.telling():
            if self.schedule.lengths is not None:  # if this rank left at its last batch, all ranks know that it is done
                driver.step_number += 1
                driver.steps.now = False
                driver.step.know(driver.step_number, self.schedule.lengths)
                if not driver.go_on():
                    return
            driver.meet_without_input()

    def end_placeholders(self) -> None:
        """End a loop in which finished ranks run placeholders, if this is one; all ranks call this."""
        if self.placeholders is not None:
            with self.driver.tail_log.telling():
                self.driver.own_taken += self.placeholders.finish()

    def measure(self) -> None:
        """Log and measure a loop that has ended; all ranks meet if there is a monitor."""
        if (driver := self.driver) is None:  # the `with` has ended, but some code still holds the loop's iterator
            return
        rebalancing = driver.rebalancing
        trains = bool(self.trains) if self.placeholders is None else self.placeholders.losses.trains
        if trains and driver.remarks is not None:
            driver.remarks.end(max(driver.step_number, self._left_at))
        stopwatch, self.stopwatch = self.stopwatch, None
        if stopwatch is None or (monitor := driver.options.monitor) is None:
            return
        given, received = rebalancing.exchanged
        own_record = stopwatch.stop(given, received, rebalancing.nbytes)
        if self.placeholders is None and not driver.tail_log.models():
            trains = self._grad_enabled
        with driver.tail_log.telling():
            record = monitor.add_loop(
                own_record, driver.tail_log.channel, trains, rebalancing.enabled, driver.options.weighting
            )
            if record is not None:
                driver.log_epoch(record.metrics(), monitor.steps - 1)
