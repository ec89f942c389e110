"""Who is active at which step of a plain loop."""

import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch_join._base.attributes import setting
from torch_join._base.errors import JoinError, JoinValueError, name_ranks, raise_any
from torch_join._base.hyperparameters import Steps
from torch_join._base.membership import Membership
from torch_join._collectives.compat import collective_under_way
from torch_join._control.failures import telling_failures
from torch_join._schedule.attendance import early_termination
from torch_join._schedule.plan import Share
from torch_join._tail.life import Place
from torch_join._tail.planned import PlannedLoops
from torch_join._tail.reader import LoaderWatch, Loop, Reader
from torch_join._tail.server import Server
from torch_join._tail.tails import Tails
from torch_join.joinables._gradients.clears import Clears, innermost_optimizer
from torch_join.joinables.part import LoopModel


@dataclass
class Due:
    """A meeting that has been put off until this rank does something with others in its step."""

    count: float  # of this rank's batch
    at_last: bool
    said: bool = False  # this rank has come to it, and has yet to hear what the others say


class _Telling(telling_failures):
    """See `Meetings._telling`."""

    def __init__(self, its: "Meetings") -> None:
        super().__init__(its.server.channel)
        self._its = its

    def __enter__(self) -> None:
        if self._its.raised is not None:
            raise self._its.raised

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        try:
            super().__exit__(kind, error, traceback)
        except BaseException as instead:
            self._its.note_raised(instead)
            raise
        self._its.note_raised(error)


