"""Sends a metric's states, as bytes, from the ranks that contribute to all ranks."""

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
    """The description of a tensor that is sent as contiguous bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_Schema = dict[str, tuple[bool, list[_Spec]]]


def exchange_states(driver: Driver, metric: Any, contributes: bool) -> list[dict[str, State]]:
    """Return the states of each rank that contributes, in order of ranks; this rank's own states keep their graph.

    Every rank calls this. It describes its contribution, if any, and then sends its states as bytes.
    """
    own = own_states(metric) if contributes else {}
    mine = {
        name: (state.listed, [_Spec(tuple(t.shape), t.dtype, t.device.type) for t in state.tensors])
        for name, state in own.items()
    }
    schemas: list[_Schema | None] = driver.tail_log.channel.gather(mine if contributes else None, of=_Schema | None)

    rows: dict[str, list[Tensor]] = {}
    for kind in sorted({spec.device for schema in schemas for spec in _specs(schema)}):
        device = metric.device if metric.device.type == kind else torch.device(kind)
        raw = [raw_bytes(t)[:, None] for state in own.values() for t in state.tensors if t.device.type == kind]
        sizes = [sum(spec.nbytes for spec in _specs(schema, kind)) for schema in schemas]
        rows[kind] = [torch.empty((size, 1), dtype=torch.uint8, device=device) for size in sizes]
        with torch.no_grad(), driver.tail_log.own_collectives():
            data = torch.cat(raw) if raw else None
            for rank, first, piece in exchange(data, 1, sizes, driver.members.group, None, device):
                rows[kind][rank][first : first + len(piece)] = piece

    def unpack(rank: int, schema: _Schema) -> dict[str, State]:
        sizes = {kind: [spec.nbytes for spec in _specs(schema, kind)] for kind in rows}
        parts = {kind: iter(torch.split(rows[kind][rank][:, 0], sizes[kind])) for kind in rows}
        return {  # copies, since a dtype's elements must be aligned in memory
            name: State(listed, [next(parts[s.device]).clone().view(s.dtype).view(s.shape) for s in specs])
            for name, (listed, specs) in schema.items()
        }

    me = driver.members.rank
    return [own if rank == me else unpack(rank, its) for rank, its in enumerate(schemas) if its is not None]


def _specs(schema: _Schema | None, device: str | None = None) -> list[_Spec]:
    found = [spec for _, specs in (schema or {}).values() for spec in specs]
    return [spec for spec in found if device in (None, spec.device)]
