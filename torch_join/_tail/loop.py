"""The driver of a `Join`: it runs the user's loops and knows which ranks take part in each step."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from torch_join._base.devices import use_device
from torch_join._base.errors import JoinError, JoinValueError, name_ranks
from torch_join._base.hyperparameters import Hyperparameters, compare, hyperparameters
from torch_join._base.synced_steps import Synced
from torch_join._control.channel import Channel
from torch_join._handover.early_exit import EarlyExit
from torch_join._participants.make_participants import make_participants
from torch_join._participants.options import Options
from torch_join._participants.participant import Participant
from torch_join._schedule.placeholders import Placeholder
from torch_join._schedule.plan import Share
from torch_join._schedule.positions import LoaderPlace
from torch_join._tail import nesting as _nesting
from torch_join._tail.attendance import Attendance
from torch_join._tail.batch_loop import BatchLoop, Place
from torch_join._tail.exchanges import PositionExchange, StopExchange, StopSignals
from torch_join._tail.reader import Batches, Reader, Unbegun, is_length_certain
from torch_join._tail.remarks import Remarks
from torch_join._tail.resuming import OVER, NamedLoops, state_of

T = TypeVar("T")
P = TypeVar("P", bound=Participant)


class LoopDriver(Attendance):
    """The driver of user loops: those over `batches`, and plain loops, where each forward starts a step.

    Its arguments are those of `Attendance`.

    Attributes:
        named: The loops by name.
        unasked: The state noted when user code started a loop without ever asking it for a batch.
        is_one_loop: Whether, on all ranks, the `with` contains one loop over `batches` and nothing else.
        begins_with_loop: Whether all ranks first meet at the start of that loop instead of at the start of the `with`.
        asks: Whether this rank's user code asks its loops for batches.
        positions: Starts loops of the last used name, from the place in the loaded state if there is one.
        find_other_place: Returns this rank's place in a loader other than the loop's, given that loader's number; by
            default the places in loops of other names.
        signals: The signals that ask the job to stop.
    """

    is_one_loop = begins_with_loop = False
    asks = True
    unasked: EarlyExit | None = None

    def __init__(self, objects: list[Any], options: Options, group: Any) -> None:
        super().__init__(objects, options, group)
        self._unbegun = Unbegun()
        self.signals = StopSignals()
        self.named = NamedLoops(self.members.rank, self.members.world_size)
        self.positions = self.named.current
        self.find_other_place: Callable[[int], LoaderPlace | None] = self.named.find_others
        self.reset()
        self._make_participants()

    def _make_participants(self) -> None:
        if self.options.placeholder is None:  # with placeholders, finished ranks follow nothing
            self.tail_log.participants = make_participants(self, self.given, self.options.hooks)
        self.add(PositionExchange)
        self.add(StopExchange)

    def add(self, make: Callable[["LoopDriver", int], P]) -> P:
        """Add a participant after the others, before entering the `with`; `make` gets this driver and an index."""
        participant = make(self, len(self.tail_log.participants))
        self.tail_log.participants.append(participant)
        return participant

    def enter(self, open_channel: Callable[[], Channel]) -> None:
        """Enter a `with`; all ranks meet.

        Raises:
            JoinValueError: The ranks passed different things to `Join`.
        """
        _nesting.enter(self)
        if not self.tail_log.participants:  # this driver was entered and left before
            self._renew_tail_log()
            self._make_participants()
        self.reset()
        self.named.current.end()
        try:
            parameters = (p for model in self.tail_log.models() for p in model.modules[0].parameters())
            if (first := next(parameters, None)) is not None:
                use_device(first.device, self.members.group)  # before the channel, which may depend on the device
            self.tail_log.open(open_channel())
            if not self.begins_with_loop:
                self.tail.compare_given(self.tail_log.channel.gather(self.tail.given, of=list[str]))
            for each in self.tail_log.participants:
                each.enter()
        except BaseException:
            self.leave()
            raise

    def finish(self, error: BaseException | None) -> None:
        """End a `with`, with or without an error; all ranks meet."""
        if error is not None:
            self.tail_log.raised = None  # raise `error` itself, not an earlier one that may have caused it
        with self.tail_log.telling():
            if error is not None:
                raise error
            if self.in_loop and self.loop is not None:  # user code left by `break`, but a variable holds the iterator
                self.loop.leave(at_once=False)
            self._unbegun.begin_all()
            self.return_to_loop()
            if not (self.is_one_loop and self.place is Place.ENDED):  # else all ranks have left the only loop
                verdict = self.members.last_joiner
                self.meet_without_input()
                if self.place is Place.ENDED:
                    self.members.last_joiner = verdict
            for each in self.tail_log.participants:
                each.after_all(self.members.last_joiner)
            # This gather keeps each process alive until all ranks get here.
            own = hyperparameters(self.given), self.tail_log.synced_steps()
            answers = self.tail_log.channel.gather(own, of=tuple[Hyperparameters, list[Synced]])
            all_hyperparameters, synced = zip(*answers, strict=True)
            compare(all_hyperparameters, self.members.global_ranks)
            self.tail_log.warn_if_mixed(synced)
            self.rebalancing.close()
            self.tail_log.channel.close(meets=self.rebalancing.enabled)

    def leave(self) -> None:
        """Remove participants and the tap: they refer to this driver, which keeps the group and its threads alive."""
        self.step.reset()
        if not self.signals.lasts:
            self.signals.restore()
        self.tail.reads.forget()
        self.rebalancing.abandon()
        self.place = Place.OUTSIDE
        if self.loop is not None:
            self.loop.drop()
        self._unbegun = Unbegun()
        self.tail_log.close()
        self._steppers.clear()
        while self._clears:
            self._clears.pop().remove()
        self.tail_log.channel.close()
        _nesting.leave(self)

    # ------------------------------------------------------------ for users and adapters

    @property
    def reader(self) -> Reader[Any] | None:
        """The reader of the current or last loop's loader; `None` before the first loop."""
        if self.loop is None or self.loop.placeholders is None:
            return None if self.loop is None else self.loop.reader
        return self.loop.source

    @property
    def certain_lengths(self) -> list[int] | None:
        """By rank, the number of batches in the current or last loop; `None` if these are not certain."""
        if self.loop is None or self.loop.placeholders is None:
            return None if self.loop is None else self.loop.schedule.lengths
        return self.loop.placeholders.lengths

    @property
    def was_even(self) -> bool:
        """Whether the lengths of the current or last loop are certain, and equal on all ranks."""
        certain = self.certain_lengths
        return certain is not None and min(certain) == max(certain)

    @property
    def trained_ahead(self) -> list[Any]:
        """The models trained in the last loop, if it was uneven and user code read its batches ahead."""
        loop = self.loop
        if loop is None or not (loop.reads_ahead and loop.uneven):
            return []
        return [model.modules[0] for model in self.tail_log.models() if model.index in loop.trains]

    @property
    def share(self) -> Share | None:
        """The owner and index of this rank's batch in the current step of a loop over `batches`."""
        if self.rebalancing.current is not None:
            return self.rebalancing.current.share
        return Share(self.members.rank, self.step_number) if self.in_loop and not self.members.joined else None

    def find_active(self) -> tuple[int, ...]:
        """Hold the deferred meeting, if any; return the ranks that have a batch at the current step."""
        if self.placeholders is not None:
            return self.placeholders.receive().active_ranks
        self.meet()
        return self.members.active

    @property
    def counts(self) -> bool:
        """Whether the weighting uses a count of each batch."""
        return self.options.weighting not in ("world", "active")

    def check_together(self, call: str) -> None:
        """Hold the deferred meeting, if any, and check that all ranks are active, which `call` needs.

        Raises:
            JoinError: Some rank has joined, or the loop is a plain `for`, where this is unknown.
        """
        with self.tail_log.telling():
            if self.place is Place.PLAIN:
                raise JoinError(
                    f"{call} inside a `with` whose loop is a plain `for`, where Join cannot know whether a rank has run"
                    f" out of batches. Loop over join.batches(loader), or call {call} after the `with`."
                )
            active, members = self.find_active(), self.members
            if len(active) < members.world_size:
                joined = members.named(rank for rank in range(members.world_size) if rank not in active)
                raise JoinError(
                    f"{call} was called in a step for which {name_ranks(joined)} had no batch, but it needs all ranks."
                    " Keep the results of each step in a list, and call it after the loop, which all ranks reach."
                )

    def weigh(self, value: Tensor) -> Tensor:
        """See `Join.weigh`."""
        if self.placeholders is not None:
            return self.placeholders.weigh(value)
        raise JoinError("join.weigh() needs a loop with placeholder=. In other loops, Join weights the gradients.")

    def check_rows(self, rows: Any) -> None:
        """Raise if rows for `gather` include rows of placeholders from the loops that have ended.

        Raises:
            JoinValueError: `rows` is a list of more steps than this rank had batches.
        """
        last = None if self.loop is None else self.loop.placeholders
        if last is not None and last.losses.joined and isinstance(rows, list) and len(rows) > self.own_taken:
            with self.tail_log.telling():
                raise JoinValueError(
                    f"Rank {self.members.name} passed the rows of {len(rows)} steps but had only {self.own_taken}"
                    " batches, so the rows include results of placeholders. Append a step's results only `if not"
                    " join.joined`, or pass indices, each of which counts once."
                )

    def find_last_step(self) -> bool:
        """Hold the deferred meeting, if any; return whether this step is known to be the last one on all ranks."""
        if self.placeholders is not None:
            return self.placeholders.receive().is_last_step
        if not (self.in_loop and self.loop is not None and self.loop.schedule.presumes_all):  # else the plan knows
            self.meet()
        return self.step.is_last

    def find_main_joined(self) -> bool:
        """Hold the deferred meeting; return whether rank 0, which saves and logs, has joined and this rank has not."""
        return self.tail_log.meet() and 0 not in self.members.active

    def find_acting_main(self) -> bool:
        """Hold the deferred meeting; return whether rank 0 has joined and this rank acts in its place."""
        return self.find_main_joined() and self.members.leads

    def stop_requested(self) -> bool:
        """See `Join.stop_requested`."""
        if not _nesting.is_entered(self):
            return self.signals.agreed
        self.meet()
        with self.tail_log.telling():
            return self._part(StopExchange).ask(self.loops)

    # ------------------------------------------------------------ positions

    def state_dict(self) -> dict[str, Any]:
        """See `Join.state_dict`."""
        call = "join.state_dict()"
        _nesting.check_entered(self, f"{call} was called")
        others = self.gather_places(call, 1) if self.named.find_others() else []
        return state_of(self.gather_places(call), self.in_loop, self.named.name, others)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Join.load_state_dict`."""
        if self.in_loop:
            with self.tail_log.telling():
                raise JoinError("join.load_state_dict() was called in a loop. Call it before the loop that resumes.")
        self.named.load(state)
        self.positions = self.named.current

    def gather_places(self, name: str, which: int = 0) -> list[Any]:
        """Return every rank's place in its loader, by rank; all active ranks call this at the same step.

        Args:
            name: The call, for errors.
            which: The loader's number: 0 for the current or last loop's loader; for others see `find_other_place`.
        """
        self.meet()
        with self.tail_log.telling():
            return self._part(PositionExchange).gather(name, which)

    def _part(self, kind: type[P]) -> P:
        return next(each for each in self.tail_log.participants if isinstance(each, kind))

    def is_mid_window(self) -> bool | None:
        """Whether this rank holds gradients of an unfinished accumulation; `None` if that is not known yet."""
        if self.loop is not None and self.loop.placeholders is not None:
            return self.loop.placeholders.losses.holds_gradients
        models = self.tail_log.models()
        waiting = {each.awaits_step(m.holds_unsynced) for m in models for each in self._steppers[m.index]}
        return True in waiting or (None if None in waiting else False)

    def find_place(self, which: int = 0) -> LoaderPlace | None:
        """Return this rank's place in the loader numbered `which`; `None` if no loop over it has started."""
        if which:
            return self.find_other_place(which)
        loop = self.loop
        if self.positions.loaded is not None or loop is None:
            return self.positions.find_place()
        plan = self.rebalancing.current
        if loop.source is not None and plan is not None and self.in_loop:
            loop.source.plan = plan.place()
        return (loop.source or loop.reader).place()

    # ------------------------------------------------------------ a loop over batches

    def batches(self, loader: Iterable[T], name: str = "", placeholder: Placeholder | None = None) -> Iterable[T]:
        self.options.check_placeholder(placeholder)
        return Batches(partial(self._begin_later, name=name, placeholder=placeholder), loader)

    def _begin_later(self, loader: Iterable[T], name: str, placeholder: Placeholder | None) -> Iterator[T]:
        """Start a loop at the first `next`; if there is none, before the next loop or the end of the `with`."""
        go_through = partial(self.go_through, loader, name=name, placeholder=placeholder)
        # Only a rank without batches has a valid reason never to ask for one.
        has_some = is_length_certain(loader) and len(loader) > 0  # type: ignore[arg-type]
        watch = None if has_some else partial(self.tail.watch_unasked, is_length_certain(loader))
        left, since = None if watch is None else watch(), self.tail.handovers

        def unasked() -> Iterator[T]:
            """Go through a loop that user code passed without asking it for a batch."""
            # An earlier loop's handover may have changed the state since.
            self.unasked = watch() if watch is not None and self.tail.handovers > since else left
            if self.unasked is not None:
                self.unasked.meet()
            return go_through(asks=False)

        return self._in_order(self._unbegun.add(unasked), go_through)

    def _in_order(self, ticket: object, go_through: Callable[[], Iterator[T]]) -> Iterator[T]:
        if not self._unbegun.begin(ticket) and _nesting.is_entered(self):
            with self.tail_log.telling():
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
        def begin() -> BatchLoop | None:
            with self.tail_log.telling():
                _nesting.check_entered(self)
                if self.in_loop and self.loop is not None and not self.loop.reader.has_next():
                    self.loop.leave(at_once=False)  # a loop with iter() and next() that never asked past the last batch
                if self.in_loop:
                    raise JoinError(
                        "A loop over join.batches was started before another one had ended, so finished ranks cannot"
                        " follow. If a variable (a progress bar, for example) still holds a loop that was left with"
                        " `break`, `del` the variable. Otherwise start one loop after the other, or loop over both at"
                        " once: join.batches(zip(a, b))."
                    )
                self.meet()
                self.loops += 1
                if self.loop is not None:
                    self.loop.drop()
                first, reader = self._open(loader, reader_of, name)
                loop = self.loop = BatchLoop(self, reader, asks and self.asks, self.loops, first)
                self.remarks = Remarks(self.members, self.options, self.framework, loop.first)
                return loop if loop.begin(name or "", placeholder or self.options.placeholder) else None

        return BatchLoop.go_through(begin)

    def _open(
        self, loader: Iterable[T], reader_of: Callable[[Iterable[T]], Reader[T]], name: str | None
    ) -> tuple[int, Reader[T]]:
        """Return a loop's first step and its reader; for loops without a name, the front end has set `positions`."""
        if name is None:
            return self.positions.first_step, self.positions.open(loader, reader_of)
        if self.named.begin(name):
            return OVER, reader_of(())
        self.positions = positions = self.named.current
        first, positions.reader = positions.first_step, positions.open(loader, reader_of)
        return first, positions.reader
