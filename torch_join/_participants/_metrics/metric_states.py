"""How the states of a metric travel: from the ranks that contribute, as bytes, to all of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.specs import raw_bytes
from torch_join._compat.metrics import State, own_states
from torch_join._control.codec import closed
from torch_join._handover import transfer as _transfer
from torch_join._participants.participant import Driver


@closed("state")
class _Spec(NamedTuple):
    """A tensor as it travels: contiguous bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> "_Spec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_Schema = dict[str, tuple[bool, list[_Spec]]]


class Exchange:
    """Every rank says what it contributes, if anything, and then sends its states as bytes."""

    def __init__(self, driver: Driver, metric: Any, contributes: bool) -> None:
        self._driver, self._metric = driver, metric
        self._states = own_states(metric) if contributes else {}
        schema = {name: (state.listed, [_Spec.of(t) for t in state.tensors]) for name, state in self._states.items()}
        mine = schema if contributes else None
        self._schemas: list[_Schema | None] = driver.tail_log.channel.gather(mine, of=_Schema | None)
        devices = {spec.device for schema in self._schemas for spec in _specs(schema) if spec.nbytes > 0}
        self._rows = {device: self._all_gather(device) for device in sorted(devices)}

    def results(self) -> list[dict[str, State]]:
        """Return the states of each contributor, by rank; this rank's own are those it has, with their graph."""
        return [
            self._states if rank == self._driver.members.rank else self._unpack(rank, schema)
            for rank, schema in enumerate(self._schemas)
            if schema is not None
        ]

    def _all_gather(self, device: str) -> Sequence[Tensor]:
        if len(self._schemas) == 1:
            return ()
        size = max(sum(spec.nbytes for spec in _specs(schema, device)) for schema in self._schemas)
        group = self._driver.members.group or cast(dist.ProcessGroup, dist.group.WORLD)
        place = _transfer.carrier(device, group) or self._place(device)
        raw = [raw_bytes(t) for state in self._states.values() for t in state.tensors if t.device.type == device]
        padding = torch.zeros(size - sum(map(len, raw)), dtype=torch.uint8, device=place)
        packed = torch.cat([*(each.to(place) for each in raw), padding])
        rows = [torch.empty_like(packed) for _ in self._schemas]
        with torch.no_grad(), self._driver.tail_log.own_collectives():
            dist.all_gather(rows, packed, group=group)
        return rows if place.type == device else [row.to(self._place(device)) for row in rows]

    def _unpack(self, rank: int, schema: _Schema) -> dict[str, State]:
        starts = dict.fromkeys(self._rows, 0)

        def take(spec: _Spec) -> Tensor:
            if spec.nbytes == 0:
                return torch.empty(spec.shape, dtype=spec.dtype, device=self._place(spec.device))
            start = starts[spec.device]
            starts[spec.device] = end = start + spec.nbytes
            # A copy, since a dtype's elements must not begin just anywhere in memory.
            return self._rows[spec.device][rank][start:end].clone().view(spec.dtype).view(spec.shape)

        return {name: State(listed, [take(spec) for spec in specs]) for name, (listed, specs) in schema.items()}

    def _place(self, device: str) -> torch.device:
        own: torch.device = self._metric.device
        return own if own.type == device else torch.device(device)


def _specs(schema: _Schema | None, device: str | None = None) -> list[_Spec]:
    found = [spec for _, specs in (schema or {}).values() for spec in specs]
    return [spec for spec in found if device in (None, spec.device)]
