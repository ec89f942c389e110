"""An engine in a user's loop.

Besides the engine's events, an active rank announces calls of `backward`, `step`, `set_gradient_accumulation_boundary`
and `zero_grad`, and of the checkpoint methods. A joined rank makes these calls too. So micro steps, accumulation,
clipping, loss scales, the engine's scheduler and checkpoints are equal on every rank, and nothing is handed over.

`engine.backward` receives the loss, so the loss's gradient is weighted there.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from torch_join._base.errors import UnsupportedError
from torch_join._compat import ddp as _compat_torch
from torch_join._compat import deepspeed as _compat
from torch_join._control.codec import foreign
from torch_join._participants._deepspeed.events import EngineParticipant
from torch_join._participants.hook import Hook
from torch_join._participants.participant import Driver, LoopModel
from torch_join._shadow.zero_gradient import following_zero

Options = list[dict[str, Any]]
_NOTHING = type(None)
_CHECKPOINTS = ("save_checkpoint", "load_checkpoint", "save_16bit_model")


class LoopEngineParticipant(EngineParticipant, LoopModel):
    """A `DeepSpeedEngine` that was passed to `Join`."""

    kinds: ClassVar[dict[str, Any]] = {
        **EngineParticipant.kinds,
        "backward": tuple[bool, list[int] | None],  # whether inside no_sync; the gradients that exist, if they stay
        "epilogue": _NOTHING,
        "step": tuple[bool, Options],  # whether called on the engine
        "options": Options,
        "boundary": bool,
        "zero_grad": tuple[bool, dict[str, Any]],  # whether called on the engine, and its arguments
        "checkpoint": tuple[str, tuple[Any, ...], dict[str, Any]],  # the method, and its arguments
    }
    # The groups' hyperparameters; which parameters train, and which modules are in training mode.
    closing: ClassVar[Any] = tuple[Options, list[bool], list[bool]]

    is_model = True

    def __init__(self, driver: Driver, index: int, engine: Any) -> None:
        super().__init__(driver, index, engine)
        self._forwarded_in = 0  # the loop of the last forward
        # In stage 0 each rank holds all gradients, and steps with them: these are the gradients that other ranks know.
        self._gradients: list[tuple[Tensor | None, int]] = []

    def enter(self) -> None:
        super().enter()
        engine, optimizer = self.engine, self.engine.optimizer
        hook = engine.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True)
        self._undo.append(hook.remove)
        self.announce_calls(engine, "_backward_epilogue", "epilogue", self.send_present, after=self._note_gradients)
        self.override(engine, "backward", self._backward)
        self.override(engine, "_backward_prologue", self._prologue)
        self.override(engine, "coalesce_grad_reduction", self._coalescing)
        self.override(engine, "step", partial(self._stepping, True))
        boundary = "set_gradient_accumulation_boundary"  # Accelerate passes its argument by name
        self.announce_calls(engine, boundary, "boundary", lambda is_boundary: bool(is_boundary))
        self.announce_calls(engine, "zero_grad", "zero_grad", partial(self._of_clearing, True))
        if hasattr(optimizer, "zero_grad"):  # else the engine only evaluates
            self.override(optimizer, "step", partial(self._stepping, False))  # as Fabric does
            self.announce_calls(optimizer, "zero_grad", "zero_grad", partial(self._of_clearing, False))
        for name in _CHECKPOINTS:
            self.override(engine, name, partial(self._checkpoint, name))

    # ------------------------------------------------------------ what the loop knows

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [self.engine, self.engine.module]

    # ------------------------------------------------------------ on an active rank

    def _before_forward(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.members.serves:
            return
        if self.tail_log.in_window:
            raise UnsupportedError(
                "A loop over torch_join.windows runs a DeepSpeed engine, which counts micro-batches itself, so ranks"
                " with windows of different lengths would step at different times. Loop over single batches, and set"
                " the engine's gradient_accumulation_steps."
            )
        if _compat_torch.backward_in_progress() == -1:
            self.driver.before_forward(lambda: self.members.count_forward(args, kwargs))
        self.forwards += 1
        self._forwarded_in = self.driver.loop_number

    def _backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        if self.members.serves:
            return original(loss, *args, **kwargs)
        self.driver.before_backward(self.index, self._forwarded_in)
        self.synced += 1
        if self.tail_log.meet():
            if kwargs.get("retain_graph") or (args and args[0]):
                raise UnsupportedError(
                    f"engine.backward(retain_graph=True) was called after ranks {self.members.joined_names} finished."
                    " They cannot follow another backward of the same graph. Add up the losses, and run a single"
                    " backward."
                )
            self._check_gradients(cleared=True)
            present = [n for n, p in enumerate(self.parameters) if p.grad is not None]
            stay = self.stage < 2  # else DeepSpeed moves each micro-batch's gradients away
            self.announce("backward", (bool(self.engine.inside_no_sync_ctxt), present if stay else None))
        factor = self.members.loss_factor
        weighs = factor != 1.0 and loss.requires_grad
        weighing = loss.register_hook(lambda gradient: gradient * factor) if weighs else nullcontext()
        with weighing, self.leaving_out(factor == 0.0):
            return original(loss, *args, **kwargs)

    def _prologue(self, original: Callable[[], None]) -> None:
        if not (self.members.serves or self._is_in_an_engines_backward()):
            in_tail = self.tail_log.meet()
            if in_tail or self.members.loss_factor != 1.0:
                where = f"after ranks {self.members.joined_names} finished, and they cannot follow it"
                if not in_tail:
                    where = "in a step whose loss only engine.backward would weight"
                raise UnsupportedError(
                    f"A DeepSpeed engine's backward was run with loss.backward() or torch.autograd {where}. Call"
                    " engine.backward(loss)."
                )
        original()

    def _is_in_an_engines_backward(self) -> bool:
        """Whether an engine passed to `Join` runs its backward, which may go through others, as a discriminator."""
        engines = (each.engine for each in self.tail_log.participants if isinstance(each, LoopEngineParticipant))
        return any(map(_compat.is_in_backward, engines))

    def _coalescing(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.members.serves and self.tail_log.meet():
            raise UnsupportedError(
                f"engine.coalesce_grad_reduction() was called after ranks {self.members.joined_names} finished. They"
                " cannot follow a reduction outside the backward. Remove it, or add up the losses and run a single"
                " backward."
            )
        return original(*args, **kwargs)

    def _note_gradients(self) -> None:
        if self.stage == 0 and self.members.announces:
            self._gradients = list(map(_state_of, self.parameters))

    def _stepping(self, of_engine: bool, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_quiet():
            return original(*args, **kwargs)
        if self.tail_log.meet() and (args or kwargs):
            raise UnsupportedError(
                f"step() got arguments after ranks {self.members.joined_names} finished. They step their shards"
                " without these arguments. Set the values in the optimizer's param_groups."
            )
        self._check_gradients(cleared=False)
        self._gradients.clear()
        self.announce_open("step", (of_engine, _compat.options_of(self.engine)))
        return self.inside(partial(original, *args, **kwargs))

    def _check_gradients(self, cleared: bool) -> None:
        """Raise if user code changed gradients that joined ranks hold too; with `cleared` it may have cleared them."""
        for parameter, (gradient, version) in zip(self.parameters, self._gradients, strict=False):
            now, its_version = _state_of(parameter)
            if (now is not gradient or its_version != version) and not (cleared and now is None):
                raise UnsupportedError(
                    "Gradients of a stage-0 DeepSpeed engine were modified by hand (clipped, for example) after ranks"
                    f" {self.members.joined_names} finished. They did not modify theirs. Set gradient_clipping"
                    " in the engine's configuration; clear gradients with engine.zero_grad()."
                )

    def before_all_ranks(self) -> None:
        # A user's scheduler may have changed the options since the last step; each rank saves those of its own shard.
        self.announce_open("options", _compat.options_of(self.engine))

    def _of_clearing(self, of_engine: bool, *args: Any, **kwargs: Any) -> tuple[bool, dict[str, Any]]:
        self._gradients.clear()
        return of_engine, {**kwargs, **dict(zip(("set_to_none",), args, strict=False))}

    def _checkpoint(self, method_name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.members.serves or self.is_inside:
            return original(*args, **kwargs)
        with self.tail_log.together(partial(self.announce_open, "checkpoint", (method_name, args, kwargs))):
            return original(*args, **kwargs)

    # ------------------------------------------------------------ on a joined rank

    def mirror(self, kind: str, payload: Any) -> None:
        engine, optimizer = self.engine, self.engine.optimizer
        if kind == "backward":
            self.driver.note_backward(self.index)
            self.synced += 1
            without_sync, present = payload
            for parameter in self.without(present or ()) if present is not None else ():
                parameter.grad = None
            with engine.no_sync() if without_sync else nullcontext():
                engine.backward(following_zero(self._follow_backward, self.device))
        elif kind == "epilogue":
            engine._backward_epilogue()
        elif kind == "step":
            of_engine, options = payload
            _compat.take_options(engine, options)
            (engine if of_engine else optimizer).step()
        elif kind == "options":
            _compat.take_options(engine, payload)
        elif kind == "boundary":
            engine.set_gradient_accumulation_boundary(payload)
        elif kind == "zero_grad":
            of_engine, options = payload
            (engine if of_engine else optimizer).zero_grad(**options)
        elif kind == "checkpoint":
            name, args, kwargs = payload
            if name not in _CHECKPOINTS:
                raise foreign("a record of an engine", f"a call of {name!r}")
            with self.tail_log.on_all_ranks():
                getattr(engine, name)(*args, **kwargs)
        else:
            super().mirror(kind, payload)

    def _follow_backward(self) -> None:
        self.tail_log.follow_to(self.index, "epilogue")

    # ------------------------------------------------------------ at the end

    def closing_message(self) -> tuple[Options, list[bool], list[bool]]:
        trains = [parameter.requires_grad for parameter in self.parameters]
        modes = [module.training for module in self.engine.module.modules()]
        return _compat.options_of(self.engine), trains, modes

    def close(self, message: tuple[Options, list[bool], list[bool]], source: int) -> None:
        options, trains, modes = message
        if self.members.rank != source:
            _compat.take_options(self.engine, options)
        # Code on the active ranks has set these; it has not run here.
        for parameter, trained in zip(self.parameters, trains, strict=True):
            parameter.requires_grad_(trained)
        for module, mode in zip(self.engine.module.modules(), modes, strict=True):
            module.training = mode
        self.forwards = self.synced = 0
        self._gradients.clear()


def _state_of(parameter: Any) -> tuple[Tensor | None, int]:
    """Return a parameter's gradient and its version, which show later whether the gradient was changed."""
    return parameter.grad, -1 if parameter.grad is None else parameter.grad._version
