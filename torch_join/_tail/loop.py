"""The loops of a `Join`: how one is gone through, left and finished."""

import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.closing import is_left_on_purpose
from torch_join._base.devices import use_device
from torch_join._base.errors import JoinError, JoinValueError, name_ranks, raise_any
from torch_join._base.hyperparameters import Hyperparameters, Steps, compare, hyperparameters
from torch_join._base.membership import MeetingPoint, Membership
from torch_join._base.sampler import dealt_again
from torch_join._base.synced_steps import SyncedSteps
from torch_join._base.weighting import Window
from torch_join._compat.operators import collective_under_way, in_backward
from torch_join._control.channel import Channel
from torch_join._handover.early_exit import EarlyExit
from torch_join._monitor.stopwatch import Stopwatch
from torch_join._participants.clears import Clears, innermost_optimizer
from torch_join._participants.custom import CustomParticipant
from torch_join._participants.make_participants import make_participants
from torch_join._participants.options import Options
from torch_join._participants.participant import Driver, Participant
from torch_join._schedule.active_ranks import early_termination
from torch_join._schedule.placeholders import Placeholder
from torch_join._schedule.plan import Share
from torch_join._schedule.positions import LoaderPlace
from torch_join._schedule.rebalancing import Rebalancing
from torch_join._tail import nesting as _nesting
from torch_join._tail.placeholder_loop import PlaceholderLoop
from torch_join._tail.planned import Planned
from torch_join._tail.position_exchange import PositionExchange
from torch_join._tail.reader import Batches, Reader, Unbegun, is_length_certain
from torch_join._tail.resuming import OVER, NamedLoops, check_resumed, state_of
from torch_join._tail.schedules import Certain, EachBatch, EachUse, Schedule
from torch_join._tail.step import Step, Telling
from torch_join._tail.stopping import StopExchange, StopSignals
from torch_join._tail.tail import Tail
from torch_join._tail.tail_log import TailLog

T = TypeVar("T")
P = TypeVar("P", bound=Participant)

_BEGIN = tuple[int | None, Hyperparameters, str, list[str], int, str, int | None]  # of a loop
# How a rank begins it: by asking for a batch, or because its user has not, and it has none or has some.
_ASKS, _EMPTY, _UNASKED = "asks", "empty", "unasked"


class Place(Enum):
    """Where this rank's own code is, as far as its `Join` can know."""

    OUTSIDE = "outside"  # in the `with`, before any loop
    LOOP = "loop"  # in a loop over `batches`
    LEFT = "left"  # behind one that it has left by `break`, which the others do not know yet
    FINISHING = "finishing"  # as before, and about to do something with others: it finishes that loop first
    ENDED = "ended"  # behind one that has ended on all ranks
    PLAIN = "plain"  # in, or behind, a loop without `batches`, where the ranks meet at a model's forward


@dataclass(eq=False)
class Loop:
    """A loop over `batches`.

    Attributes:
        asked: Whether it was asked for a batch; else this rank is elsewhere in its own code.
        schedule: Says who is active at which step.
        stepped: Whether the step's batch has been used.
        forwarded: Whether it runs forwards of a model that was given.
        reads_ahead: Whether a second batch was asked for before any such forward.
        uneven: Whether a rank has run out of batches before another.
        number: Of the loops of one `with`, from 1 on.
        trains: The parts of models that have had a backward in it, of this rank's own or followed.
        thread: The thread that goes through it.
        even_until: Before this step, each is sure to be as the one before: all ranks have a batch, and more to come.
        first: The step with which it begins: later than 0 where it is resumed.
        source: Reads this rank's own batches, where these are rebalanced.
        is_over: Whether all ranks have left it, and this one has yet to end the `with` that is to end with it.
        placeholders: Runs it, if finished ranks run placeholders in it.
        stopwatch: Measures it, where the user has given a monitor.
    """

    reader: Reader[Any]
    asked: bool
    schedule: Schedule = field(default_factory=Schedule)
    stepped: bool = True
    forwarded: bool = False
    reads_ahead: bool = False
    uneven: bool = False
    number: int = 0
    trains: set[int] = field(default_factory=set)
    thread: int = field(default_factory=threading.get_ident)
    even_until: int = 0
    first: int = 0
    source: Reader[Any] | None = None
    is_over: bool = False
    placeholders: PlaceholderLoop | None = None
    stopwatch: Stopwatch | None = None


