"""A DDP model: active ranks announce its forwards and backwards, and joined ranks shadow them with zero gradients.

An active rank announces each forward, with its grad mode and whether it will sync. Once per backward and model, it
announces the moment before DDP sees the model's first gradient: a prehook on the parameters' gradient accumulators
fires exactly then. A node on the model's outputs would also fire for a gradient penalty's `autograd.grad`, and would
miss L2 terms on the parameters.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.attributes import setting
from torch_join._base.errors import JoinError
from torch_join._base.membership import MeetingPoint
from torch_join._base.weighting import weighted
from torch_join._compat import ddp as _compat
from torch_join._handover.mirror import Known, is_known, known
from torch_join._participants._gradients.evidence import CHANGED, Gradients, Runs, State, runs_of, states_of
from torch_join._participants._gradients.other_verdicts import OtherVerdicts
from torch_join._participants._gradients.pieces import FIRED, Pieces
from torch_join._participants._gradients.second_backward import SecondBackward
from torch_join._participants._gradients.watch import Watch
from torch_join._participants.hook import Hook
from torch_join._participants.participant import Driver, LoopModel, Participant
from torch_join._shadow.buffer_news import Buffer, take
from torch_join._shadow.model_shadow import ModelShadow
from torch_join._shadow.synced_norms import sync_norms
from torch_join._shadow.zero_gradient import broadcast_gradient


def _call(method: "weakref.WeakMethod[Callable[..., None]]", args: tuple[Any, ...], *_: Tensor) -> None:
    """Call a method, in a hook of a loss: user code may keep the loss, which must not keep the method's object."""
    if (call := method()) is not None:
        call(*args)


