"""Finds out which ranks are active at each step of a loop, and makes this rank raise, serve or continue."""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from torch_join._base.errors import JoinError, JoinValueError, name_ranks
from torch_join._base.hyperparameters import Steps
from torch_join._base.membership import MeetingPoint, Membership
from torch_join._compat.operators import in_backward
from torch_join._participants.clears import Clears, innermost_optimizer
from torch_join._participants.custom import CustomParticipant
from torch_join._participants.options import Options
from torch_join._participants.participant import Driver, Participant
from torch_join._schedule.active_ranks import early_termination
from torch_join._schedule.rebalancing import Rebalancing
from torch_join._tail import nesting as _nesting
from torch_join._tail.batch_loop import BatchLoop, Place
from torch_join._tail.placeholder_loop import PlaceholderLoop
from torch_join._tail.remarks import LOG, Remarks
from torch_join._tail.schedules import EachBatch
from torch_join._tail.step import Step
from torch_join._tail.tail import Tail
from torch_join._tail.tail_log import TailLog


class Attendance(Driver):
    """The half of a `LoopDriver` that meets other ranks, and that participants ask about the current step.

    Args:
        objects: Everything passed to `Join`.
        options: The user's options.
        group: The process group of the ranks that take part.

    Attributes:
        given: Everything passed to `Join`, in the same order on all ranks.
        members: Which ranks are active.
        tail: Acts when ranks join, and when all ranks have joined.
        rebalancing: The rebalancing state that outlives a loop.
        place: Where this rank's user code is.
        loop: The current loop over `batches`, or the last one.
        loops: The number of loops so far.
        step: Finds out which ranks are active at the current step.
        steps: What the optimizers have done in the current step.
        step_number: The current step, counted from the start of the loop.
        plain_steps: The number of steps outside `batches`.
        own_taken: The number of batches (not placeholders) that this rank has taken in loops with placeholders.
        end_with_loop: Ends the `with`, if it ends with its only loop. Called after a `break`, when this rank is about
            to communicate with other ranks.
        framework: See `Remarks`.
        remarks: Writes log messages about the loop.
        log_epoch: Called after each measured loop with the monitor's metrics and the number of the last step.
    """

    end_with_loop: Callable[[], None] | None = None
    framework = LOG.name
    log_epoch: Callable[[dict[str, float], int], None] = staticmethod(lambda *_: None)

    def __init__(self, objects: list[Any], options: Options, group: Any) -> None:
        self.given, self.options = objects, options
        weighs = options.placeholder is None  # with placeholders, `WeighedLosses` weights the losses instead
        self.members = Membership(group, options.weighting if weighs else "world", weighs and options.may_break)
        self.tail = Tail(objects, options)
        self.rebalancing = Rebalancing(self.members, options.rebalance)
        self._throws = options.throw_on_early_termination
        self._backward_collectives = options.backward_collectives
        self.loop: BatchLoop | None = None
        self._clears: list[Clears] = []
        self._steppers: dict[int, list[Clears]] = defaultdict(list)  # by model, the `Clears` of its optimizers
        self._renew_tail_log()

    def reset(self) -> None:
        """Reset to the state before the first step."""
        if self.loop is not None and self.loop.placeholders is not None:
            self._weigh()
        self.members.reset()
        self.tail_log.reset()
        self.step.reset()
        self.tail.reset()
        self.place = Place.OUTSIDE
        self.step_number = self.loops = self.plain_steps = self.own_taken = 0
        self.loop = None
        self.remarks: Remarks | None = None
        self.steps = Steps(self.given)
        self._entered_in = threading.get_ident()
        self._steps_in: int | None = None  # the thread of the last forward
        self._uneven_loops: set[tuple[int, int]] = set()  # pairs of an ended uneven loop and a model that it trained

    def _weigh(self) -> None:
        if self.options.placeholder is None:  # with placeholders, `WeighedLosses` weights the losses instead
            self.members.weigh(self.options.weighting, self.options.may_break)

    def _renew_tail_log(self) -> None:
        self.tail_log = self.tail.tail_log = TailLog(
            self.members, self.meet, self.tail.check_backward, self.before_collective
        )
        self.step = Step(self.tail_log, self._follow_up)
        self.tail_log.loader = lambda: None if self.loop is None else self.loop.status()
        self.tail_log.step = lambda: self.step_number if self.in_loop else None
        self.tail_log.backwards.replicas = self.options.hand_over_ignored is True
        self.backward_collectives = self._backward_collectives

    @property
    def backward_collectives(self) -> bool:
        """Whether all backwards are announced piece by piece, even before a collective in a backward requires it."""
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
    def placeholders(self) -> PlaceholderLoop | None:
        """The current loop, if finished ranks run placeholders in it."""
        return self.loop.placeholders if self.in_loop and self.loop is not None else None

    # ------------------------------------------------------------ a step

    @property
    def is_even(self) -> bool:
        """Whether all ranks are active in this step as in the one before, and no check or preparation is pending."""
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
        return self.loop is not None and self.step_number > self.loop.first

    def meet_without_input(self) -> None:
        """Meet as a rank without a batch; then serve the other ranks until all have joined."""
        if self.step.has_arrived:
            self.step.meet()
        self.step.meet_now(False)
        self.go_on()

    def meet(self) -> None:
        """Finish a loop that this rank has left; then hold the deferred meeting, if any."""
        if self.place is Place.LEFT:
            self.return_to_loop()
        self.step.meet()

    def _follow_up(self) -> None:
        self.go_on(asked=False)
        if not self.members.announces:
            for model in self.tail_log.models():
                model.deferred = 0

    def go_on(self, asked: bool = True) -> bool:
        """Raise, serve, or start or end the tail, depending on the active ranks. Return whether this rank is active.

        Args:
            asked: Whether this rank's code is asking for a batch; otherwise it is inside a step.
        """
        members, loop = self.members, self.loop
        joined, is_first = members.joined, len(members.before) == members.world_size
        if joined:
            self.tail_log.check_backwards_ended()
        if not members.active:
            self.tail.end(self.step_number, has_run=self.place is not Place.ENDED)
            return not joined
        if is_first and not self._steps_elsewhere:
            for model in self.tail_log.models():  # all ranks reach this line
                model.prepare()
        if members.uneven:
            self.remarks = self.remarks or Remarks(members, self.options, self.framework)
            self.remarks.note(members.active, self.step_number)
            if asked and self._steps_elsewhere:
                raise JoinError(
                    f"Rank {members.name} iterates over join.batches in a different thread than its steps, like a"
                    f" background prefetcher, and {name_ranks(members.joined_names)} finished, so Join cannot tell"
                    " which step a batch is for. Put the prefetcher inside: `join.batches(prefetcher(loader))`."
                )
            if self.in_loop and loop is not None:
                loop.uneven = True
            if self._throws:
                raise early_termination(members.rank, joined)
            if members.active != members.before:
                with self.step.watching_loaders() if joined else nullcontext():
                    self.tail.compare_steps(self.steps, members.meets_late)
            at_top = asked and self.in_loop and loop is not None and loop.asked
            if joined:
                self.joined_mid_step = any(model.awaits_backward for model in self.tail_log.models())
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
        """Whether a thread other than the one that runs the steps asks for batches, so that a step may be running."""
        thread = threading.get_ident()
        # Before a rank's first forward, assume that its steps run in the thread that entered the `with`.
        steps_in = self._steps_in if self._steps_in is not None else self._entered_in if self._is_under_way else thread
        return self.loop is not None and self.in_loop and thread != steps_in

    # ------------------------------------------------------------ the end of a loop

    def return_to_loop(self) -> None:
        """Finish a loop that this rank has left by `break`, before it communicates with other ranks again."""
        loop = self.loop
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
            loop.go_to_end()
        except BaseException:
            self.place, self.tail_log.has_to_meet = Place.OUTSIDE, False
            raise
        if not self.members.last_joiner:
            self.tail.reads.warn(self.members.name)
        loop.end_placeholders()
        self.finish_loop()
        loop.measure()

    def finish_loop(self) -> None:
        if (loop := self.loop) is not None and loop.uneven:
            self._uneven_loops |= {(loop.number, model) for model in loop.trains}
        if loop is not None and not loop.asked and not self.members.last_joiner:
            self.tail.reads.warn(self.members.name)
        self.tail.early_exit = None
        self.tail.reads.forget()
        if (plan := self.rebalancing.current) is not None and loop is not None:
            if loop.source is not None:
                loop.source.plan, loop.source.has_ended = plan.place(), True
            with self.tail_log.telling():
                plan.end()
        self.place, self.tail_log.has_to_meet = Place.ENDED, False
        if loop is not None and loop.placeholders is not None:
            self._weigh()
        self.steps.forget()
        if not self.members.announces:
            self.tail_log.tap.remove()

    # ------------------------------------------------------------ what participants call

    @property
    def clears(self) -> list[Clears]:
        """The watches on `zero_grad` of the user's models and optimizers (the innermost one, if wrapped)."""
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
        late = self.members.meets_late and self.loop is not None and not isinstance(self.loop.schedule, EachBatch)
        return MeetingPoint.FIRST_USE if late else MeetingPoint.TOP

    @property
    def sees_steps(self) -> bool:
        return any(each.is_model or isinstance(each, CustomParticipant) for each in self.tail_log.participants)

    @property
    def loop_number(self) -> int:
        return self.loop.number if self.place is Place.LOOP and self.loop is not None else 0

    def before_forward(self, count: Callable[[], float], waits: bool = True) -> bool:
        """See `Driver`; outside `batches`, a step starts here."""
        if not in_backward():
            self._steps_in = threading.get_ident()
        if self.place is not Place.LOOP:
            self.return_to_loop()
            if not _nesting.is_entered(self):
                return True  # `return_to_loop` has ended the `with`
            if not self._is_read_elsewhere:
                self._begin_plain_step(count() if self.members.count is not None else 0)
                if self.members.count is not None:
                    self.tail_log.tap.install()
        if self.loop is not None:
            self.loop.stepped = True
            self.loop.forwarded = self.loop.forwarded or self.place is Place.LOOP
            if self.place is Place.LOOP and self.loop.schedule.lengths is not None:
                return True  # with certain lengths no meeting is deferred
        self.step.arrive()
        # While the tap is installed, this rank meets before its next collective, so it need not meet here.
        # If this rank presumes that all ranks are active, the meeting can only report a `break`.
        late = self.tail_log.tap.installed and (self.in_loop or self.members.announces)
        late = late or (self.loop is not None and self.loop.schedule.presumes_all)
        # A `break` cannot be predicted, and the comparison when a rank leaves needs the state before this forward.
        if waits or self._throws or not late or (self.options.may_break and not self.members.uneven):
            self.step.meet()
        return not self.step.has_arrived

    def before_notice(self, participant: Participant) -> None:
        """See `Driver`; without a model, whose forward starts a step, the first custom participant starts it here."""
        self.return_to_loop()
        if not _nesting.is_entered(self):
            return
        first = next(one for one in self.tail_log.participants if isinstance(one, CustomParticipant))
        if not self.in_loop and not self.tail_log.models() and participant is first:
            self._begin_plain_step(0)
        self.step.meet()

    def _begin_plain_step(self, count: float) -> None:
        if self.rebalancing.enabled:
            raise JoinValueError(
                "rebalance=True needs a loop over join.batches, but this forward ran outside such a loop. In a plain"
                " `for`, this rank cannot receive batches from other ranks. Write `for batch in join.batches(loader)`."
            )
        if self.options.monitor is not None and not self.loops:
            raise JoinValueError(
                "monitor= needs a loop over join.batches, but this forward ran outside such a loop. In a plain `for`,"
                " Join cannot tell where an epoch starts and ends. Write `for batch in join.batches(loader)`."
            )
        self.step.meet()
        self.place = Place.PLAIN
        self.steps.begin()
        if not self.plain_steps:
            self.tail.note(at_last=False)
        self.plain_steps += 1
        self.step.defer(count)
        self.step_number += 1

    @property
    def _is_read_elsewhere(self) -> bool:
        """Whether another thread ran the last loop, and the loop was even: its steps may still run after its end."""
        if (loop := self.loop) is None or self.place is not Place.ENDED:
            return False
        return not loop.uneven and loop.thread != threading.get_ident()

    def before_collective(self, operation: str, ranks: Collection[int] | None = None, waits: bool = True) -> None:
        """Prepare for a collective in this rank's user code: see `Parting`."""
        self.meet()  # `Parting` needs to know which ranks are in their last step
        if self.in_loop and (ranks is None or {*ranks} == {*self.members.global_ranks}):
            with self.tail_log.telling():
                self.tail_log.parting.before_collective(operation, waits)

    def before_buffers(self, group: Any) -> None:
        parting = self.tail_log.parting
        if self.in_loop and parting.is_on and dist.get_process_group_ranks(group) == self.members.global_ranks:
            with self.tail_log.telling():
                parting.before_collective("DDP's broadcast of buffers, in a forward,")

    def before_sharded_backward(self, syncs: bool) -> None:
        if self.in_loop:
            with self.tail_log.telling():
                self.tail_log.parting.before_backward(syncs)

    def note_backward(self, model: int) -> None:
        if self.place is Place.LOOP and self.loop is not None:
            self.loop.trains.add(model)

    def note_accumulation(self, model: int) -> None:
        for each in self._steppers[model]:
            each.note_backward((self.loops, self.step_number), syncs=False)

    def before_backward(self, model: int, loop: int = 0) -> None:
        current = self.loop
        if current is None:
            return
        if self.place is Place.LOOP and loop == current.number:
            current.trains.add(model)
            if self.step_number <= (synced := self.tail_log.synced[model]).last + 1:
                synced.last = self.step_number
            else:
                synced.end_gap(self.step_number)
            for each in self._steppers[model]:
                each.note_backward((self.loops, self.step_number))
        elif (loop, model) in self._uneven_loops:
            with self.tail_log.telling():
                raise JoinError(
                    f"Rank {self.members.name} ran a backward whose forward belongs to an uneven loop over"
                    " join.batches that has ended. The other ranks have moved on, so its gradients would be averaged"
                    " with those of later backwards. Run each batch's backward before you request the next batch."
                )
        elif not self.in_loop and current.reads_ahead and model in current.trains and current.uneven:
            with self.tail_log.telling():
                raise _nesting.read_ahead(self.members.name)