class LoopDriver(Driver):
    """The driver of loops of the user's: over `batches` and, from forward to forward, others.

    Args:
        objects: Everything that was given to `Join`.
        options: What the user has chosen.
        group: The process group of the ranks that take part.

    Attributes:
        given: Everything that was given to `Join`, in an order that is the same on all ranks.
        members: Who is active.
        tail: What happens where ranks join and where all have.
        place: Where this rank's own code is.
        step: Where the ranks find out who is active at the current step.
        step_number: The current step, counted from the loop's begin.
        end_with_loop: Ends the `with`, where that is to end with its only loop: called when this rank, which has left
            the loop by `break`, is about to do something with others.
        is_one_loop: Whether the `with` is around one loop over `batches`, on all ranks, and around nothing else.
        begins_with_loop: Whether all ranks meet only as that loop begins, and not as the `with` does.
        asks: Whether this rank's user has asked for a batch of the loops that it goes through.
        plain_steps: How many steps there were outside of `batches`.
        positions: Begins loops, of the last one's name, where a state that was loaded says that they go on.
        find_other_place: Returns this rank's place in another loader than that of the loop, by a number; by default
            those in loops of other names.
        signals: What asks the job to stop.
        log_epoch: Is given what a monitor says of a loop that has ended, and its last step's number, in all loops.
    """

    end_with_loop: Callable[[], None] | None = None
    is_one_loop = begins_with_loop = False
    asks = True
    plain_steps = 0

    def __init__(self, objects: list[Any], options: Options, group: Any) -> None:
        self.given, self.options = objects, options
        weighs = options.placeholder is None  # else where backwards begin: see `WeighedLosses`
        self.members = Membership(group, options.weighting if weighs else "world", weighs and options.may_break)
        self.tail = Tail(objects, options)
        self._rebalancing = Rebalancing(self.members, options.rebalance and options.enable)
        self._throws = options.throw_on_early_termination
        self._backward_collectives = options.backward_collectives
        self._loop: Loop | None = None  # the current one, or the last
        self._clears: list[Clears] = []
        self._steppers: dict[int, list[Clears]] = defaultdict(list)  # by model, those of optimizers that step it
        self._unbegun = Unbegun()
        self._unasked: EarlyExit | None = None  # what there was when the user began the loop that nobody asked
        self.signals = StopSignals()
        self._named = NamedLoops(*((self.members.rank, self.members.world_size) if options.enable else (0, 1)))
        self.positions = self._named.current
        self.find_other_place: Callable[[int], LoaderPlace | None] = self._named.find_others
        self.log_epoch: Callable[[dict[str, float], int], None] = lambda *_: None
        if options.monitor is not None and not options.enable and self.members.world_size > 1:
            raise JoinValueError(
                "monitor= with enable=False: the ranks do not meet, so that nobody knows how uneven their inputs are."
                " Leave monitor= out."
            )
        self._renew_tail_log()
        self._reset()
        if self.options.enable:
            self._make_participants()

    def _reset(self) -> None:
        """Begin anew, as before the first step."""
        if self._loop is not None and self._loop.placeholders is not None:
            self._weigh()
        self.members.reset()
        self.tail_log.reset()
        self.step.reset()
        self.tail.reset()
        self._named.current.end()
        self.place = Place.OUTSIDE
        self.step_number = self._loops = self.plain_steps = self._own_taken = 0
        self._loop = None
        self._telling.raised = None
        self._steps = Steps(self.given)
        self._entered_in = threading.get_ident()
        self._steps_in: int | None = None  # the thread of the last forward
        self._uneven_loops: set[tuple[int, int]] = set()  # that have ended, and a model that had backwards in it

    def _weigh(self) -> None:
        if self.options.placeholder is None:  # else where backwards begin: see `WeighedLosses`
            self.members.weigh(self.options.weighting, self.options.may_break)

    def _renew_tail_log(self) -> None:
        self.tail_log = self.tail.tail_log = TailLog(
            self.members, self.meet, self.tail.check_backward, self.before_collective
        )
        self._telling = Telling(self.tail_log)
        self.step = Step(self.tail_log, self._telling, self._follow_up)
        self.tail_log.loader = self._loader_status
        self.tail_log.step = lambda: self.step_number if self.in_loop else None
        self.tail_log.backwards.replicas = self.options.hand_over_ignored is True
        self.backward_collectives = self._backward_collectives

    def _make_participants(self) -> None:
        if self.options.placeholder is None:  # else there is nothing to follow
            self.tail_log.participants = make_participants(self, self.given, self.options.hooks)
        self.add(partial(PositionExchange, find_place=self._find_place))
        self.add(StopExchange)

    def add(self, make: Callable[["LoopDriver", int], P]) -> P:
        """Add a participant after all others, before the `with` is entered; `make` gets this object and an index."""
        participant = make(self, len(self.tail_log.participants))
        self.tail_log.participants.append(participant)
        return participant

    def enter(self, open_channel: Callable[[], Channel]) -> None:
        """Begin a `with`; all ranks meet.

        Raises:
            JoinValueError: The ranks were given different things.
        """
        _nesting.enter(self, self.given, lambda: self.in_loop)
        if not self.tail_log.participants:  # it has been left before
            self._renew_tail_log()
            self._make_participants()
        self._reset()
        try:
            parameters = (p for model in self.tail_log.models() for p in model.modules[0].parameters())
            if (first := next(parameters, None)) is not None:
                use_device(first.device, self.members.group)  # before the channel, which may have to go by it
            self.tail_log.open(open_channel())
            if not self.begins_with_loop:
                self.tail.compare_given(self.tail_log.channel.gather(self.tail.given, of=list[str]))
            for each in self.tail_log.participants:
                each.enter()
        except BaseException:
            self.leave()
            raise

    def finish(self, error: BaseException | None) -> None:
        """End a `with`, by an error or without one; all ranks meet."""
        if error is not None:
            self._telling.raised = None  # this one passes, also where it was raised from that
        with self._telling:
            if error is not None:
                raise error
            if self.in_loop:  # left by `break`, while a variable holds its iterator
                self._abandon(at_once=False)
            self._unbegun.begin_all()
            self.return_to_loop()
            if not (self.is_one_loop and self.place is Place.ENDED):  # else all have left it, and there is no other
                verdict = self.members.last_joiner
                self._meet_without_input()
                if self.place is Place.ENDED:
                    self.members.last_joiner = verdict
            for each in self.tail_log.participants:
                each.after_all(self.members.last_joiner)
            # No rank's process ends before all have come here.
            said = self.tail_log.channel.gather(hyperparameters(self.given), of=Hyperparameters)
            compare(said, self.members.global_ranks)
            self._rebalancing.close()
            self.tail_log.channel.close(meets=self._rebalancing.enabled)

    def finish_alone(self, error: BaseException | None) -> None:
        """Measure the last loop, if it was left and not by an error, where ranks do not meet."""
        # A context in a generator ends by a `GeneratorExit`, after a `break`.
        if self._loop is not None and (error is None or isinstance(error, GeneratorExit)):
            self._measure(self._loop)
        elif self._loop is not None:
            self._loop.stopwatch = None

    def leave(self) -> None:
        """Leave nothing behind: participants and the tap refer to this, and it to the group, with its threads."""
        self.step.reset()
        self._telling.raised = None
        if not self.signals.lasts:
            self.signals.restore()
        self.tail.reads.forget()
        self._rebalancing.abandon()
        self.place = Place.OUTSIDE
        if self._loop is not None and self._loop.placeholders is not None:
            self._loop.placeholders.drop()
        self._unbegun = Unbegun()
        self.tail_log.close()
        self._steppers.clear()
        while self._clears:
            self._clears.pop().remove()
        self.tail_log.channel.close()
        _nesting.leave(self)

    # ------------------------------------------------------------ what the user sees, and adapters

    @property
    def backward_collectives(self) -> bool:
        """Whether backwards are announced piece by piece before anything shows that they must be."""
        return self._backward_collectives

    @backward_collectives.setter
    def backward_collectives(self, always: bool) -> None:
        self._backward_collectives = self.tail_log.backwards.always = always
        self.tail_log.backwards.in_pieces = always or self.tail_log.backwards.in_pieces

    @property
    def in_loop(self) -> bool:
        """Whether this rank is in a loop over `batches`."""
        return self.place is Place.LOOP

    @property
    def reader(self) -> Reader[Any] | None:
        """What reads the loader of the current loop, or of the last one; `None` before the first."""
        if self._loop is None or self._loop.placeholders is None:
            return None if self._loop is None else self._loop.reader
        return self._loop.source

    @property
    def certain_lengths(self) -> list[int] | None:
        """All ranks' numbers of batches in the current loop, or the last one, where these can be no others."""
        if self._loop is None or self._loop.placeholders is None:
            return None if self._loop is None else self._loop.schedule.lengths
        return self._loop.placeholders.lengths

    @property
    def was_even(self) -> bool:
        """Whether all ranks knew that they had equally many batches in the current loop, or the last one."""
        certain = self.certain_lengths
        return certain is not None and min(certain) == max(certain)

    @property
    def trained_ahead(self) -> list[Any]:
        """The models that the last loop has trained, if it asked for batches ahead of its steps and was uneven."""
        loop = self._loop
        if loop is None or not (loop.reads_ahead and loop.uneven):
            return []
        return [model.modules[0] for model in self.tail_log.models() if model.index in loop.trains]

    @property
    def share(self) -> Share | None:
        """Whose batch this rank has at the current step of a loop over `batches`."""
        planned = None if self._loop is None else self._loop.schedule.share
        if planned is not None or not self.in_loop or self.members.joined:
            return planned
        return Share(self.members.rank, self.step_number)

    def find_members(self) -> Membership:
        """Meet the other ranks, if that was put off; return who takes part in the current step."""
        self.meet()
        return self.members

    def find_active(self) -> tuple[int, ...]:
        """Meet the other ranks, if that was put off; return the ranks that have a batch at the current step."""
        return self.find_members().active if self.placeholders is None else self.placeholders.find_active()

    @property
    def placeholders(self) -> PlaceholderLoop | None:
        """The current loop, if finished ranks run placeholders in it."""
        return self._loop.placeholders if self.in_loop and self._loop is not None else None

    @property
    def counts(self) -> bool:
        """Whether batches are counted."""
        return self.options.weighting not in ("world", "active")

    def check_together(self, call: str) -> None:
        """Meet the others, if that was put off, before something that takes all ranks.

        Raises:
            JoinError: Some rank has joined, or nobody knows whether one has.
        """
        with self._telling:
            if self.place is Place.PLAIN:
                raise JoinError(
                    f"{call} inside of a `with` whose loop is a plain `for`: a rank that has run out of batches is not"
                    f" known to have come to its end. Loop over join.batches(loader), or call {call} after the `with`."
                )
            active, members = self.find_active(), self.members
            if len(active) < members.world_size:
                joined = members.named(rank for rank in range(members.world_size) if rank not in active)
                raise JoinError(
                    f"{call} in a step that {name_ranks(joined)} had no batch for. It takes all ranks:"
                    " keep what each step computes in a list, and call it after the loop, to which all ranks come."
                )

    def weigh(self, value: Tensor) -> Tensor:
        """See `Join.weigh`."""
        if self.placeholders is not None:
            return self.placeholders.weigh(value)
        if not self.options.enable:
            return value
        raise JoinError("join.weigh() is for a loop with placeholder=. In others gradients are weighted by Join.")

    def check_rows(self, rows: Any) -> None:
        """Raise if rows for `gather` are of placeholders too, in the loops that have ended.

        Raises:
            JoinValueError: There are more structures of them than this rank had batches.
        """
        last = None if self._loop is None else self._loop.placeholders
        if last is not None and last.losses.joined and isinstance(rows, list) and len(rows) > self._own_taken:
            with self._telling:
                raise JoinValueError(
                    f"Rank {self.members.name} gives the rows of {len(rows)} steps, and had {self._own_taken} batches:"
                    " those of placeholders are among them. Append what a step computes only `if not join.joined`, or"
                    " give indices, of which each counts once."
                )

    def find_last_step(self) -> bool:
        """Meet the others, if that was put off; return whether no rank has an input after this step, as is known."""
        if self.placeholders is not None:
            return self.placeholders.reader.hear().is_last_step
        if not (self.in_loop and self._loop is not None and self._loop.schedule.presumes_all):  # else it is planned
            self.meet()
        return self.step.is_last

    def find_main_joined(self) -> bool:
        """Meet, if that was put off; return whether rank 0, which saves and logs, has joined, and this one not."""
        return self.tail_log.meet() and 0 not in self.members.active

    def find_acting_main(self) -> bool:
        """Meet the others, if that was put off; return whether this rank does what rank 0 would, which has joined."""
        return self.find_main_joined() and self.members.leads

    def stop_requested(self) -> bool:
        """See `Join.stop_requested`."""
        if not self.options.enable:
            if self.members.world_size > 1:
                raise JoinValueError(
                    "join.stop_requested() with enable=False: the ranks do not meet, so that each would stop at a step"
                    " of its own. Leave enable=False out."
                )
            self.signals.listen()
            return self.signals.received
        if not _nesting.is_entered(self):
            return self.signals.agreed
        self.meet()
        with self._telling:
            if self.place is Place.PLAIN:
                raise JoinError(
                    "join.stop_requested() inside of a `with` whose loop is a plain `for`: a rank that has run out of"
                    " batches is not known to have come to its end. Loop over join.batches(loader)."
                )
            return self._part(StopExchange).ask(self._loops, self.step_number if self.in_loop else None)

    # ------------------------------------------------------------ positions

    def state_dict(self) -> dict[str, Any]:
        """See `Join.state_dict`."""
        if not self.options.enable:
            return state_of([self._find_place()], self.in_loop, self._named.name, [self._named.find_others()])
        call = "join.state_dict()"
        _nesting.check_entered(self, f"{call} was called")
        others = cast(list[dict[str, LoaderPlace]], self.gather_places(call, 1) if self._named.find_others() else [])
        return state_of(self.gather_places(call), self.in_loop, self._named.name, others)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Join.load_state_dict`."""
        if self.in_loop:
            with self._telling:
                raise JoinError("join.load_state_dict() was called in a loop. Call it before the one that is to go on.")
        self._named.load(state)
        self.positions = self._named.current

    def gather_places(self, name: str, which: int = 0) -> list[LoaderPlace | None]:
        """Return every rank's place, by rank; all active ranks call this at the same step.

        Args:
            name: What the user has called.
            which: Of which loader: 0 for that of the loop, or of the last one; see `find_other_place`.
        """
        self.meet()
        exchange = self._part(PositionExchange)
        with self._telling:
            amid = self.place in (Place.LOOP, Place.LEFT, Place.FINISHING) and self.is_amid_window()
            if amid is not False:
                text = (
                    f"{name} at step {self.step_number} of a loop, where rank {self.members.name} holds gradients that"
                    " its optimizer has not stepped with: an accumulation has begun, and a state holds no gradients, so"
                    " that a resumed run would leave these batches out. Save at the end of a window, after the"
                    " optimizer's step; or, if they are not to count, call zero_grad() before."
                )
                if amid:
                    raise JoinError(text)
                warnings.warn(f"It may be amid a window of accumulation: {text}", stacklevel=2)
            return exchange.gather(self.step_number if self.in_loop else -1, name, which)

    def _part(self, kind: type[P]) -> P:
        return next(each for each in self.tail_log.participants if isinstance(each, kind))

    def is_amid_window(self) -> bool | None:
        """Whether this rank holds gradients of an accumulation that has begun; `None` where nobody can tell yet."""
        if self._loop is not None and self._loop.placeholders is not None:
            return self._loop.placeholders.losses.holds_gradients
        models = self.tail_log.models()
        said = {each.awaits_step(m.holds_unsynced) for m in models for each in self._steppers[m.index]}
        return True in said or (None if None in said else False)

    def _find_place(self, which: int = 0) -> LoaderPlace | None:
        if which:
            return self.find_other_place(which)
        loop = self._loop
        if self.positions.loaded is not None or loop is None:
            return self.positions.find_place()
        plan = self._rebalancing.current
        if loop.source is not None and plan is not None and self.in_loop:
            loop.source.plan = plan.place()
        return (loop.source or loop.reader).place()

    # ------------------------------------------------------------ a loop over batches

    def batches(self, loader: Iterable[T], name: str = "", placeholder: Placeholder | None = None) -> Iterable[T]:
        self.options.check_placeholder(placeholder)
        return Batches(partial(self._begin_later, name=name, placeholder=placeholder), loader)

    def _begin_later(self, loader: Iterable[T], name: str, placeholder: Placeholder | None) -> Iterator[T]:
        """Go through `loader` from the first `next` on, or from where it should have come to that."""
        go_through = partial(self.go_through, loader, name=name, placeholder=placeholder)
        ticket = None
        if self.options.enable:
            # Only who has no batch may be right never to ask for one.
            has_some = is_length_certain(loader) and len(loader) > 0  # type: ignore[arg-type]
            watch = None if has_some else partial(self.tail.watch_unasked, is_length_certain(loader))
            left, since = None if watch is None else watch(), self.tail.handovers
            ticket = self._unbegun.add(partial(self._go_through_unasked, go_through, left, watch, since))
        return self._in_order(ticket, go_through)

    def _go_through_unasked(
        self,
        go_through: Callable[..., Iterator[T]],
        left: EarlyExit | None,
        watch: Callable[[], EarlyExit] | None,
        since: int,
    ) -> Iterator[T]:
        """Go through a loop that this rank's code has behind it, of which it has asked for no batch."""
        if watch is not None and self.tail.handovers > since:  # of an earlier loop, which that code has not made
            left = watch()
        self._unasked = left
        if left is not None:
            left.meet()
        return go_through(asks=False)

    def _in_order(self, ticket: object, go_through: Callable[[], Iterator[T]]) -> Iterator[T]:
        if self.options.enable and not self._unbegun.begin(ticket) and _nesting.is_entered(self):
            with self._telling:
                raise _nesting.left_behind()
        yield from go_through()

    def go_through(
        self,
        loader: Iterable[T],
        reader_of: Callable[[Iterable[T]], Reader[T]] = Reader,
        asks: bool = True,
        name: str | None = None,
        placeholder: Placeholder | None = None,
    ) -> Iterator[T]:
        if not self.options.enable:
            if self.place is not Place.LOOP:
                self.finish_alone(None)
            first, reader = self._open(loader, reader_of, name)
            self.step_number = max(0, first)
            alone = self._loop = Loop(reader, asked=True, first=self.step_number)
            self.place = Place.LOOP
            if self.options.monitor is not None and first != OVER:
                alone.stopwatch = Stopwatch(alone.first)
            try:
                while reader.has_next():
                    batch = reader.take()
                    if alone.stopwatch is not None:
                        alone.stopwatch.take()
                    yield batch
                    if alone.stopwatch is not None:
                        alone.stopwatch.ask()
                    self.step_number += 1
            except GeneratorExit:
                reader.leave()
                if alone.stopwatch is not None:
                    alone.stopwatch.leave()
                if not is_left_on_purpose():  # by an error, which makes no epoch
                    alone.stopwatch = None
                raise
            finally:
                self.place = Place.ENDED
            self._measure(alone)
            return
        with self._telling:
            loop = self._begin_loop(
                loader, reader_of, asks and self.asks, name, placeholder or self.options.placeholder
            )
        if loop is None:
            return
        has_models = bool(self.tail_log.models())
        try:
            if loop.placeholders is not None:
                loop.placeholders.enter()
            while True:
                with self._telling:
                    if not self._begin_step(loop, loop.schedule):
                        break
                    loop.stepped = not has_models
                    batch = loop.reader.take()
                    self.tail_log.in_window = type(batch) is Window
                stopwatch = loop.stopwatch
                if loop.placeholders is not None and loop.placeholders.losses.joined:
                    stopwatch = None  # it stands as of this rank's last batch
                if stopwatch is not None:
                    stopwatch.take()
                yield batch
                if stopwatch is not None:
                    stopwatch.ask()
                loop.reads_ahead = loop.reads_ahead or not loop.forwarded
                if not self._is_in(loop):
                    if loop.reader.has_next():
                        raise _nesting.left_behind()
                    return
                self.step_number += 1
            self._end_placeholders(loop)
        except GeneratorExit:
            if loop.placeholders is not None:
                loop.placeholders.leave()
            on_purpose = is_left_on_purpose()
            if self._is_in(loop) and on_purpose and self._is_at_end(loop):
                self._go_through_end(loop)
            elif self._is_in(loop):
                self._abandon()
            if not on_purpose and self.members.world_size == 1:  # by an error, which makes no epoch
                loop.stopwatch = None
            raise
        finally:
            if loop.placeholders is not None:
                loop.placeholders.leave()
            if self._is_in(loop):
                self._finish_loop()
        self._measure(loop)

    def _open(
        self, loader: Iterable[T], reader_of: Callable[[Iterable[T]], Reader[T]], name: str | None
    ) -> tuple[int, Reader[T]]:
        """Return the first step of a loop, and what reads it; with no name, a front end has chosen its `positions`."""
        if name is None:
            return self.positions.first_step, self.positions.open(loader, reader_of)
        if self._named.begin(name):
            return OVER, reader_of(())
        self.positions = positions = self._named.current
        first, positions.reader = positions.first_step, positions.open(loader, reader_of)
        return first, positions.reader

    def _begin_loop(
        self,
        loader: Iterable[Any],
        reader_of: Callable[[Iterable[Any]], Reader[Any]],
        asks: bool,
        name: str | None,
        placeholder: Placeholder | None,
    ) -> Loop | None:
        """Begin a loop; all ranks meet. Return `None` if nobody goes through it."""
        _nesting.check_entered(self)
        if self.in_loop and self._loop is not None and not self._loop.reader.has_next():
            self._abandon(at_once=False)  # a loop by iter() and next(), which never asks for the end
        if self.in_loop:
            raise _nesting.nested()
        self.meet()
        self._loops += 1
        if self._loop is not None and self._loop.placeholders is not None:
            self._loop.placeholders.drop()
        first, reader = self._open(loader, reader_of, name)
        loop = self._loop = Loop(reader, asks, number=self._loops, first=max(0, first))
        for model in self.tail_log.models():
            model.check_can_train(reader.has_next)
        how = _ASKS if asks else _UNASKED if reader.has_next() else _EMPTY
        given = self.tail.given if self.begins_with_loop else []
        length, dealt_samples = reader.certain_length(), reader.dealt_samples
        called = (name or "") + (" with placeholders" if placeholder is not None else "")
        begin = length, hyperparameters(self.given), how, given, first, called, dealt_samples
        said = self.tail_log.channel.gather(begin, of=_BEGIN)
        lengths, hyper, ways, everyone, steps, loops, dealt = zip(*said, strict=True)
        if self.begins_with_loop:
            self.tail.compare_given(everyone)
        compare(hyper, self.members.global_ranks)
        if _ASKS not in ways:
            return None
        check_resumed(self.members.global_ranks, steps, loops)
        if (text := dealt_again(dealt, *reader.dealer)) is not None:
            warnings.warn(text, stacklevel=2)
        if asks:
            self.tail.reads.forget()
        self.tail.early_exit, self._unasked = self._unasked, None
        rebalances = self._rebalancing.enabled
        # With none, it is to be given some.
        refused = (_UNASKED, _EMPTY) if rebalances or placeholder is not None else (_UNASKED,)
        _nesting.refuse_unasked(self.members.named(rank for rank, way in enumerate(ways) if way in refused))
        if placeholder is not None:
            self.members.weigh("world")
        if self.members.meets_late:
            self.tail_log.tap.install()
        given_bytes = self._rebalancing.nbytes  # before the first batches are
        if placeholder is None:
            loop.schedule = self._choose_schedule(loop, lengths)
        else:
            loop.schedule = self._choose_placeholders(loop, lengths, placeholder)
        self.place, self.step_number = Place.LOOP, loop.first
        self._steps.forget()
        mine = lengths[self.members.rank] or 0
        if asks and placeholder is None and any(length is None or length > mine for length in lengths):
            self.tail.note(at_last=False)
        self.tail_log.parting.begin_loop(self.tail_log.channel)
        self.tail_log.synced = SyncedSteps()
        for model in self.tail_log.models():
            model.begin_loop()
        if self.options.monitor is not None and first != OVER:
            loop.stopwatch = Stopwatch(loop.first, given_bytes)
        return loop

    def _measure(self, loop: Loop) -> None:
        """Have the monitor note a loop that has ended; all ranks meet."""
        stopwatch, loop.stopwatch = loop.stopwatch, None
        if (monitor := self.options.monitor) is None or stopwatch is None:
            return
        mine = stopwatch.stop(*self._rebalancing.exchanged, self._rebalancing.nbytes)
        if self.options.enable:
            trains, channel = bool(loop.trains) or not self.tail_log.models(), self.tail_log.channel
            trains = trains if loop.placeholders is None else loop.placeholders.losses.trains
        else:
            trains, channel = torch.is_grad_enabled(), Channel()  # of one rank
        with self._telling:
            record = monitor.add_loop(mine, channel, trains, self._rebalancing.enabled)
            if record is not None:
                self.log_epoch(record.metrics(), monitor.steps - 1)

    def _choose_schedule(self, loop: Loop, lengths: Sequence[int | None]) -> Schedule:
        self.step.check = None
        known = None if self.members.meets_late or None in lengths else cast(list[int], [*lengths])
        rebalances = self._rebalancing.enabled and (None in lengths or len({*lengths}) > 1)
        plan = self.positions.plan
        if loop.first > 0 and rebalances != (plan is not None) and not (plan or {}).get("is_new", False):
            now, then = ("with", "without") if rebalances else ("without", "with")
            raise JoinValueError(
                f"A loop {now} rebalance=True was to go on from a state that was written {then} it, so that its steps"
                f" are others. Resume {then} it, or from a state that was written after a loop."
            )
        if self._rebalancing.enabled:
            planned = Planned(self.step, self._rebalancing, self.tail_log, plan)
            source = loop.reader
            loop.reader = planned.read(source)
            if self._rebalancing.current is not None:
                loop.source = source
                self.step.check = planned.check_barrier
                return planned
        if self.options.may_break or (self.members.meets_late and None not in lengths):
            return EachUse(self.step, loop.reader, self.tail_log, lengths, self.tail.look)
        if known is None:
            return EachBatch(self.step, loop.reader, self.members)
        return Certain(self.step, loop.reader, self.tail_log, known, self._throws, loop.first)

    def _choose_placeholders(self, loop: Loop, lengths: Sequence[int | None], kind: Placeholder) -> Schedule:
        loop.source = loop.reader
        loop.placeholders = placeholders = PlaceholderLoop(
            kind, loop.source, self.tail_log, self.options, self.given, lengths, loop.first, loop.number
        )
        loop.reader = placeholders.reader
        return placeholders.schedule(self.step)

    def _end_placeholders(self, loop: Loop) -> None:
        """End a loop, if finished ranks have run placeholders in it; all ranks call this."""
        if loop.placeholders is not None:
            with self._telling:
                self._own_taken += loop.placeholders.end()

    def _is_in(self, loop: Loop) -> bool:
        return self.place is Place.LOOP and self._loop is loop

    def _is_at_end(self, loop: Loop) -> bool:
        """Whether this rank is certain to have had its last batch, and is done with it, while others have more."""
        lengths = loop.schedule.lengths or loop.schedule.expected
        if len({*lengths}) < 2 or isinstance(loop.schedule, Planned) or lengths[self.members.rank] is None:
            return False
        is_whole = loop.stepped and not any(model.awaits_backward for model in self.tail_log.models())
        return is_whole and self.step_number + 1 == lengths[self.members.rank]

    def _go_through_end(self, loop: Loop) -> None:
        """End a loop that is closed behind this rank's last batch as if it had been asked for another one."""
        if loop.stopwatch is not None:
            loop.stopwatch.ask()
        self.step_number += 1
        # What is raised in a generator that is closed is lost. So it is raised where this rank meets others next.
        with suppress(BaseException):
            try:
                with self._telling:
                    self._begin_step(loop, loop.schedule)
            except BaseException:
                self.place, self.tail_log.has_to_meet = Place.LEFT, True
                self.tail_log.tap.install()
                raise
            self._finish_loop()
            self._measure(loop)
            if self.end_with_loop is not None:
                self.place, self.tail_log.has_to_meet, loop.is_over = Place.LEFT, True, True
                self.tail_log.tap.install()

    def _abandon(self, at_once: bool = True) -> None:
        """Leave a loop by `break`; `at_once` unless this rank's own code has gone on since."""
        loop, in_tail = self._loop, self.members.announces
        assert loop is not None
        if loop.stopwatch is not None:
            loop.stopwatch.leave()
        (loop.source or loop.reader).leave()
        self.tail_log.remember_gradients()
        lengths = loop.schedule.lengths
        # Where no rank can run out before another, nothing will be handed over.
        ends = in_tail or lengths is None or min(lengths) <= self.step_number + 1 < max(lengths)
        self.tail.leave_early(watches=at_once and ends and self.members.world_size > 1)
        self.place, self.tail_log.has_to_meet = Place.LEFT, True
        loop.stepped = self.step.drop() or loop.stepped
        self.tail_log.parting.end()
        # Others may go on, or wait at the end of the `with`: what comes next with them is to finish the loop first.
        # All ranks must look in the same way at a step that is the last one of some, or may be.
        is_last = (lengths is None or self.step_number + 1 in lengths) and not isinstance(loop.schedule, Planned)
        if in_tail or is_last or self.members.meets_late or self.end_with_loop is not None:
            self.tail_log.tap.install()
        else:
            self.tail_log.tap.remove()

    def return_to_loop(self) -> None:
        """Finish a loop that this rank has left by `break`, before it does anything else with others."""
        loop = self._loop
        if self.place is not Place.LEFT or self.members.serves or loop is None:
            return
        end, self.end_with_loop = self.end_with_loop, None
        if loop.is_over:
            self.place, self.tail_log.has_to_meet = Place.ENDED, False
            self.tail_log.tap.remove()
        if end is not None:
            end()
        if end is not None or loop.is_over:
            return
        self.place = Place.FINISHING
        self.tail.reads.stop()
        try:
            self._go_to_end(loop)
        except BaseException:
            self.place, self.tail_log.has_to_meet = Place.OUTSIDE, False
            raise
        if not self.members.last_joiner:
            self.tail.reads.warn(self.members.name)
        self._end_placeholders(loop)
        self._finish_loop()
        self._measure(loop)

    def _go_to_end(self, loop: Loop) -> None:
        """Go, without batches, to where all ranks have joined."""
        if self.tail.early_exit is not None:
            self.tail.early_exit.meet()
        if isinstance(loop.schedule, EachUse) and loop.forwarded and not loop.stepped:
            raise _nesting.left_amid(self.members.name, self.step_number)
        with self._telling:
            if loop.schedule.lengths is not None:  # those who left with their last batch have ended, as the others know
                self.step_number += 1
                self._steps.now = False
                self.step.know(self.step_number, loop.schedule.lengths)
                if not self._go_on():
                    return
            self._meet_without_input()

    def _finish_loop(self) -> None:
        if (loop := self._loop) is not None and loop.uneven:
            self._uneven_loops |= {(loop.number, model) for model in loop.trains}
        if loop is not None and not loop.asked and not self.members.last_joiner:
            self.tail.reads.warn(self.members.name)
        self.tail.early_exit = None
        self.tail.reads.forget()
        if (plan := self._rebalancing.current) is not None and loop is not None:
            if loop.source is not None:
                loop.source.plan, loop.source.has_ended = plan.place(), True
            with self._telling:
                plan.end()
        self.place, self.tail_log.has_to_meet = Place.ENDED, False
        if loop is not None and loop.placeholders is not None:
            self._weigh()
        self._steps.forget()
        if not self.members.announces:
            self.tail_log.tap.remove()

    # ------------------------------------------------------------ a step

    def _begin_step(self, loop: Loop, schedule: Schedule) -> bool:
        """Begin a step, with whoever is active or still to meet; serve if this rank is not. Return whether it is."""
        if self.step_number < loop.even_until and loop.reader.has_next():  # most are so: this costs next to nothing
            self._steps.skip()
            if self.step_number % 2:
                raise_any(self.tail_log.channel.failure())
            return True
        self._steps.begin()
        self.tail_log.parting.end()
        if not schedule.begin(self.step_number):
            if self._ends_before_others(schedule.expected):
                self.tail.note()
            return True
        goes_on = self._go_on()
        if goes_on and self.members.rank in self.step.ending and not self.step.is_last:
            self.tail.note()
        schedule.check(self.step_number)
        if schedule.lengths is not None and self._is_even():
            loop.even_until = min(schedule.lengths) - 1  # that step is the last one of some
        return goes_on

    def _ends_before_others(self, lengths: Sequence[int | None]) -> bool:
        """Whether this step is expected to be this rank's last one, and not that of another active rank."""
        ends = self.step_number + 1
        return bool(lengths) and lengths[self.members.rank] == ends and any(n is None or n > ends for n in lengths)

    def _is_even(self) -> bool:
        """Whether a step is as the one before, and leaves nothing to do to the next one."""
        members = self.members
        return (
            len(members.active) == len(members.before) == members.world_size
            and self._is_under_way
            and not self._steps_elsewhere
            and all(model.is_prepared for model in self.tail_log.models())
        )

    @property
    def _is_under_way(self) -> bool:
        """Whether the loop's first step is over."""
        return self._loop is not None and self.step_number > self._loop.first

    def _meet_without_input(self) -> None:
        """Meet as a rank that has no batch; serve until all ranks have joined."""
        if self.step.has_arrived:
            self.step.meet()
        self.step.meet_now(False)
        self._go_on()

    def meet(self) -> None:
        """Finish a loop that was left, and wait until it is known who is active, if that was put off."""
        if self.place is Place.LEFT:
            self.return_to_loop()
        self.step.meet()

    def _follow_up(self) -> None:
        self._go_on(asked=False)
        if not self.members.announces:
            for model in self.tail_log.models():
                model.deferred = 0

    def _go_on(self, asked: bool = True) -> bool:
        """Do what follows from who is active: throw, serve, begin or end the tail. Return whether this rank is.

        Args:
            asked: Whether this rank's code asks for a batch; else it is in a step.
        """
        members, loop = self.members, self._loop
        joined, is_first = members.joined, len(members.before) == members.world_size
        if joined:
            self.tail_log.check_backwards_ended()
        if not members.active:
            self.tail.end(self.step_number, has_run=self.place is not Place.ENDED)
            return not joined
        if is_first and not self._steps_elsewhere:
            for model in self.tail_log.models():  # all ranks come here
                model.prepare()
        if members.uneven:
            if asked:
                self._check_thread()
            if self.in_loop and loop is not None:
                loop.uneven = True
            if self._throws:
                raise early_termination(members.rank, joined)
            if members.active != members.before:
                with self.step.watching_loaders() if joined else nullcontext():
                    self.tail.compare_steps(self._steps, members.meets_late)
            at_top = asked and self.in_loop and loop is not None and loop.asked
            if joined:
                self.joined_amid = any(model.awaits_backward for model in self.tail_log.models())
                is_first = loop is None or (self.in_loop and self.step_number == loop.first)
                self.tail.serve(at_top, has_run=self.plain_steps > 0 or not is_first)
                return False
            if not members.announces:
                self.tail.begin(self.step_number, at_top)
            self.tail_log.agreement.compare(members.rank, members.active)
        if self.step.ending and self.in_loop and self.tail_log.parting.begin(self.step_number, self.step.ending):
            self.tail_log.tap.install()
            if members.rank in self.step.ending:
                self.tail.reads.watch()
        return not joined

    @property
    def _steps_elsewhere(self) -> bool:
        """Whether batches are asked for in another thread than the one that takes the steps, which may be in one."""
        here = threading.get_ident()
        # Before its first forward a rank's steps are taken where the `with` was entered; with no batch there are none.
        steps_in = self._steps_in if self._steps_in is not None else self._entered_in if self._is_under_way else here
        return self._loop is not None and self.in_loop and here != steps_in

    def _check_thread(self) -> None:
        if not self._steps_elsewhere:
            return
        raise JoinError(
            f"Rank {self.members.name} goes through join.batches in another thread than the one that runs its steps (a"
            f" prefetcher, a queue that is filled in the background), and {name_ranks(self.members.joined_names)} ran"
            " out of batches: nobody can tell which step a batch is for. Put the thread inside: give join.batches what"
            " takes the batches out of the queue, `join.batches(prefetcher(loader))`."
        )

    def _loader_status(self) -> tuple[int, list[int]] | None:
        """See `Status`; another thread calls this."""
        if not self.in_loop or (loop := self._loop) is None or not loop.reader.pulling:
            return None
        ranks = collective_under_way(loop.thread)
        return None if ranks is None else (self.step_number, ranks)

    # ------------------------------------------------------------ what participants call

    @property
    def clears(self) -> list[Clears]:
        """The calls of the `zero_grad` of given optimizers (of one that wraps another, of that one's) and models."""
        if not self._clears:
            found = {id(inner): inner for thing in self.given if (inner := innermost_optimizer(thing)) is not None}
            models = [module for each in self.tail_log.models() for module in each.modules]
            self._clears = [Clears(one) for one in (*found.values(), *models)]
            for model in self.tail_log.models():
                own = {id(p) for p in model.modules[0].parameters()}
                steppers = self._clears[: len(found)]
                self._steppers[model.index] = [c for c in steppers if any(id(p) in own for p in c.parameters())]
        return self._clears

    @property
    def meets_at(self) -> MeetingPoint:
        if self.place is not Place.LOOP:
            return MeetingPoint.FORWARD
        late = self.members.meets_late and self._loop is not None and not isinstance(self._loop.schedule, EachBatch)
        return MeetingPoint.FIRST_USE if late else MeetingPoint.TOP

    @property
    def sees_steps(self) -> bool:
        return any(each.is_model or isinstance(each, CustomParticipant) for each in self.tail_log.participants)

    @property
    def loop_number(self) -> int:
        return self._loop.number if self.place is Place.LOOP and self._loop is not None else 0

    def before_forward(self, count: Callable[[], float], waits: bool = True) -> bool:
        """See `Driver`; a step begins here where the forward stands outside of `batches`."""
        if not in_backward():
            self._steps_in = threading.get_ident()
        if self.place is not Place.LOOP:
            self.return_to_loop()
            if not _nesting.is_entered(self):
                return True  # the `with` has ended in this
            if not self._is_read_elsewhere:
                self._begin_plain_step(count() if self.members.count is not None else 0)
                if self.members.count is not None:
                    self.tail_log.tap.install()
        if self._loop is not None:
            self._loop.stepped = True
            self._loop.forwarded = self._loop.forwarded or self.place is Place.LOOP
            if self.place is Place.LOOP and self._loop.schedule.lengths is not None:
                return True  # no meeting is put off
        self.step.arrive()
        # As long as the tap listens, nothing that others take part in can come before the answer is asked for. Where
        # all are certain to be active, only a `break` is yet to be heard of.
        late = self.tail_log.tap.installed and (self.in_loop or self.members.announces)
        late = late or (self._loop is not None and self._loop.schedule.presumes_all)
        # Nobody foresees a `break`. What is compared where a rank leaves must be as it was before this forward.
        if waits or self._throws or not late or (self.options.may_break and not self.members.uneven):
            self.step.meet()
        return not self.step.has_arrived

    def before_notice(self, participant: Participant) -> None:
        """See `Driver`; a step begins here if there is no model whose forward shows it, and this is the first part."""
        self.return_to_loop()
        if not _nesting.is_entered(self):
            return
        first = next(one for one in self.tail_log.participants if isinstance(one, CustomParticipant))
        if not self.in_loop and not self.tail_log.models() and participant is first:
            self._begin_plain_step(0)
        self.step.meet()

    def _begin_plain_step(self, count: float) -> None:
        if self._rebalancing.enabled:
            raise JoinValueError(
                "A forward outside of a loop over join.batches, with rebalance=True: in a plain `for`, nothing can"
                " bring this rank another one's batch. Write `for batch in join.batches(loader)`."
            )
        if self.options.monitor is not None and not self._loops:
            raise JoinValueError(
                "A forward outside of a loop over join.batches, with monitor=...: in a plain `for`, nobody can tell"
                " where an epoch begins and ends. Write `for batch in join.batches(loader)`."
            )
        self.step.meet()
        self.place = Place.PLAIN
        self._steps.begin()
        if not self.plain_steps:
            self.tail.note(at_last=False)
        self.plain_steps += 1
        self.step.defer(count)
        self.step_number += 1

    @property
    def _is_read_elsewhere(self) -> bool:
        """Whether the last loop was even, and another thread went through it: its steps may come after its end."""
        if (loop := self._loop) is None or self.place is not Place.ENDED:
            return False
        return not loop.uneven and loop.thread != threading.get_ident()

    def before_collective(self, operation: str, ranks: Collection[int] | None = None, waits: bool = True) -> None:
        """Come to a collective of this rank's own: see `Parting`."""
        self.meet()  # whoever has met knows in which step it is
        if self.in_loop and (ranks is None or {*ranks} == {*self.members.global_ranks}):
            with self._telling:
                self.tail_log.parting.before_collective(operation, waits)

    def before_buffers(self, group: Any) -> None:
        parting = self.tail_log.parting
        if self.in_loop and parting.is_on and dist.get_process_group_ranks(group) == self.members.global_ranks:
            with self._telling:
                parting.before_collective("DDP's broadcast of buffers, in a forward,")

    def before_sharded_backward(self, syncs: bool) -> None:
        if self.in_loop:
            with self._telling:
                self.tail_log.parting.before_backward(syncs)

    def note_backward(self, model: int) -> None:
        if self.place is Place.LOOP and self._loop is not None:
            self._loop.trains.add(model)

    def note_accumulation(self, model: int) -> None:
        for each in self._steppers[model]:
            each.note_backward((self._loops, self.step_number), syncs=False)

    def before_backward(self, model: int, loop: int = 0) -> None:
        here = self._loop
        if here is None:
            return
        if self.place is Place.LOOP and loop == here.number:
            here.trains.add(model)
            if self.step_number <= (synced := self.tail_log.synced).last + 1:
                synced.last = self.step_number
            else:
                synced.end_gap(self.step_number)
            for each in self._steppers[model]:
                each.note_backward((self._loops, self.step_number))
        elif (loop, model) in self._uneven_loops:
            with self._telling:
                raise _nesting.late_backward(self.members.name)
        elif not self.in_loop and here.reads_ahead and model in here.trains and here.uneven:
            with self._telling:
                raise _nesting.read_ahead(self.members.name)