class Meetings:
    """Finds out at each step, from certain lengths or by a meeting, who has an input.

    Args:
        members: Who is active.
        objects: Everything that was given to `Join`.
        tails: What happens where ranks join and where all have.
        throws: Whether to raise when the first rank runs out of inputs while others have some.
        planned: What goes through loops in which batches are rebalanced.

    Attributes:
        place: Where this rank's own code is.
        tails: What happens where ranks join and where all have.
        step_number: The current step, counted from the loop's begin.
        raised: What was raised before, which the next meeting raises again.
    """

    _backward_collectives = False

    def __init__(
        self, members: Membership, objects: list[Any], tails: Tails, throws: bool, planned: PlannedLoops
    ) -> None:
        self.members = members
        self._objects = objects
        self.tails = tails
        self._throws = throws
        self._planned = planned
        self._arriving = threading.RLock()
        self._entered_in = threading.get_ident()
        self._steps_in: int | None = None  # the thread of the last forward
        self._clears: list[Clears] = []
        self._loop: Loop | None = None  # the current one, or the last
        self._renew_server()
        self.reset()

    def reset(self) -> None:
        """Begin anew, as before the first step."""
        self.members.reset()
        self.server.reset()
        self.place = Place.OUTSIDE
        self.step_number = 0
        self._due: Due | None = None
        self.raised: BaseException | None = None
        self._at_last = False
        self._ending: tuple[int, ...] = ()  # whose last batch the current one is known to be
        self._steps = Steps(self._objects)
        self.tails.reset()

    def _renew_server(self) -> None:
        self.server = self.tails.server = self._planned.server = Server(
            self.members, self.arrive, self.tails.check_backward, self.before_collective
        )
        self.server.loader = self._loader_status
        self.server.backwards.replicas = self.tails.hands_over_ignored is True
        self.backward_collectives = self._backward_collectives

    @property
    def backward_collectives(self) -> bool:
        """Whether backwards are announced piece by piece before anything shows that they must be."""
        return self._backward_collectives

    @backward_collectives.setter
    def backward_collectives(self, always: bool) -> None:
        self._backward_collectives = self.server.backwards.always = always
        self.server.backwards.in_pieces = always or self.server.backwards.in_pieces

    # ------------------------------------------------------------ what the parts see, and the user

    @property
    def clears(self) -> list[Clears]:
        """The calls of the `zero_grad` of given optimizers (of one that wraps another, of that one's) and models."""
        if not self._clears:
            found = {id(inner): inner for thing in self._objects if (inner := innermost_optimizer(thing)) is not None}
            models = [module for part in self.server.models() for module in part.modules]
            self._clears = [Clears(one) for one in (*found.values(), *models)]
        return self._clears

    @property
    def in_loop(self) -> bool:
        """See `Driver`."""
        return self.place is Place.LOOP

    @property
    def in_plain_loop(self) -> bool:
        """See `Driver`."""
        return self.place is not Place.LOOP

    @property
    def awaits_others(self) -> bool:
        """See `Driver`."""
        return self._due is not None and self._due.said

    @property
    def met(self) -> Membership:
        """Who is active at the current step, after a meeting that has been put off until now."""
        self.arrive()
        return self.members

    @property
    def at_last_step(self) -> bool:
        """Whether no rank has an input after this step, as far as the loaders can tell."""
        if not (self.in_loop and self._planned.puts_off):  # else it is planned
            self.arrive()
        return self._at_last

    @property
    def share(self) -> Share | None:
        """Whose batch this rank has at the current step of a loop over `batches`."""
        own = Share(self.members.rank, self.step_number) if self.in_loop and not self.members.joined else None
        return self._planned.share or own

    # ------------------------------------------------------------ meetings

    def _telling(self) -> "_Telling":
        """Tell the other ranks what is raised inside, and raise what another one told.

        Whoever swallows that gets it again at the next meeting, to which the others do not come.
        """
        return _Telling(self)

    def note_raised(self, error: BaseException) -> None:
        """Have the next meeting raise this."""
        if self.members.world_size > 1:
            self.raised = error

    def _goes_on_evenly(self, loop: Loop, reader: Reader[Any]) -> bool:
        """Whether this step is sure to be as the one before; most are, so that this costs next to nothing."""
        if self.step_number >= loop.even_until or not reader.has_next():
            return False
        self._steps.skip()
        if self.step_number % 2:
            raise_any(self.server.channel.failure())
        return True

    def _find_out(self, reader: Reader[Any], certain: list[int] | None) -> bool:
        """Find out who is active at this step; serve if this rank is not. Return whether it is."""
        self.server.parting.end()
        if (plan := self._planned.plan) is not None:
            self.arrive()
            for model in self._even_models() if self.members.may_break else ():
                model.remember()
            self._at_last = self._planned.advance(self.step_number)
            if self._planned.puts_off:
                # Said here, so that whoever hears waits for nothing that others do in their step.
                self._due = Due(plan.count(), self._at_last)
                models = self.server.models()
                self.arrive(waits=not models or not all(model.forwards_alone for model in models))
                return True
            return self._go_on()
        if self.members.may_break:
            # Put off until this rank does something in its step that others take part in: it may break before that.
            self.arrive()
            if reader.has_next():
                self._due = Due(self._count_next(reader), reader.at_last)
                for model in self._even_models():
                    model.remember()
                return True
            self._meet(False, 0)
        elif certain is None:
            self._meet(reader.has_next(), 0, reader.at_last)
        else:
            # Not where all know, and throw, nor in a loop that this rank has left: its loader is its user's again.
            checks = self.in_loop and not (self._throws and min(certain) <= self.step_number)
            # As a loop begins a loader may do something with all others, also one without a batch (Accelerate's does).
            if checks and (self.step_number == 0 or certain[self.members.rank] <= self.step_number):
                self._check(reader, certain[self.members.rank])
                checks = False
            self._at_last = self.step_number + 1 >= max(certain)
            self._ending = tuple(r for r, n in enumerate(certain) if n == self.step_number + 1)
            self.server.change(tuple(r for r, length in enumerate(certain) if length > self.step_number))
            goes_on = self._go_on()
            if checks:  # from here on a collective of the loader's is followed
                self._check(reader, certain[self.members.rank])
            if self._loop is not None and self._is_even():
                self._loop.even_until = min(certain) - 1  # that step is the last one of some
            return goes_on
        return self._go_on()

    def _is_even(self) -> bool:
        """Whether a step is as the one before, and leaves nothing to do to the next one."""
        members = self.members
        everybody = len(members.active) == len(members.before) == members.world_size
        return (
            everybody
            and self.step_number > 0
            and not self._steps_elsewhere
            and all(model.is_prepared for model in self.server.models())
        )

    def _count_next(self, reader: Reader[Any]) -> float:
        return 0 if self.members.count is None else reader.count(self.members.count)

    def _even_models(self) -> Sequence[LoopModel]:
        """Return the models, unless this is a tail."""
        return () if self.members.announces else self.server.models()

    def _check(self, reader: Reader[Any], length: int) -> None:
        """Raise if this loader's certain length proves wrong, or, at every other step, if another rank has failed."""
        has_next = reader.has_next()
        if has_next != (self.step_number < length):
            does = "goes on after that" if has_next else f"ended after {self.step_number} batches"
            raise JoinValueError(
                f"The loader of rank {self.members.name} said its length was {length} and {does}, which the other ranks"
                " cannot know in time. Mend what it draws from, do not change it in the loop, or use"
                " Join(..., heartbeat=True)."
            )
        if self.step_number % 2:
            raise_any(self.server.channel.failure())

    def arrive(self, waits: bool = True) -> None:
        """Meet the other ranks, if that has been put off until this rank does something in its step."""
        self.return_to_loop()
        with self._arriving:  # in a backward on several devices there are several threads: all wait for what one hears
            if (due := self._due) is None:
                return
            with self._telling():
                if not due.said:
                    self._say(True, due.count, due.at_last, waits)
                due.said = True
                if not waits:
                    return
                self._due = None
                self._hear(has_input=True)
                self._go_on(asked=False)  # this rank has an input, and does not serve
                for model in self._even_models():
                    model.deferred = 0

    def before_collective(self, operation: str, ranks: Collection[int] | None = None, waits: bool = True) -> None:
        """Come to a collective of this rank's own: see `Parting`."""
        self.arrive()  # whoever has met knows in which step it is
        if self.in_loop and (ranks is None or {*ranks} == {*self.members.global_ranks}):
            with self._telling():
                self.server.parting.before_collective(operation, waits)

    def _meet(self, has_input: bool, count: float, at_last: bool = False) -> None:
        """Say whether this rank has an input, and whether that is its last; the active ranks meet."""
        self._say(has_input, count, at_last)
        if has_input:
            self._hear(has_input)
            return
        with self._watching_loaders():
            self._hear(has_input)

    def _watching_loaders(self) -> AbstractContextManager[None]:
        """Put around what a rank without a batch waits for, and others come to when they have read their next one."""
        channel = self.server.channel
        return setting(channel, suspect=LoaderWatch(channel, self.members).look)

    def _loader_status(self) -> tuple[int, list[int]] | None:
        """See `Status`; another thread calls this."""
        if not self.in_loop or (loop := self._loop) is None or not loop.reader.pulling:
            return None
        ranks = collective_under_way(loop.thread)
        return None if ranks is None else (self.step_number, ranks)

    def _say(self, has_input: bool, count: float, at_last: bool, waits: bool = True) -> None:
        notice = {} if not has_input else {"last": True} if at_last else None
        self.server.channel.arrive(count, notice, self.members.active)
        if has_input and self._planned.plan is None:  # else the batch that this rank has may be another's
            self.members.counted = count

    def _hear(self, has_input: bool) -> None:
        beat = self._planned.hear()
        if has_input:  # else the last step's count: its backward may come after the loop
            self.members.total = beat.total
        self.server.change(tuple(rank for rank in self.members.active if beat.notices.get(rank) != {}))
        active = self.members.active
        self._ending = tuple(rank for rank in active if beat.notices.get(rank))
        self._at_last = bool(active) and len(self._ending) == len(active)

    # ------------------------------------------------------------ what follows from who is active

    def _go_on(self, asked: bool = True) -> bool:
        """Do what follows from who is active: throw, serve, begin or end the tail.

        Args:
            asked: Whether this rank's code asks for a batch; else it is in a step.
        """
        members = self.members
        joined = members.joined
        if members.active and len(members.before) == members.world_size and not self._steps_elsewhere:
            for model in self.server.models():  # all ranks come here
                model.prepare()
        if members.active and members.uneven:
            if asked:
                self._check_thread()
            if self.in_loop and self._loop is not None:
                self._loop.uneven = True
            if self._throws:
                raise early_termination(members.rank, joined)
            if members.active != members.before:
                with self._watching_loaders() if joined else nullcontext():
                    self.tails.compare_steps(self._steps, self.members.may_break)
            if joined:
                self.tails.serve(self._at_top)
                return False
            if not members.announces:
                self.tails.begin_tail(self._at_top)
            self.server.agreement.compare(members.rank, members.active)
        if not members.active:
            self.tails.end_tail(has_run=self.place is not Place.ENDED)
        elif self._ending and self.in_loop and self.server.parting.begin(self.step_number, self._ending):
            self.server.tap.install()
        return not joined

    @property
    def _steps_elsewhere(self) -> bool:
        """Whether batches are asked for in another thread than the one that takes the steps, which may be in one."""
        here = threading.get_ident()
        # Before its first forward a rank's steps are taken where the `with` was entered; with no batch there are none.
        steps_in = self._steps_in if self._steps_in is not None else self._entered_in if self.step_number else here
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

    @property
    def _at_top(self) -> bool:
        """Whether this rank is at the top of a step, before any code of the user's."""
        return self.in_loop and self._loop is not None and self._loop.asked and not self.members.may_break

    def return_to_loop(self) -> None:
        """Finish a loop that this rank has left, before it does anything else with others."""

    def _leave(self) -> None:
        if self.awaits_others:
            self.arrive()
        self._due = None
        self._meet(False, 0)
        self._go_on()