class ModelParticipant(Participant, LoopModel):
    """A `DistributedDataParallel` model in a plain loop."""

    kinds: ClassVar[dict[str, Any]] = {
        "forward": tuple[bool, bool, list[int], list[int], list[Buffer] | None],
        **dict.fromkeys(("backward", "gradients", "begin"), Runs),
        **dict.fromkeys(("ended", "reduced"), type(None)),
        **Pieces.kinds,
    }
    closing: ClassVar[Any] = tuple[Runs, bool, list[int] | None, list[int] | None]

    is_model = in_pieces = True
    meets = True  # whether ranks in a plain loop meet at this model's forward

    def __init__(self, driver: Driver, index: int, ddp: DistributedDataParallel) -> None:
        super().__init__(driver, index)
        self.ddp = ddp
        self._shadow = ModelShadow(ddp, watches=False)
        self._pieces = Pieces(self, self._shadow)  # the backwards that come piece by piece
        self._parameters = self._shadow.parameters
        self._buffer_source = 0  # the lowest active rank in the last forward, which has the newest buffers
        self._pending: list[Tensor] = []  # the outputs of shadow forwards that wait for a backward
        self._others = OtherVerdicts(driver, index)
        self._has_met = True  # whether the active ranks were known in the last forward
        self._frozen: list[int] = []  # the places of the parameters that were frozen in the last deferred forward
        self._factor = 1.0  # the weight of its gradients
        self._beginning = threading.Lock()  # autograd has several threads for several devices
        self._second_backward = SecondBackward(self._parameters)
        self._has_rebuilt = bool(ddp._has_rebuilt_buckets)
        self._watch = Watch(self._parameters)
        self._forward_contexts = ExitStack()
        self._buffers: dict[int, Known] = {}

    def enter(self) -> None:
        self._undo.append(_compat.configure(self.ddp))
        self._shadow.first.watch()
        self._undo.append(self._shadow.first.unwatch)
        self._undo.append(self.ddp.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True).remove)
        self._undo.append(self.ddp.register_forward_hook(Hook(self._after_forward)).remove)
        views = bool(self.ddp.gradient_as_bucket_view)
        self._gradients = Gradients(self._parameters, self.driver.clears, views, self._shadow.sparse)
        # Gradients from before this `with` may be an average, or this rank's share of one.
        left = any(p.grad is not None for p in self._parameters)
        self.accumulates = self._shadow.accumulated = left
        self.remember()
        self._undo.append(self._forward_contexts.close)
        self._undo += [self._second_backward.remove, self._pieces.reset]
        if self.members.meets_late:
            self._watch.begin(self._before_gradient)
        self._undo.append(self._watch.end)

    def check_can_train(self, has_batch: Callable[[], bool]) -> None:
        if self._shadow.first.shadow_only and has_batch():
            self._shadow.first.check_fired()

    def begin_loop(self) -> None:
        self._gradients.begin_loop()

    def remember(self) -> None:
        self._gradients.remember(self.accumulates)

    def enter_tail(self) -> None:
        self._shadow.news.forget()
        if self.driver.meets_at is MeetingPoint.TOP:
            self.remember()
            self._note_buffers(self.ddp.module.buffers())
        self._watch.begin(self._before_gradient)

    def leave_tail(self) -> None:
        if not self.members.meets_late:
            self._watch.end()

    # ------------------------------------------------------------ on an active rank

    def _before_forward(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _compat.check_not_captured(self._parameters[0])
        self.check_backward_ended()
        if (first := self._shadow.first).decides:
            first.finish_watching()
        driver = self.driver
        if self.members.serves:
            return
        if _compat.backward_in_progress() == -1:
            self._pieces.before_forward()
        grad, sync = torch.is_grad_enabled(), self.ddp.require_backward_grad_sync
        # A forward without collectives is announced only with its backward; not so the second forward in a row, since
        # the first one may have had no backward.
        deferred = grad and sync and not self.deferred and _compat.forwards_without_collectives(self.ddp)
        if first.decides:
            first.check_fired()
        # In a window, ranks may have different numbers of micro-batches: they share only forwards with collectives.
        syncs_buffers = self.ddp.require_forward_param_sync and _compat.broadcasts_buffers(self.ddp)
        is_alone = deferred or (grad and _compat.has_rebuilt_buckets(self.ddp) and not syncs_buffers)
        if self.meets:
            self._has_met = driver.before_forward(lambda: self.members.count_forward(args, kwargs), waits=not deferred)
            if driver.meets_at is MeetingPoint.FORWARD and not self.members.announces:
                self._gradients.refresh()
        if syncs_buffers:
            driver.before_buffers(self.ddp.process_group)
        self.forwards += 1
        self.synced += grad and sync
        if deferred and (self.members.announces or (self._watch.is_on and not self._has_met)):
            self.deferred += 1
            self._frozen = self._shadow.frozen
            return
        if grad:
            self.accumulates = self._shadow.accumulated = not sync
        if deferred:
            return
        buffer_source, self._buffer_source = self._buffer_source, self.members.leader
        if not self.tail_log.meet():
            return
        # The last leader has the newest buffers, except those that this step changed before its forward, without that
        # rank: the current leader sends these afterwards.
        sources = [*dict.fromkeys((buffer_source, self.members.leader))]
        if not self.ddp.require_forward_param_sync or sources == [0]:
            sources = []
        self._announce_deferred()
        frozen = self._shadow.frozen if self.tail_log.announces else []
        announces_buffers = self.tail_log.announces and _compat.broadcasts_buffers(self.ddp)
        buffers = self._shadow.news.since(self.ddp.module) if announces_buffers else None
        forward = (grad, sync, sources, frozen, buffers)
        if is_alone:
            self.tail_log.announce_alone(self.index, "forward", forward)
        else:
            self.announce("forward", forward)
        # Until the inner module runs, the collectives are DDP's own. (A permanent hook would hinder copying the model.)
        self._forward_contexts.enter_context(self.tail_log.own_collectives())
        inside = self.ddp.module.register_forward_pre_hook(lambda *_: self._forward_contexts.close())
        self._forward_contexts.callback(inside.remove)
        self._sync_from(sources)

    def before_handover(self) -> None:
        # The leader of the last forward has the newest buffers; this rank may have become the leader since then.
        source, self._buffer_source = self._buffer_source, self.members.leader
        if source != self.members.leader:
            self._sync_from([source, self.members.leader])

    def _sync_from(self, sources: list[int]) -> None:
        changed = self._unknown_buffers() if sources[1:] and self.members.leads else []
        kept = [(buffer, buffer.detach().clone()) for buffer in changed]
        for source in sources:
            self._shadow.sync_buffers(source)
            for buffer, value in kept:
                buffer.data.copy_(value)

    def _note_buffers(self, buffers: Iterable[Tensor]) -> None:
        # A buffer created in inference mode has no version counter. A forward in that mode creates it again.
        self._buffers = {id(buffer): known(buffer) for buffer in buffers if not buffer.is_inference()}

    def _unknown_buffers(self) -> list[Tensor]:
        return [b for b in self.ddp.module.buffers() if not is_known(b, self._buffers.get(id(b)))]

    def changed_buffers(self) -> list[Tensor]:
        return self._unknown_buffers() if self._buffers else []

    def _check_reduction_finished(self) -> None:
        """Raise if DDP has not averaged all gradients of the last backward: DDP's own error, or its cause.

        Raises:
            JoinError: An exception ended that backward.
        """
        try:
            _compat.check_reduction_finished(self.ddp)
        except RuntimeError as error:
            if not self._second_backward.broke_off:
                raise
            raise JoinError(
                f"Rank {self.members.name} caught an exception that ended a backward of"
                f" {type(self.ddp.module).__name__} (an OOM, for example). DDP had averaged only a part of the"
                " gradients, and the other ranks wait for the rest. Do not catch the exception, because one rank"
                " alone can neither skip nor repeat a step; use smaller batches."
            ) from error

    def check_backward_ended(self) -> None:
        if self._second_backward.broke_off:
            self._check_reduction_finished()

    def _announce_deferred(self) -> None:
        while self.deferred:
            self.deferred -= 1
            self.tail_log.announce_alone(self.index, "forward", (True, True, [], self._frozen, None), hold=True)

    def _after_forward(self, _: Any, __: Any, output: Any) -> None:
        notes = self.members.announces or self.driver.meets_at is not MeetingPoint.TOP
        # Do not use DDP's own list: a forward may have bound new tensors.
        self._note_buffers(self.ddp.module.buffers() if notes else ())
        if not torch.is_grad_enabled():
            return
        if self._has_rebuilt != self.ddp._has_rebuilt_buckets:
            self.rebind()
        outputs = _compat.differentiable(output)
        if self.ddp.require_backward_grad_sync:
            before = weakref.WeakMethod(self.driver.before_backward)
            begins = partial(_call, before, (self.index, self.driver.loop_number))
            self._second_backward.forward(outputs, begins)
        else:
            accumulates = partial(_call, weakref.WeakMethod(self.driver.note_accumulation), (self.index,))
            for each in outputs:
                each.register_hook(accumulates)  # type: ignore[no-untyped-call]
        if self._watch.is_on or (self._has_met and self.driver.meets_at is not MeetingPoint.FORWARD):
            return
        meets = partial(_call, weakref.WeakMethod(self._meet_or_remember), ())
        for each in outputs:  # a loss may use any output
            each.register_hook(meets)  # type: ignore[no-untyped-call]
        if not outputs:
            self._watch.begin(self._before_gradient)

    def _meet_or_remember(self) -> None:
        if self.driver.meets_at is not MeetingPoint.FORWARD:
            self.tail_log.meet()
        else:
            self.driver.before_backward(self.index)
            # In a plain `for`, ranks meet at the next forward, when user code may already have cleared the gradients.
            self.remember_after_backward()

    @property
    def is_prepared(self) -> bool:
        return _compat.has_rebuilt_buckets(self.ddp)

    def prepare(self) -> None:
        # Without this, DDP's next forward would wait for a rank that skips it (a skipped batch), while that rank waits
        # at its next meeting for the ranks in that forward.
        if not self.is_prepared:
            with self.tail_log.own_collectives():
                if _compat.rebuild_buckets(self.ddp):
                    self.rebind()

    def rebind(self) -> None:
        """Note that DDP has replaced the gradients by views of new buckets."""
        self._has_rebuilt = True
        self._gradients.rebind()

    @property
    def modules(self) -> list[nn.Module]:
        return [self.ddp, self.ddp.module]

    @property
    def owned(self) -> list[str]:
        return _compat.ignored_and_trained(self.ddp)

    @property
    def forwards_alone(self) -> bool:
        return _compat.forwards_without_collectives(self.ddp)

    @property
    def awaits_backward(self) -> bool:
        return self._second_backward.awaits_first

    @property
    def will_accumulate(self) -> bool:
        return self._watch.will_run

    def is_unsynced(self, tensor: Tensor) -> bool:
        return self.accumulates and self._gradients.holds(tensor)

    def before_collective(self, ddps: bool) -> None:
        self._pieces.before_collective(ddps)

    def _before_gradient(self, place: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if (task := _compat.backward_in_progress()) != self._task:
            with self._beginning:
                if task != self._task:
                    self._begin_backward()
                    self._task = task
        if self._pieces.under_way:
            self._pieces.note(place)
        return (
            None if self._factor == 1.0 else tuple(None if g is None else weighted(g, self._factor) for g in gradients)
        )

    def _begin_backward(self) -> None:
        self._factor = 1.0
        if self.members.serves:
            return
        self.driver.before_backward(self.index)
        in_tail = self.tail_log.meet()
        averages, self._second_backward.awaits_first = self._second_backward.awaits_first, False
        if in_tail or self.driver.meets_at is MeetingPoint.FORWARD:
            self.remember_after_backward()
        if in_tail:
            if self._pieces.under_way:
                self._pieces.check_nested()
            self._announce_deferred()
            runs = self._others.found(self._gradients, averages)
            if not averages:  # joined ranks must know now which gradients were cleared
                self.tail_log.announce_alone(self.index, "gradients", runs)
            elif self.tail_log.in_pieces:
                self._pieces.begin(self._end_backward)
                self.announce("begin", runs, hold=True)
            else:
                self._pieces.begin_whole()
                self.announce("backward", runs)
        if averages:
            self.accumulates = self._shadow.accumulated = False
        self._factor = self.members.loss_factor

    def _end_backward(self) -> None:
        # Send it now if there is a communication hook: it may issue no collective before which pieces are announced.
        self.announce("ended", hold=not _compat.has_comm_hook(self.ddp))

    # ------------------------------------------------------------ on a joined rank, and at the end

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "forward":
            self._shadow_forward(*payload)
        elif kind in ("backward", "begin", "gradients"):
            self._others.follow(self._gradients, payload, kind != "gradients", self.accumulates)
            if kind != "gradients":
                self._shadow_backward(in_pieces=kind == "begin")
        elif kind == FIRED:
            self._pieces.mirror(payload)
        elif kind == "ended":
            self._pieces.reset()
            self._end_shadow()
        else:
            self._gradients.raise_if_reduced(self.accumulates)

    def _shadow_forward(
        self, grad: bool, sync: bool, sources: list[int], frozen: list[int], buffers: list[Buffer] | None
    ) -> None:
        self._buffer_source = self.members.leader
        # Parameters that an earlier, pending forward trains still get their gradients in its backward.
        parameters = self._parameters
        self._shadow.freeze([place for place in frozen if not (self._pending and parameters[place].requires_grad)])
        take(buffers, self._shadow.inner, parameters[0].device)
        for source in sources:
            self._shadow.sync_buffers(source)
        with setting(self.ddp, require_backward_grad_sync=sync), torch.set_grad_enabled(grad):
            output = self._shadow.forward()
        if sync and output.requires_grad:  # else no backward goes through it
            self._pending.append(output)
        if grad and sync:
            self._second_backward.forward([])

    def _shadow_backward(self, in_pieces: bool) -> None:
        if not self._pending:
            # All parameters were frozen in the forward that prepared DDP. Now DDP averages other gradients, from a
            # later forward under `no_sync` or from a penalty on the parameters, and accepts only all of them.
            self._shadow.freeze([])
            self._pending.append(self._shadow.zero())
        if in_pieces:
            self._pieces.open(self._run_pending)
        else:
            self._shadow.backward(self._run_pending)
            self._end_shadow()
        self._second_backward.awaits_first = False
        self.driver.note_backward(self.index)

    def _run_pending(self) -> None:
        torch.autograd.backward(self._pending)

    def _end_shadow(self) -> None:
        self._pending.clear()
        self.accumulates = False

    def closing_message(self) -> tuple[Runs, bool, list[int] | None, list[int] | None]:
        self._check_reduction_finished()
        deferred = self._frozen if self.deferred else None
        return runs_of(self._gradients.states()), self.accumulates, self._shadow.first.fired, deferred

    def close(self, message: tuple[Runs, bool, list[int] | None, list[int] | None], source: int) -> Callable[[], None]:
        runs, accumulates, fired, deferred = message
        self._shadow.first.note_fired(fired)
        if not self.ddp.broadcast_buffers:
            sync_norms(self.ddp, source, self.members.group)
        if deferred is not None and not self.members.last_joiner:
            # DDP averages in the next backward, even in another loop.
            self.mirror("forward", (True, True, [], deferred, None))
        end = self._settle(states_of(runs, len(self._parameters)), source, accumulates)
        self._others.reset()
        self._pending.clear()
        self._shadow.news.forget()
        self.forwards = self.synced = self.deferred = 0
        self.accumulates = accumulates
        return end

    def _settle(self, states: list[State], source: int, accumulates: bool) -> Callable[[], None]:
        """Start to clear gradients cleared on the source, and to send those changed there; return a function to finish.

        Args:
            states: The states of the source's gradients (on ranks active to the end, their own states).
            source: The rank whose state is handed over.
            accumulates: Whether the source is in an unfinished accumulation, in which each rank has its own share.
        """
        joined = self.members.rank != source and not self.members.last_joiner
        own: list[int] = []
        if self.members.rank == source and not accumulates:
            # An infinite norm does not show whether user code has unscaled the gradients.
            odd = [state.norm is not None and not math.isfinite(state.norm) for state in states]
            own = [index for index, state in enumerate(states) if state.verdict == CHANGED or odd[index]]
        elif joined:
            if accumulates:
                self._gradients.raise_if_lost(states)
            own = self._gradients.differing(states, self.accumulates)
        pending, accumulated = self.tail_log.channel.begin_gather(own, of=list[int]), self.accumulates

        def end() -> None:
            # All ranks broadcast the same gradients: those that any rank has found.
            changed = {index for found in pending() for index in found}
            if joined:
                self._gradients.follow(states, accumulated, None)
            for index in sorted(changed):
                broadcast_gradient(self._parameters[index], source, self.ddp.process_group)
            self.remember()

        return end
