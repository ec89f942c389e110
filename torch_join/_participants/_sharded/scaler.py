"""A `GradScaler` in a loop with a sharded model: only the ranks that own a gradient see whether it is infinite."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from torch_join._base.attributes import replace
from torch_join._compat import ddp as _compat
from torch_join._participants._gradients.verdicts import Runs
from torch_join._participants._sharded.sharded_model import ShardedModelParticipant
from torch_join._participants.hook import Hook
from torch_join._participants.participant import Driver, Participant

# The methods that look for infinities. The second is used if an optimizer itself scales, as fused ones do.
_CALLS = {"unscale": "unscale_", "look": "_check_inf_per_device"}


class ShardedScalerParticipant(Participant):
    """A scaler whose `unscale_`, or its equivalent, and `update` run on joined ranks too.

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
        scaler = self._scaler
        self._update = scaler.update
        self._own = {kind: getattr(scaler, name) for kind, name in _CALLS.items()}
        calls: dict[str, Callable[..., Any]] = {"update": self._update_announced}
        calls |= {name: partial(self._unscale_announced, kind) for kind, name in _CALLS.items()}
        hooks = {name: Hook(call, copied=getattr(scaler, name)) for name, call in calls.items()}
        self._undo.append(replace(scaler, **hooks))

    def _unscale_announced(self, kind: str, optimizer: Any) -> Any:
        place = next((index for index, mine in enumerate(self._steppers) if mine is optimizer), None)
        if self.members.serves or place is None or not self._scaler.is_enabled() or not self.tail_log.meet():
            return self._own[kind](optimizer)
        self.announce(kind, (place, float(self._scaler.get_scale()), [model.check() for model in self._sharded]))
        with self.tail_log.own_collectives():
            found = self._own[kind](optimizer)
        for model in self._sharded:
            model.remember()
        return found

    def _update_announced(self, new_scale: Any = None) -> None:
        if not self.members.serves and self._scaler.is_enabled() and self.tail_log.meet():
            self.announce("update", None if new_scale is None else float(new_scale))
        with self.tail_log.own_collectives():
            self._update(new_scale)

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "update":
            self._update(payload)
            return
        place, scale, states = payload
        for model, runs in zip(self._sharded, states, strict=True):
            model.take(runs)
        parameter = next(p for group in self._steppers[0].param_groups for p in group["params"])
        self._scaler.scale(_compat.local_part(parameter).new_zeros(()))  # makes its tensors, if it has none yet
        self._scaler._scale.fill_(scale)
        self._own[kind](self._steppers[place])
