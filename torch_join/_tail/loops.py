"""The loops of a `Join`: how one is gone through, left and finished."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch_join._base.devices import use_device
from torch_join._base.hyperparameters import Hyperparameters, compare, hyperparameters
from torch_join._base.membership import Membership
from torch_join._base.weighting import Window
from torch_join._collectives.compat import in_backward
from torch_join._control.channel import Channel
from torch_join._tail import nesting as _nesting
from torch_join._tail.life import Place, move
from torch_join._tail.meetings import Due, Meetings
from torch_join._tail.planned import PlannedLoops
from torch_join._tail.reader import Batches, Loop, Reader, Unbegun
from torch_join._tail.tails import Tails
from torch_join.joinables.custom import CustomPart
from torch_join.joinables.part import Part
from torch_join.joinables.parts import make_parts

T = TypeVar("T")
P = TypeVar("P", bound=Part)

_BEGIN = tuple[int | None, Hyperparameters, str, list[str]]  # of a loop
# How a rank begins it: by asking for a batch, or because its user has not, and it has none or has some.
_ASKS, _EMPTY, _UNASKED = "asks", "empty", "unasked"


class LoopDriver(Meetings):
    """The driver of loops of the user's: over `batches` and, from forward to forward, others.

    Args:
        members: Who is active.
        objects: Everything that was given to `Join`.
        tails: What happens where ranks join and where all have.
        planned: See `Meetings`.
        enable: `False` has ranks know nothing of each other.
        throws: Whether to raise when the first rank runs out of inputs while others have some.
        options: What else was given to `Join`: arguments for hooks.

    Attributes:
        end_with_loop: Ends the `with`, where that is to end with its only loop: called when this rank, which has left
            the loop by `break`, is about to do something with others.
        is_one_loop: Whether the `with` is around one loop over `batches`, on all ranks, and around nothing else.
        begins_with_loop: Whether all ranks meet only as that loop begins, and not as the `with` does.
        asks: Whether this rank's user has asked for a batch of the loops that it goes through.
        plain_steps: How many steps there were outside of `batches`.
    """

    end_with_loop: Callable[[], None] | None = None
    is_one_loop = begins_with_loop = False
    asks = True
    plain_steps = 0

    def __init__(
        self,
        members: Membership,
        objects: list[Any],
        tails: Tails,
        planned: PlannedLoops,
        enable: bool,
        throws: bool,
        options: dict[str, Any],
    ) -> None:
        super().__init__(members, objects, tails, throws, planned)
        self.enabled = enable
        self._options = options
        self._unbegun = Unbegun()
        if enable:
            self.server.parts = make_parts(self, self._objects, self._options)

    def add(self, make: Callable[["LoopDriver", int], P]) -> P:
        """Add a part after all others, before the `with` is entered; `make` gets this object and an index."""
        part = make(self, len(self.server.parts))
        self.server.parts.append(part)
        return part

    @property
    def given(self) -> list[Any]:
        """Everything that was given to `Join`, in an order that is the same on all ranks."""
        return self._objects

    @property
    def main_has_joined(self) -> bool:
        """Whether this rank is active, and rank 0, which saves and logs for all, is not."""
        return self.server.in_tail and 0 not in self.met.active

    @property
    def stands_in(self) -> bool:
        """Whether this rank does what rank 0 would, which has joined."""
        return self.main_has_joined and self.members.leads

    @property
    def reader(self) -> Reader[Any] | None:
        """What reads the loader of the current loop, or of the last one; `None` before the first."""
        return None if self._loop is None else self._loop.reader

    @property
    def certain_lengths(self) -> list[int] | None:
        """All ranks' numbers of batches in the current loop, or the last one, where these can be no others."""
        return None if self._loop is None else self._loop.certain

    @property
    def trained_ahead(self) -> list[Any]:
        """The models that the last loop has trained, if it asked for batches ahead of its steps and was uneven."""
        loop = self._loop
        if loop is None or not (loop.reads_ahead and loop.uneven):
            return []
        return [model.modules[0] for model in self.server.models() if model.index in loop.trains]

    @property
    def was_even(self) -> bool:
        """Whether all ranks knew that they had equally many batches in the current loop, or the last one."""
        certain = self.certain_lengths
        return certain is not None and min(certain) == max(certain)

    def enter(self, open_channel: Callable[[], Channel]) -> None:
        """Begin a `with`; all ranks meet.

        Raises:
            JoinValueError: The ranks were given different things.
        """
        _nesting.enter(self, self._objects, lambda: self.in_loop)
        if not self.server.parts:  # it has been left before
            self._renew_server()
            self.server.parts = make_parts(self, self._objects, self._options)
        self.reset()
        self._loop = None
        self._loops = self.plain_steps = 0
        self._entered_in, self._steps_in = threading.get_ident(), None
        self._uneven_loops: set[tuple[int, int]] = set()  # that have ended, and a model that had backwards in it
        try:
            parameters = (p for model in self.server.models() for p in model.modules[0].parameters())
            if (first := next(parameters, None)) is not None:
                use_device(first.device, self.members.group)  # before the channel, which may have to go by it
            self.server.open(open_channel())
            if not self.begins_with_loop:
                self.tails.compare_given(self.server.channel.gather(self.tails.given, of=list[str]))
            for part in self.server.parts:
                part.enter()
        except BaseException:
            self.leave()
            raise

    def finish(self, error: BaseException | None) -> None:
        """End a `with`, by an error or without one; all ranks meet."""
        if error is not None:
            self.raised = None  # this one passes, also where it was raised from that
        with self._telling():
            if error is not None:
                raise error
            if self.in_loop:  # left by `break`, while a variable holds its iterator
                self._abandon(at_once=False)
            self._unbegun.begin_all()
            self.return_to_loop()
            if not (self.is_one_loop and self.place is Place.ENDED):  # else all have left it, and there is no other
                verdict = self.members.last_joiner
                self._leave()
                if self.place is Place.ENDED:
                    self.members.last_joiner = verdict
            for part in self.server.parts:
                part.after_all(self.members.last_joiner)
            # No rank's process ends before all have come here.
            said = self.server.channel.gather(hyperparameters(self._objects), of=Hyperparameters)
            compare(said, self.members.global_ranks)
            self._planned.rebalancing.close()
            self.server.channel.close(meets=self._planned.enabled)

    def leave(self) -> None:
        """Leave nothing behind: parts and the tap refer to this object, and it to the group, with its threads."""
        self._due = self.raised = None
        self._planned.rebalancing.abandon()
        self.place = Place.OUTSIDE
        self._unbegun = Unbegun()
        self.server.close()
        while self._clears:
            self._clears.pop().remove()
        self.server.channel.close()
        _nesting.leave(self)

    # ------------------------------------------------------------ a loop over batches

    def batches(self, loader: Iterable[T]) -> Iterable[T]:
        """See `Join.batches`."""
        return Batches(self._begin_later, loader)

    def _begin_later(self, loader: Iterable[T]) -> Iterator[T]:
        """Go through `loader` from the first `next` on, or from where it should have come to that."""
        ticket = self._unbegun.add(lambda: self.go_through(loader, asks=False)) if self.enabled else None
        return self._in_order(ticket, loader)

    def _in_order(self, ticket: object, loader: Iterable[T]) -> Iterator[T]:
        if self.enabled and not self._unbegun.begin(ticket) and _nesting.is_entered(self):
            with self._telling():
                raise _nesting.left_behind()
        yield from self.go_through(loader)

    def go_through(
        self, loader: Iterable[T], reader_of: Callable[[Iterable[T]], Reader[T]] = Reader, asks: bool = True
    ) -> Iterator[T]:
        if not self.enabled:
            self.step_number = 0
            for batch in loader:
                yield batch
                self.step_number += 1
            return
        with self._telling():
            _nesting.check_entered(self)
            if self.in_loop and self._loop is not None and not self._loop.reader.has_next():
                self._abandon(at_once=False)  # a loop by iter() and next(), which never asks for the end
            if self.in_loop:
                raise _nesting.nested()
            self.arrive()
            reader, asks = reader_of(loader), asks and self.asks
            self._loops += 1
            mine = self._loop = Loop(reader, asks, number=self._loops)
            for model in self.server.models():
                model.check_can_train(reader.has_next)
            length = None if self.members.may_break else reader.certain_length()
            how = _ASKS if asks else _UNASKED if reader.has_next() else _EMPTY
            given = self.tails.given if self.begins_with_loop else []
            begin = length, hyperparameters(self._objects), how, given
            said = self.server.channel.gather(begin, self.in_plain_loop, _BEGIN)
            lengths, hyper, ways, everyone = zip(*said, strict=True)
            if self.begins_with_loop:
                self.tails.compare_given(everyone)
            compare(hyper, self.members.global_ranks)
            if _ASKS not in ways:
                return  # nobody goes through it
            refused = (_UNASKED, _EMPTY) if self._planned.enabled else (_UNASKED,)  # with none, it is to be given some
            _nesting.refuse_unasked(self.members.named(rank for rank, way in enumerate(ways) if way in refused))
            if self.members.may_break:
                self.server.tap.install()
            reader = mine.reader = self._planned.begin(reader)
        self.place, self.step_number = move(self.place, Place.LOOP), 0
        self._steps.forget()
        self.server.parting.begin_loop(self.server.channel)
        for model in self.server.models():
            model.begin_loop()
        if self._planned.plan is None and None not in lengths:
            mine.certain = [length for length in lengths if length is not None]
        try:
            has_models, telling = bool(self.server.models()), self._telling()
            while True:
                with telling:
                    if not self._goes_on_evenly(mine, reader):
                        self._steps.begin()
                        if not self._find_out(reader, mine.certain):
                            break
                    mine.stepped = not has_models
                    batch = self._planned.take(reader)
                    self.server.in_window = type(batch) is Window
                yield batch
                mine.reads_ahead = mine.reads_ahead or not mine.forwarded
                if not self._is_in(mine):
                    if reader.has_next():
                        raise _nesting.left_behind()
                    return
                self.step_number += 1
        except GeneratorExit:
            if self._is_in(mine):
                self._abandon()
            raise
        finally:
            if self._is_in(mine):
                self._finish_loop()

    def _is_in(self, loop: Loop) -> bool:
        return self.place is Place.LOOP and self._loop is loop

    # ------------------------------------------------------------ what the parts call

    @property
    def sees_steps(self) -> bool:
        """See `Driver`."""
        return any(part.is_model or isinstance(part, CustomPart) for part in self.server.parts)

    def before_forward(self, count: Callable[[], float], waits: bool = True) -> None:
        """Meet the other ranks, if this forward stands outside of `batches`; see `Driver`."""
        if not in_backward():
            self._steps_in = threading.get_ident()
        if self.place is not Place.LOOP:
            self.return_to_loop()
            if not _nesting.is_entered(self):
                return  # the `with` has ended in this
            if not self._is_read_elsewhere:
                self._heartbeat(count() if self.members.count is not None else 0)
                if self.members.count is not None:
                    self.server.tap.install()
        if self._loop is not None:
            self._loop.stepped = True
            self._loop.forwarded = self._loop.forwarded or self.place is Place.LOOP
            if self.place is Place.LOOP and self._loop.certain is not None:
                return  # no meeting is put off
        # As long as the tap listens, nothing that others take part in can come before the answer is asked for. Where
        # all are certain to be active, only a `break` is yet to be heard of.
        late = (self.server.tap.installed and (self.in_loop or self.members.announces)) or self._planned.puts_off
        self.arrive(waits or self._throws or not late)

    @property
    def _is_read_elsewhere(self) -> bool:
        """Whether the last loop was even, and another thread went through it: its steps may come after its end."""
        if (loop := self._loop) is None or self.place is not Place.ENDED:
            return False
        return not loop.uneven and loop.thread != threading.get_ident()

    @property
    def loop_number(self) -> int:
        """See `Driver`."""
        return self._loop.number if self.place is Place.LOOP and self._loop is not None else 0

    def note_backward(self, model: int) -> None:
        """See `Driver`."""
        if self.place is Place.LOOP and self._loop is not None:
            self._loop.trains.add(model)

    def before_backward(self, model: int, loop: int = 0) -> None:
        """See `Driver`."""
        here = self._loop
        if here is None:
            return
        if self.place is Place.LOOP and loop == here.number:
            here.trains.add(model)
        elif (loop, model) in self._uneven_loops:
            with self._telling():
                raise _nesting.late_backward(self.members.name)
        elif not self.in_loop and here.reads_ahead and model in here.trains and here.uneven:
            with self._telling():
                raise _nesting.read_ahead(self.members.name)

    def before_notice(self, part: Part) -> None:
        """Meet the other ranks, if there is no model whose forward does and this joinable is the first."""
        self.return_to_loop()
        if not _nesting.is_entered(self):
            return
        first = next(one for one in self.server.parts if isinstance(one, CustomPart))
        if not self.in_loop and not self.server.models() and part is first:
            self._heartbeat(0)
        self.arrive()

    # ------------------------------------------------------------ loops

    def _heartbeat(self, count: float) -> None:
        self._planned.check_in_loop(self.in_loop)
        self.arrive()
        self.place = move(self.place, Place.PLAIN)
        self._steps.begin()
        self.plain_steps += 1
        self._due = Due(count, at_last=False)
        self.step_number += 1

    def _abandon(self, at_once: bool = True) -> None:
        """Leave a loop by `break`; `at_once` unless this rank's own code has gone on since."""
        loop, in_tail = self._loop, self.members.announces
        assert loop is not None
        loop.reader.leave()
        for model in self._even_models():
            model.remember()
        # Where no rank can run out before another, nothing will be handed over.
        ends = in_tail or loop.certain is None or min(loop.certain) <= self.step_number + 1 < max(loop.certain)
        self.tails.depart(watches=at_once and ends and self.members.world_size > 1)
        self.place = move(self.place, Place.LEFT)
        if self._due is not None and not self._due.said:  # nobody counts on this step
            self._due, loop.stepped = None, True
        self.server.parting.end()
        # Others may go on, or wait at the end of the `with`: what comes next with them is to finish the loop first.
        # All ranks must look in the same way at a step that is the last one of some, or may be.
        is_last = self._planned.plan is None and (loop.certain is None or self.step_number + 1 in loop.certain)
        if in_tail or is_last or self.members.may_break or self.end_with_loop is not None:
            self.server.tap.install()
        else:
            self.server.tap.remove()

    def return_to_loop(self) -> None:
        """Finish a loop that this rank has left by `break`."""
        loop = self._loop
        if self.place is not Place.LEFT or self.members.serves or loop is None:
            return
        end, self.end_with_loop = self.end_with_loop, None
        if end is not None:
            end()
            return
        self.place = move(self.place, Place.FINISHING)
        try:
            self._catch_up(loop)
        except BaseException:
            self.place = move(self.place, Place.OUTSIDE)
            raise
        self._finish_loop()

    def _catch_up(self, loop: Loop) -> None:
        """Go, without batches, to where all ranks have joined."""
        if self.tails.departure is not None:
            self.tails.departure.meet()
        if self._planned.plan is None and self.members.may_break and loop.forwarded and not loop.stepped:
            raise _nesting.left_amid(self.members.name, self.step_number)
        with self._telling():
            if loop.certain is None:
                self._leave()
            else:  # those who left with their last batch have ended, as the others know
                self.step_number += 1
                self._steps.now = False
                if self._find_out(loop.reader, loop.certain):
                    self._leave()

    def _finish_loop(self) -> None:
        if (loop := self._loop) is not None and loop.uneven:
            self._uneven_loops |= {(loop.number, model) for model in loop.trains}
        self.tails.departure = None
        with self._telling():
            self._planned.rebalancing.end_epoch()
        self.place = move(self.place, Place.ENDED)
        self._steps.forget()
        if not self.members.announces:
            self.server.tap.remove()
