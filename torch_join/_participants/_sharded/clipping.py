"""Clipping a sharded model's gradients: the norm covers all ranks' shards, so joined ranks compute and clip too."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_join._base.errors import UnsupportedError
from torch_join._compat import fsdp as _compat
from torch_join._participants._gradients.evidence import Runs
from torch_join._participants._sharded.following import is_first_generation
from torch_join._participants._sharded.sharded_model import ShardedModelParticipant
from torch_join._participants.participant import Driver, Participant


class ClippingParticipant(Participant):
    """Announces and follows gradient clipping of the sharded models passed to `Join`.

    Models with `fully_shard` are clipped by `torch.nn.utils.clip_grad_norm_`, FSDP1 models by their own method.

    Args:
        models: The models' participants.
    """

    kinds: ClassVar[dict[str, Any]] = {
        "norm": tuple[list[int], float, bool | None, list[Runs]],
        "clip": tuple[list[int], float, bool | None],
        "method": tuple[int, float, float, Runs],
    }

    def __init__(self, driver: Driver, index: int, models: Sequence[ShardedModelParticipant]) -> None:
        super().__init__(driver, index)
        self._first = [model for model in models if is_first_generation(model.model)]
        self._sharded = [model for model in models if model not in self._first]
        self._norm: Any = None

    def enter(self) -> None:
        if self._sharded:
            self._own_norm, self._own_scale, restore = _compat.wrap_clipping(self._get_total_norm, self._clip_grads)
            self._undo.append(restore)
        self._roots: list[tuple[ShardedModelParticipant, Any]]
        self._roots = [(model, root) for model in self._first for root in _compat.roots(model.model)]
        for place, (model, root) in enumerate(self._roots):
            of_call = partial(self._of_method, place, model)
            self.announce_calls(root, "clip_grad_norm_", "method", of_call, after=model.remember)

    @property
    def _parameters(self) -> list[Tensor]:
        # Include frozen ones: parameters frozen on a joined rank may be trained on active ranks, and vice versa.
        return [parameter for model in self._sharded for parameter in model.gradients.parameters]

    def _get_total_norm(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        places = _places(given, [parameter.grad for parameter in self._parameters])
        if not places:
            return self._own_norm(given, norm_type, error_if_nonfinite, foreach)
        if self.is_quiet():  # older torch adds its epsilon to each rank's part of a norm
            return _compat.replicated(self._own_norm(given, norm_type, error_if_nonfinite, foreach))
        if len(places) < len(given):
            raise UnsupportedError(
                "torch.nn.utils.clip_grad_norm_ got sharded and other gradients together after some rank finished."
                " That rank holds only a part of the sharded ones. Clip each model separately."
            )
        self.announce("norm", (places, float(norm_type), foreach, [model.check() for model in self._sharded]))
        with self.tail_log.own_collectives():
            self._norm = _compat.replicated(self._own_norm(given, norm_type, False, foreach))
        if error_if_nonfinite:  # older torch checks a part of the norm, with collectives that joined ranks do not make
            self._own_norm([self._norm], norm_type, True, foreach)
        return self._norm

    def _clip_grads(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        places = _places([p for p in given if p.grad is not None], self._parameters)
        if not places or self.is_quiet():
            self._own_scale(given, max_norm, total_norm, foreach)
            return
        if total_norm is not self._norm:
            raise UnsupportedError(
                "torch.nn.utils.clip_grads_with_norm_ got a different norm than the last one computed, while some"
                " rank has finished and did not compute this norm. Use torch.nn.utils.clip_grad_norm_."
            )
        self.announce("clip", (places, float(max_norm), foreach))
        with self.tail_log.own_collectives():
            self._own_scale(given, max_norm, total_norm, foreach)
        for model in self._sharded:
            model.remember()

    @staticmethod
    def _of_method(place: int, model: ShardedModelParticipant, max_norm: float, norm_type: float = 2.0) -> Any:
        return place, float(max_norm), float(norm_type), model.check()

    def mirror(self, kind: str, payload: Any) -> None:
        parameters = self._parameters
        if kind == "norm":
            places, norm_type, foreach, states = payload
            for model, runs in zip(self._sharded, states, strict=True):
                model.take(runs)
            gradients = [parameters[index].grad for index in places]
            self._norm = _compat.replicated(self._own_norm(gradients, norm_type, False, foreach))
        elif kind == "clip":
            places, max_norm, foreach = payload
            self._own_scale([parameters[index] for index in places], max_norm, self._norm, foreach)
        else:
            place, max_norm, norm_type, runs = payload
            model, root = self._roots[place]
            model.take(runs)
            with torch.no_grad():
                root.clip_grad_norm_(max_norm, norm_type)


def _places(given: Sequence[Any], known: Sequence[Any]) -> list[int]:
    index = {id(tensor): place for place, tensor in enumerate(known) if tensor is not None}
    return [index[id(tensor)] for tensor in given if id(tensor) in index]
