"""Sends objects of types that cannot go over the channel: pickled, over the process group, as torch does.

The processes of the group are trusted, as in torch, whose object collectives also unpickle. All ranks of the group take
part; joined ranks do when a record announces it. This never happens between the start of a backward and its last
bucket. The contents are sent as bytes of CPU tensors, or through a device if the group cannot send CPU tensors.
"""

import io
import pickle
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.errors import JoinTypeError
from torch_join._base.specs import copied_bytes
from torch_join._control.codec import closed
from torch_join._handover import transfer as _transfer


class _Pickler(pickle.Pickler):
    """Pickles accelerator tensors so that they are loaded on the reader's own device, not on that of the same index."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
            return _at_home, (value.detach().cpu(), value.device.type, value.requires_grad)
        return NotImplemented


def _at_home(tensor: Tensor, kind: str, requires_grad: bool) -> Tensor:
    return tensor.to(kind).requires_grad_(requires_grad)


@closed("apart")
class Apart(NamedTuple):
    """Represents, in a record, an object that follows the record over the process group."""


def pack(value: Any, what: str) -> bytes:
    """Pickle `value`, before it is announced to others.

    Raises:
        JoinTypeError: It cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
        return buffer.getvalue()
    except Exception as error:
        raise JoinTypeError(f"{what} cannot be pickled: {error}") from error


def gather(value: Any, what: str, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's value, by rank; every rank of the group calls this at the same time.

    Args:
        value: This rank's value.
        what: Its name in an error.
        group: The process group, by default the whole world; if none is initialized, this is the only rank.

    Raises:
        JoinTypeError: It cannot be pickled.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    data = torch.frombuffer(bytearray(pack(value, what)), dtype=torch.uint8)[:, None]
    place = _transfer.carrier("cpu", group or cast(dist.ProcessGroup, dist.group.WORLD)) or torch.device("cpu")
    sizes = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)], device=place), group=group)
    return [pickle.loads(each) for each in _transfer.collect(data, [int(size) for size in sizes], group)]


def broadcast(packed: bytes | None, source: int, group: dist.ProcessGroup | None, nbytes: int | None = None) -> Any:
    """Return the value that the source has packed; every rank of the group calls this at the same time.

    Args:
        packed: The result of `pack`, on the source.
        source: The source's rank in `group`.
        group: The process group, by default the whole world.
        nbytes: Its size, if all ranks know it.
    """
    group = group or cast(dist.ProcessGroup, dist.group.WORLD)
    # Torch's `broadcast_object_list` needs numpy, which may not be installed.
    if nbytes is None:
        size = torch.tensor([len(packed or b"")], device="cpu")
        _transfer.broadcast_flat(size, source, group)
        nbytes = int(size)
    data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if packed is not None:
        data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    _transfer.broadcast_flat(data, source, group)
    return pickle.loads(packed or copied_bytes(data))
