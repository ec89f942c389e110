"""A `GradScaler` in a loop with a sharded model: only ranks that own a part of a gradient see an infinity in it."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch_join._compat import ddp as _compat
from torch_join._participants._gradients.evidence import Runs
from torch_join._participants._sharded.sharded_model import ShardedModelParticipant
from torch_join._participants.participant import Driver, Participant

# The methods that look for infinities. The second one is used if an optimizer itself scales, as fused optimizers do.
_CALLS = {"unscale": "unscale_", "look": "_check_inf_per_device"}


class ShardedScalerParticipant(Participant):
    """A scaler whose `unscale_` (or its equivalent) and `update` run on joined ranks too.

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
                self._scaler, name, kind, self._of_unscaling, ours=self._steps_shards, after=self._remember
            )
        of_update = lambda new_scale=None: None if new_scale is None else float(new_scale)  # noqa: E731
        self.announce_calls(self._scaler, "update", "update", of_update)

    def is_quiet(self) -> bool:
        return not self._scaler.is_enabled() or super().is_quiet()

    def _steps_shards(self, optimizer: Any) -> bool:
        return any(mine is optimizer for mine in self._steppers)

    def _of_unscaling(self, optimizer: Any) -> Any:
        place = next(index for index, mine in enumerate(self._steppers) if mine is optimizer)
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
