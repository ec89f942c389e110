"""A DDP model: its forward and backward are announced, and shadowed by zero-gradient passes.

Announced are each forward (with its grad mode and whether it will sync) and, once per backward and
model, the moment before DDP sees the model's first gradient: a prehook on the parameters' gradient
accumulators fires exactly then. A node on the model's outputs would not do: it fires for a gradient
penalty's `autograd.grad` too, and misses L2 terms on the parameters.
"""

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torch_join import _compat
from torch_join._errors import JoinError, JoinTypeError
from torch_join._reader import count_samples
from torch_join._shadow import ModelShadow
from torch_join.joinables._joinable import WrappingJoinable
from torch_join.joinables._part import Part

if TYPE_CHECKING:
    from torch_join._join import Join

_CLEARED, _KEPT, _CHANGED = "cleared", "kept", "changed"


class ModelPart(Part):
    """A `DistributedDataParallel` model in a plain loop."""

    kinds: ClassVar[dict[str, Any]] = {"forward": tuple[bool, bool, int], "backward": list[str], "gradients": list[str]}

    meets = True  # its forward is where ranks in a plain loop meet

    def __init__(self, join: "Join", index: int, ddp: DistributedDataParallel) -> None:
        super().__init__(join, index)
        self.ddp = ddp
        self._shadow = ModelShadow(ddp)
        self._parameters = self._shadow.parameters
        self.forwards = 0  # of this rank's own, since the last tail
        self.synced = 0  # of these, how many are followed by a backward that averages gradients
        self._armed = False  # the last forward will sync in backward
        self.silent = 0  # forwards that joined ranks hear of, if there are any, when their backward begins
        self._pending: list[Tensor] = []  # a joined rank's shadow outputs that wait for a backward
        self._task = -1  # the backward that has begun
        self._factor = 1.0  # what to multiply its gradients with
        self._beginning = threading.Lock()  # for several devices the engine has several threads
        # The gradients after the last backward; () where nobody knows.
        self._known: list[Any] = [()] * len(self._parameters)
        self._accumulates = False  # that one did not sync
        self._authority = 0  # the lowest active rank in the last forward: it has the newest buffers
        self._watches: list[RemovableHandle] = []
        self._plumbing = ExitStack()

    def enter(self) -> None:
        self.configure(self.ddp)
        self._undo.append(self.ddp.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
        self._undo.append(self.ddp.module.register_forward_pre_hook(self._inside_forward).remove)
        if self.join.may_break:
            self._watch_gradients()
        self._undo.append(self._stop_watching)

    def enter_tail(self) -> None:
        self._remember()
        zero = [p.grad is None or _is_zero(p.grad) for p in self._parameters]
        if not self._accumulates or all(zero):
            # Nobody has looked before. What is zero has been cleared, or is zero on all ranks.
            self._known = [() if is_zero else known for known, is_zero in zip(self._known, zero, strict=True)]
        if not self._watches:
            self._watch_gradients()

    def leave_tail(self) -> None:
        if not self.join.may_break:
            self._stop_watching()

    # ------------------------------------------------------------ on an active rank

    def _before_forward(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._shadow.settle()
        join = self.join
        if join.serving:
            return
        grad, sync = torch.is_grad_enabled(), self.ddp.require_backward_grad_sync
        # The joined ranks, and this one, need not know of each other in a forward without collectives: but in the
        # second one, which may not be followed by a backward either.
        silent = grad and sync and not self.silent and _compat.forwards_silently(self.ddp)
        if self.meets:
            samples = count_samples((args, kwargs)) if join.weighting == "samples" and not join._in_loop else 0
            join.before_forward(samples, waits=not silent)
        self.forwards += 1
        if grad and sync:
            self.synced += 1
        if silent and (join._tail or join._has_said):
            self.silent += 1
            self._armed = True
            return
        if grad:
            self._accumulates = not sync
        if silent:
            return
        authority, self._authority = self._authority, join.leader
        if not join.in_tail:
            return
        if not self.ddp.require_forward_param_sync:
            authority = 0
        self._announce_silent()
        self.announce("forward", (grad, sync, authority))
        self._armed = self._armed or (grad and sync)  # another forward may come between one and its backward
        # Until the inner module runs, the collectives are DDP's own.
        self._plumbing.enter_context(join.own_collectives())
        if authority:
            self._shadow.sync_buffers(authority)

    def _announce_silent(self) -> None:
        while self.silent:
            self.silent -= 1
            self.announce("forward", (True, True, 0), hold=True)

    def _inside_forward(self, *_: Any) -> None:
        self._plumbing.close()

    def _watch_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._watches.append(get_gradient_edge(parameter).node.register_prehook(self._before_gradient))

    def _stop_watching(self) -> None:
        while self._watches:
            self._watches.pop().remove()

    def _before_gradient(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if (task := _compat.backward_in_progress()) != self._task:
            with self._beginning:
                if task != self._task:
                    self._begin_backward()
                    self._task = task
        if self._factor == 1.0:
            return None
        return tuple(None if gradient is None else gradient * self._factor for gradient in gradients)

    def _begin_backward(self) -> None:
        self._factor = 1.0
        if self.join.serving:
            return
        if self.join.in_tail:  # ask this first: it may find out who is active
            _compat.after_backward(lambda: _compat.after_backward(self._remember))  # after DDP's own callback
            self._announce_silent()
            # Without a sync too: what has been cleared now counts at the next one.
            self.announce("backward" if self._armed else "gradients", self._state_of_gradients())
        if self._armed:
            self._armed = self._accumulates = False
        self._factor = self.join.loss_factor

    def _remember(self) -> None:
        self._known = [None if (g := p.grad) is None else (id(g), g._version) for p in self._parameters]

    def _state_of_gradients(self) -> list[str]:
        states = self._states()
        if _CHANGED in states:
            where = states.index(_CHANGED)
            raise JoinError(
                "A gradient was changed by hand since the last backward (clipping, scaling, noise) and not cleared"
                f" before the next one accumulates into it (parameter {where}, of shape"
                f" {tuple(self._parameters[where].shape)}), while ranks {self.join.joined_ranks} have joined: they"
                " cannot know of the change. Call zero_grad() after each optimizer step, or change gradients only"
                " right before it. (Activation checkpointing with use_reentrant=True looks the same: use False.)"
            )
        return states

    def _states(self) -> list[str]:
        states = [self._state(p.grad, known) for p, known in zip(self._parameters, self._known, strict=True)]
        # None before and now: cleared with others, or not used in what accumulates, as it may be on a joined rank.
        none = _KEPT if _KEPT in states else _CLEARED
        return [state or none for state in states]

    def _state(self, gradient: Tensor | None, known: Any) -> str:
        if gradient is None:
            return "" if known is None else _CLEARED
        if (id(gradient), gradient._version) == known:
            return _KEPT
        return _CLEARED if _is_zero(gradient) else _CHANGED

    # ------------------------------------------------------------ on a joined rank

    def answer(self, kind: str, payload: Any) -> None:
        if kind == "forward":
            self._shadow_forward(*payload)
        elif kind == "backward":
            self._shadow_backward(payload)
        else:
            self._clear(payload)

    def has_met(self, kind: str) -> bool:
        if kind != "backward" or _compat.has_comm_hook(self.ddp):  # which may do anything, or nothing
            return False
        _compat.wait_for_device(self._parameters[0].device.type)
        return True

    def _shadow_forward(self, grad: bool, sync: bool, authority: int) -> None:
        self._authority = self.join.leader
        if authority:
            self._shadow.sync_buffers(authority)
        before = self.ddp.require_backward_grad_sync
        self.ddp.require_backward_grad_sync = sync
        try:
            with torch.set_grad_enabled(grad):
                output = self._shadow.forward()
        finally:
            self.ddp.require_backward_grad_sync = before
        if grad and sync:
            self._pending.append(output)

    def _shadow_backward(self, states: list[str]) -> None:
        self._clear(states)
        with self._shadow.step(shadow=True):
            torch.autograd.backward(self._pending)
        self._pending.clear()

    def _clear(self, states: list[str]) -> None:
        for parameter, state in zip(self._parameters, states, strict=True):
            if state == _CLEARED:
                parameter.grad = None

    # ------------------------------------------------------------ at the end

    def last_words(self) -> list[str]:
        return self._states()

    def close(self, words: list[str], source: int) -> None:
        if self.join.rank != source:
            self._clear(words)
        for parameter, state in zip(self._parameters, words, strict=True):
            if state == _CHANGED:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.broadcast(parameter.grad, group_src=source, group=self.ddp.process_group)
        self._pending.clear()
        self._authority = source
        self.forwards = self.synced = self.silent = 0
        self._armed = self._accumulates = False


def _is_zero(gradient: Tensor) -> bool:
    return not (gradient.coalesce().values() if gradient.is_sparse else gradient).any()


class JoinableModel(WrappingJoinable):
    """A DDP model as a `Joinable` of its own: exact gradients and buffers in torch's `Join` too.

    `Join([JoinableModel(ddp)])` of this package is the same as `Join([ddp])`. In torch's, each forward of
    `ddp` tells the others that this rank has an input; the ranks that have none take part in its
    collectives with a zero-gradient pass. At the end all have the last rank's parameters and buffers.

    Args:
        ddp: The model. Call it, not this object, in the loop.

    Raises:
        JoinTypeError: `ddp` is not a `DistributedDataParallel`.

    Limits:
        In torch's `Join`, which understands `divide_by_initial_world_size` and `weighting` here, a model comes
        first in the list, and a step is one forward of it. Joinables with collectives that are not of this
        package follow it and are called after its backward. Other collectives in the step are not
        mirrored. If a rank raises, the others wait until the process group's timeout, and what was
        installed goes with the `Join` object. `torch_join.Join` has none of these limits.
    """

    is_model = True

    def __init__(self, ddp: DistributedDataParallel) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise JoinTypeError(f"JoinableModel takes a DistributedDataParallel model, not {type(ddp).__name__}.")
        super().__init__(ddp, ddp.process_group, ddp.device)

    def make_part(self, join: Any, index: int) -> Part:
        if index > 0 and not isinstance(join.parts[0], ModelPart):
            raise self.misplaced("no JoinableMetric may come before it")
        part = ModelPart(join, index, self.wrapped)
        part.meets = index == 0
        return part

    def leads(self) -> bool:
        return True

    def is_done(self, kind: str, payload: Any) -> bool:
        return kind != "forward" or not payload[0]  # a forward with gradients waits for its backward
