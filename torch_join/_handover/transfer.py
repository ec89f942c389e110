"""Sends tensors of one rank to all others, and rows of bytes between all ranks, one bucket at a time.

Everything is sent as bytes, so that every dtype arrives bit for bit. A large tensor is sent from its own memory and
received into it; small ones are packed into a bucket. Extra memory is needed only for that bucket and, while it is
sent, for a large tensor whose layout differs between ranks. (DDP's own packing, `broadcast_coalesced`, keeps two
buckets, copies large tensors too, and writes to the source's tensors.)
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.devices import device_of
from torch_join._base.specs import TensorSpec, copied_bytes, storage_view

BUCKET_BYTES = 25 * 2**20
# From this size on, a separate broadcast costs less than copying into a bucket and out of it.
_LARGE = 4 * 2**20
_ALIGNMENT = 16  # bytes: the size of the largest element
_WITH_SPECS = 2**18  # bytes: up to this size, another copy costs less than a broadcast
Bucket = Sequence[tuple[TensorSpec, Sequence[Tensor]]]


def broadcast(
    specs: Sequence[TensorSpec], tensors: Sequence[Sequence[Tensor]], source: int, group: dist.ProcessGroup | None
) -> None:
    """Fill tensors with the contents of the source's tensors; every rank calls this at the same time.

    Args:
        specs: The descriptions of the source's tensors, the same on every rank.
        tensors: For each description, this rank's tensors: on the source just one, elsewhere those to fill.
        source: The source's rank in `group`.
        group: The process group, by default the whole world.
    """
    group = group or cast(dist.ProcessGroup, dist.group.WORLD)
    for device in sorted({spec.device for spec in specs}):
        for indices in _buckets(specs, device):
            _broadcast_bucket([(specs[i], tensors[i]) for i in indices], source, group)


def pack(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> bytes | None:
    """Return the contents of tensors that are few and small, to send with the specs; `None` for any others.

    Args:
        specs: Their descriptions.
        tensors: The source's tensors.
    """
    if any(spec.device != "cpu" for spec in specs) or sum(_aligned(spec.nbytes) for spec in specs) > _WITH_SPECS:
        return None
    bucket = _filled(specs, [[tensor] for tensor in tensors])
    return copied_bytes(_packed(bucket)) if bucket else b""


def unpack(data: bytes, specs: Sequence[TensorSpec], tensors: Sequence[Sequence[Tensor]]) -> None:
    """Fill tensors from the result of `pack` on the source; see `broadcast`."""
    if bucket := _filled(specs, tensors):
        _unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8), bucket)


def _filled(specs: Sequence[TensorSpec], tensors: Sequence[Sequence[Tensor]]) -> Bucket:
    return [(spec, pieces) for spec, pieces in zip(specs, tensors, strict=True) if spec.nbytes]


def _buckets(specs: Sequence[TensorSpec], device: str) -> Iterator[list[int]]:
    bucket: list[int] = []
    filled = 0
    for index, spec in enumerate(specs):
        size = spec.nbytes
        if spec.device != device or size == 0:
            continue
        if size >= _LARGE:
            yield [index]
            continue
        if filled + size > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(index)
        filled += _aligned(size)
    if bucket:
        yield bucket


def _broadcast_bucket(bucket: Bucket, source: int, group: dist.ProcessGroup) -> None:
    spec, tensors = bucket[0]
    if len(bucket) == 1 and (memory := _memory(tensors[0], spec)) is not None:
        broadcast_flat(memory, source, group)
        if dist.get_rank(group) != source:
            torch.autograd.graph.increment_version(tensors[0])  # autograd does not notice a broadcast
            _copy_to_others(tensors)
        return
    if dist.get_rank(group) == source:
        broadcast_flat(_packed(bucket), source, group)
        return
    packed = torch.empty(_size(bucket), dtype=torch.uint8, device=tensors[0].device)
    broadcast_flat(packed, source, group)
    _unpack(packed, bucket)


def _size(bucket: Bucket) -> int:
    # A single tensor is sent without padding, since other ranks may receive it directly in its own memory.
    return sum(_aligned(spec.nbytes) for spec, _ in bucket[:-1]) + bucket[-1][0].nbytes


def _packed(bucket: Bucket) -> Tensor:
    packed = torch.empty(_size(bucket), dtype=torch.uint8, device=bucket[0][1][0].device)
    for (spec, tensors), piece in zip(bucket, _pieces(packed, bucket), strict=True):
        view = storage_view(tensors[0], spec)
        piece.view(spec.dtype).view(view.shape).copy_(view)
    return packed


def _unpack(packed: Tensor, bucket: Bucket) -> None:
    for (spec, tensors), piece in zip(bucket, _pieces(packed, bucket), strict=True):
        # If only the source's elements share memory, copying repeats them.
        storage_view(tensors[0], spec).copy_(piece.view(spec.dtype).view(spec.storage_shape))
        _copy_to_others(tensors)


def _pieces(packed: Tensor, bucket: Bucket) -> Iterator[Tensor]:
    start = 0
    for spec, _ in bucket:
        yield packed[start : start + spec.nbytes]
        start += _aligned(spec.nbytes)


def _memory(tensor: Tensor, spec: TensorSpec) -> Tensor | None:
    """Return a view of the bytes of `tensor`; `None` if it is small, or its memory order is not the one to send."""
    view = storage_view(tensor, spec)
    alike = view.shape == spec.storage_shape and view.is_contiguous() and not view.is_conj() and not view.is_neg()
    return view.view(-1).view(torch.uint8) if spec.nbytes >= _LARGE and alike else None


def _copy_to_others(tensors: Sequence[Tensor]) -> None:
    for other in tensors[1:]:
        other.copy_(tensors[0])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def carrier(kind: str, group: dist.ProcessGroup) -> torch.device | None:
    """Return the device through which the group sends tensors of type `kind`; `None` if it sends them directly.

    A job with NCCL alone sends no CPU tensors. A gloo group for these would have to be made late, which fails on
    clusters whose host names resolve to loopback addresses.
    """
    served = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    if kind in served:
        return None
    own = device_of(group)
    return own if own.type in served else torch.device(served[0])


def broadcast_flat(flat: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill a one-dimensional tensor with the source's, which has the same dtype and size."""
    place = carrier(flat.device.type, group)
    if place is None:
        dist.broadcast(flat, group_src=source, group=group)
        return
    for piece in torch.split(flat, BUCKET_BYTES):
        carried = piece.to(place)
        dist.broadcast(carried, group_src=source, group=group)
        if dist.get_rank(group) != source:
            piece.copy_(carried)


