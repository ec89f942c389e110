"""An optimizer of sharded parameters, and its scaler: a joined rank steps its part of the state like active ranks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch

from torch_join._base.attributes import setting
from torch_join._base.errors import UnsupportedError
from torch_join._base.hyperparameters import group_options, take_group_options
from torch_join._compat import ddp as _compat
from torch_join._participants._gradients.evidence import Runs
from torch_join._participants._sharded.contents import check_state, state_of
from torch_join._participants._sharded.sharded_model import ShardedModelParticipant
from torch_join._participants.hook import around_steps
from torch_join._participants.participant import Driver, Participant

Options = list[dict[str, Any]]  # each group's options, without its parameters
_SCALING = ("grad_scale", "found_inf")  # a GradScaler sets these on an optimizer that itself scales, and skips steps


class ShardedStepParticipant(Participant):
    """An optimizer whose parameters belong to sharded models that were passed to `Join`.

    Args:
        optimizer: The optimizer; the innermost one, if it wraps another (Accelerate's).
        models: The participants of all sharded models.

    Raises:
        UnsupportedError: The optimizer also has other parameters, or is LBFGS.
    """

    kinds: ClassVar[dict[str, Any]] = {"step": tuple[Options, list[Runs], dict[str, float]], "options": Options}
    closing: ClassVar[Any] = Options

    def __init__(self, driver: Driver, index: int, optimizer: Any, models: Sequence[ShardedModelParticipant]) -> None:
        super().__init__(driver, index)
        self.optimizer = optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS cannot step sharded parameters: how often it runs its closure depends on values that finished"
                " ranks do not have. Use an optimizer that runs its closure once."
            )
        owned = {id(p): model for model in models for unit in model.units for p in unit.registered}
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        other = [p for p in stepped if p.requires_grad and id(p) not in owned]
        if other:
            raise UnsupportedError(
                f"{type(optimizer).__name__} steps parameters of a sharded model and {len(other)} others (the first"
                f" of shape {tuple(other[0].shape)}). A finished rank steps its own shards, but receives replicated"
                " parameters only at the end. Use separate optimizers, and pass every model to Join."
            )
        self._sharded = [model for model in models if any(owned.get(id(p)) is model for p in stepped)]
        self._scales = False  # whether the current step scales the gradients itself
        self._noted: Any = None  # the optimizer's state, as of the last moment when all ranks had changed theirs alike

    def enter(self) -> None:
        for model in self._sharded:
            model.before_reductions.append(self._announce_options)
            self._undo.append(partial(model.before_reductions.remove, self._announce_options))
        self._undo.append(around_steps(self.optimizer, self._send, self._is_quiet))
        self._undo.append(self.optimizer.register_step_post_hook(self._after_step).remove)

    # ------------------------------------------------------------ on an active rank

    def _is_quiet(self) -> bool:
        # A joined rank that follows a reduction also performs the steps within it.
        return not self.tail_log.meet() or any(model.reduces for model in self._sharded)

    def _check_state(self) -> None:
        if self._noted is not None:
            check_state(self.optimizer, self._noted, self.members.joined_names)

    def enter_tail(self) -> None:
        self._noted = state_of(self.optimizer) if any(model.at_top for model in self._sharded) else self._noted

    def leave_tail(self) -> None:
        self._noted = None

    def after_all_ranks(self) -> None:
        if self._noted is not None:
            self._noted = state_of(self.optimizer)

    def _send(self) -> AbstractContextManager[None]:
        self._check_state()
        states = [model.check() for model in self._sharded]
        found = {name: getattr(self.optimizer, name, None) for name in _SCALING}
        scaling = {name: float(value) for name, value in found.items() if value is not None}
        self._scales = bool(scaling)
        self.announce_open("step", (group_options(self.optimizer), states, scaling))
        return self.tail_log.own_collectives()

    def _after_step(self, *_: Any) -> None:
        models = [model for model in self._sharded if self.members.announces or not model.at_top]
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]} if models else set()
        for model in models:
            model.contents.remember(own)  # only these: each parameter may have its own optimizer
            if self._scales:  # the step has changed the gradients in place
                model.remember()
        if models:
            self._noted = state_of(self.optimizer)

    def _announce_options(self) -> None:
        """Announce the hyperparameters to joined ranks, for a step inside the next reduction."""
        if any(_compat.steps_in_backward(group["params"]) for group in self.optimizer.param_groups):
            self.announce("options", group_options(self.optimizer))

    def before_all_ranks(self) -> None:
        self.announce("options", group_options(self.optimizer))

    # ------------------------------------------------------------ on a joined rank

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "options":
            take_group_options(self.optimizer, payload)
            return
        options, states, scaling = payload
        take_group_options(self.optimizer, options)
        for model, runs in zip(self._sharded, states, strict=True):
            model.take(runs)
        device = next(p for group in self.optimizer.param_groups for p in group["params"]).device
        given = {name: torch.tensor(scaling[name], device=device) for name in _SCALING if name in scaling}
        with setting(self.optimizer, **given):
            self.optimizer.step()

    def closing_message(self) -> Options:
        self._check_state()
        return group_options(self.optimizer)

    def close(self, message: Options, source: int) -> None:
        if self.members.rank != source:
            take_group_options(self.optimizer, message)


# The methods that look for infinities. The second one is used if an optimizer itself scales, as fused optimizers do.
_CALLS = {"unscale": "unscale_", "look": "_check_inf_per_device"}


class ShardedScalerParticipant(Participant):
    """A `GradScaler` whose `unscale_` (or its equivalent) and `update` run on joined ranks too.

    Only ranks that own a part of a gradient see an infinity in it.

    Args:
        scaler: The scaler.
        optimizers: The optimizers of sharded parameters.
        models: The participants of the sharded models.
    """

    kinds: ClassVar[dict[str, Any]] = {**dict.fromkeys(_CALLS, tuple[int, float, list[Runs]]), "update": float | None}

    def __init__(
        self,
        driver: Driver,
        index: int,
        scaler: Any,
        optimizers: Sequence[Any],
        models: Sequence[ShardedModelParticipant],
    ) -> None:
        super().__init__(driver, index)
        self._scaler = scaler
        self._steppers = optimizers
        self._sharded = models

    def enter(self) -> None:
        for kind, name in _CALLS.items():
            self.announce_calls(
                self._scaler, name, kind, self._of_unscaling, repeats=self._steps_shards, after=self._remember
            )
        of_update = lambda new_scale=None: None if new_scale is None else float(new_scale)  # noqa: E731
        self.announce_calls(self._scaler, "update", "update", of_update)

    def is_quiet(self) -> bool:
        return not self._scaler.is_enabled() or super().is_quiet()

    def _steps_shards(self, optimizer: Any) -> bool:
        return any(each is optimizer for each in self._steppers)

    def _of_unscaling(self, optimizer: Any) -> Any:
        place = next(index for index, each in enumerate(self._steppers) if each is optimizer)
        return place, float(self._scaler.get_scale()), [model.check() for model in self._sharded]

    def _remember(self) -> None:
        for model in self._sharded:
            model.remember()

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "update":
            self._scaler.update(payload)
            return
        place, scale, states = payload
        for model, runs in zip(self._sharded, states, strict=True):
            model.take(runs)
        parameter = next(p for group in self._steppers[0].param_groups for p in group["params"])
        self._scaler.scale(_compat.local_part(parameter).new_zeros(()))  # creates the scaler's tensors, if needed
        self._scaler._scale.fill_(scale)
        getattr(self._scaler, _CALLS[kind])(self._steppers[place])
