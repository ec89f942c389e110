"""How the states of a metric travel: from the ranks that contribute, as bytes, to all of them."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_join._base.specs import raw_bytes
from torch_join._compat.metrics import State, own_states
from torch_join._control.codec import closed
from torch_join._handover.transfer import exchange
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


def exchange_states(driver: Driver, metric: Any, contributes: bool) -> list[dict[str, State]]:
    """Return the states of each rank that contributes, by rank: this rank's own are those it has, with their graph.

    Every rank calls this: says what it contributes, if anything, and then sends its states as bytes.
    """
    own = own_states(metric) if contributes else {}
    mine = {name: (state.listed, [_Spec.of(t) for t in state.tensors]) for name, state in own.items()}
    schemas: list[_Schema | None] = driver.tail_log.channel.gather(mine if contributes else None, of=_Schema | None)

    def place(device: str) -> torch.device:
        return metric.device if metric.device.type == device else torch.device(device)

    rows: dict[str, list[Tensor]] = {}
    for device in sorted({spec.device for schema in schemas for spec in _specs(schema) if spec.nbytes > 0}):
        raw = [raw_bytes(t)[:, None] for state in own.values() for t in state.tensors if t.device.type == device]
        sizes = [sum(spec.nbytes for spec in _specs(schema, device)) for schema in schemas]
        rows[device] = [torch.empty((size, 1), dtype=torch.uint8, device=place(device)) for size in sizes]
        with torch.no_grad(), driver.tail_log.own_collectives():
            data = torch.cat(raw) if raw else None
            for rank, first, piece in exchange(data, 1, sizes, driver.members.group, None, place(device)):
                rows[device][rank][first : first + len(piece)] = piece

    def unpack(rank: int, schema: _Schema) -> dict[str, State]:
        starts = dict.fromkeys(rows, 0)

        def take(spec: _Spec) -> Tensor:
            if spec.nbytes == 0:
                return torch.empty(spec.shape, dtype=spec.dtype, device=place(spec.device))
            start = starts[spec.device]
            starts[spec.device] = end = start + spec.nbytes
            # A copy, since a dtype's elements must not begin just anywhere in memory.
            return rows[spec.device][rank][start:end, 0].clone().view(spec.dtype).view(spec.shape)

        return {name: State(listed, [take(spec) for spec in specs]) for name, (listed, specs) in schema.items()}

    me = driver.members.rank
    return [own if rank == me else unpack(rank, its) for rank, its in enumerate(schemas) if its is not None]


def _specs(schema: _Schema | None, device: str | None = None) -> list[_Spec]:
    found = [spec for _, specs in (schema or {}).values() for spec in specs]
    return [spec for spec in found if device in (None, spec.device)]