def collect(
    data: Tensor | None, sizes: Sequence[int], group: dist.ProcessGroup | None, to: int | None = None
) -> list[bytes]:
    """Return each rank's packed bytes, of these sizes; empty on a rank that does not receive them."""
    found = [bytearray() for _ in sizes]
    for rank, _, piece in exchange(data, 1, sizes, group, to):
        found[rank] += copied_bytes(piece.cpu().contiguous())
    return [bytes(each) for each in found]


def exchange(
    data: Tensor | None,
    width: int,
    counts: Sequence[int],
    group: dist.ProcessGroup | None,
    to: int | None,
    device: torch.device | None = None,
) -> Iterator[tuple[int, int, Tensor]]:
    """Send rows of bytes to one rank, or to all; all ranks iterate to the end.

    Args:
        data: This rank's rows, of shape (rows, `width`); `None` if it has none.
        width: The number of bytes in a row.
        counts: Each rank's number of rows.
        group: The process group.
        to: The rank that receives them; `None`: all do.
        device: The device of the rows, by default the CPU.

    Yields:
        A rank, the number of its first row in the piece, and the rows; nothing on a rank that does not receive them.
    """
    device = device or torch.device("cpu")
    if data is None:
        data = torch.empty((0, width), dtype=torch.uint8, device=device)
    if width == 0 or max(counts) == 0:
        return
    if len(counts) == 1:
        yield 0, 0, data
        return
    place = carrier(device.type, group or cast(dist.ProcessGroup, dist.group.WORLD)) or device
    at_once = max(1, BUCKET_BYTES // (width * len(counts)))
    for first in range(0, max(counts), at_once):
        own = data[first : first + at_once]
        sent = torch.zeros((min(at_once, max(counts) - first), width), dtype=torch.uint8, device=place)
        sent[: len(own)] = own
        receives = to is None or to == dist.get_rank(group)
        got = [torch.empty_like(sent) for _ in counts] if receives else None
        if to is None:
            dist.all_gather(got, sent, group=group)
        else:
            dist.gather(sent, got, group=group, group_dst=to)
        for rank, rows in enumerate(got or ()):
            if counts[rank] > first:
                yield rank, first, rows[: counts[rank] - first]
