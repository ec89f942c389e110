"""A cheap digest of captured state: by value, independent of memory layout and device."""

import ctypes
import hashlib
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from torch_join._base.devices import read
from torch_join._base.pytree import Slot, leaves
from torch_join._base.specs import flat_elements, raw_bytes

_WORD = 8  # bytes
_TILE = 2**17  # words with their own weights, as many as fit into a core's cache; each tile has its own weight too
_TILES = 32  # at once, to keep an accelerator busy
_SMALL, _TOGETHER = 2**17, 32  # the size in bytes, and the number, of tensors that are copied together
_ALIKE = 1.5e-5  # replaces NaN, where all NaN count as equal
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class Digests:
    """Digests of canonical trees and of the current tensors in their slots.

    Nothing waits for a device until `read`.

    Args:
        trees: The trees, by name.
        tensors: The tensors, by slot.
    """

    def __init__(self, trees: Mapping[str, Sequence[Any]], tensors: Sequence[Tensor]) -> None:
        self._trees = trees
        self._specs = [f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in tensors]
        self._sums = unread_checksums(tensors)

    def read(self) -> dict[str, int]:
        """Return a number from 0 to 2**63 - 1 for each name."""
        described = [f"{spec}:{value}" for spec, value in zip(self._specs, _read(self._sums), strict=True)]
        found = {}
        for name, trees in self._trees.items():
            hashed = hashlib.blake2b(digest_size=_WORD)
            # Sorted, since equal dictionaries may have been filled in a different order.
            for path, leaf in sorted((each for tree in trees for each in leaves(tree)), key=itemgetter(0)):
                value = described[leaf.index] if isinstance(leaf, Slot) else repr(leaf)
                hashed.update(f"{path}: {value};".encode())
            found[name] = int.from_bytes(hashed.digest(), "big") >> 1
        return found


def hash_of(data: bytes) -> str:
    """Return a hash of some bytes, which is the same in each process."""
    return hashlib.blake2b(data, digest_size=_WORD).hexdigest()


def checksums(tensors: Sequence[Tensor], exact: bool = True) -> list[int]:
    """Return a checksum of each tensor, which depends on its bytes and their order.

    Args:
        tensors: The tensors.
        exact: Whether every bit counts; otherwise -0.0 equals 0.0, and all NaN are equal.
    """
    return _read(unread_checksums(tensors, exact))


def local_checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a checksum of each tensor for use in this process only: a faster one, of 32 bits, for CPU tensors."""
    # A tensor of a subclass may have no memory to read.
    plain = [type(tensor) is Tensor and tensor.device.type == "cpu" for tensor in tensors]
    others = iter(checksums([tensor for tensor, is_plain in zip(tensors, plain, strict=True) if not is_plain]))
    return [_crc(tensor) if is_plain else next(others) for tensor, is_plain in zip(tensors, plain, strict=True)]


def _crc(tensor: Tensor) -> int:
    data = raw_bytes(tensor)
    return zlib.crc32((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr()))  # numpy may not be installed


def unread_checksums(tensors: Sequence[Tensor], exact: bool = True) -> list[tuple[list[int], Tensor]]:
    """Return the checksums on each device, and the indices of their tensors, without waiting for a device."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        by_device[tensor.device].append(index)
    found = []
    for device, indices in by_device.items():
        largest = max(tensors[index].nbytes for index in indices) // _WORD + 1
        weights = _weights(0, min(_TILE, largest), device)
        scratch = weights.new_empty(min(_tiles(device) * _TILE, largest))
        small = [index for index in indices if tensors[index].nbytes <= _SMALL]
        sums: dict[int, Tensor] = {}
        for some in (small[first : first + _TOGETHER] for first in range(0, len(small), _TOGETHER)):
            sums.update(zip(some, _small_sums([tensors[index] for index in some], weights, exact), strict=True))
        for index in (index for index in indices if index not in sums):
            sums[index] = _weighted_sum(tensors[index], weights, scratch, exact)
        # One transfer for each device, not one for each tensor.
        found.append((list(sums), torch.stack([*sums.values()])))
    return found


def _small_sums(tensors: Sequence[Tensor], weights: Tensor, exact: bool) -> Sequence[Tensor]:
    """Like `_weighted_sum`, for many tensors in few operations: for small tensors, launching takes longest."""
    flat = [_flat(tensor) for tensor in tensors]
    for dtype in () if exact else {part.dtype for part in flat} & _FLOATS:
        places = [place for place, part in enumerate(flat) if part.dtype == dtype]
        alike = _alike(torch.cat([flat[place] for place in places]))
        for place, part in zip(places, torch.split(alike, [flat[place].numel() for place in places]), strict=True):
            flat[place] = part
    words = [_words(part.view(torch.uint8)) for part in flat]
    counts = [each.numel() for each in words]
    weighted = _mixed(torch.cat(words)).mul_(torch.cat([weights[:count] for count in counts]))
    return [part.sum() for part in torch.split(weighted, counts)]


def _read(sums: Sequence[tuple[list[int], Tensor]]) -> list[int]:
    places = [index for indices, _ in sums for index in indices]
    found = [value for part in read([part for _, part in sums]) for value in part]
    values = dict(zip(places, found, strict=True))
    return [values[index] for index in range(len(values))]


def _weighted_sum(tensor: Tensor, weights: Tensor, scratch: Tensor, exact: bool) -> Tensor:
    """Sum the tensor's bytes as 64-bit words, each weighted by its place."""
    flat = _flat(tensor)
    tile = _TILE * _WORD // flat.element_size()
    sums = [flat.new_zeros(0, dtype=torch.int64)]
    for piece in torch.split(flat, tile * _tiles(flat.device)):
        whole = piece.numel() // tile * tile
        sums += [_tile_sums(part, weights, scratch, exact) for part in (piece[:whole], piece[whole:]) if part.numel()]
    together = torch.cat(sums)
    return (_mixed(together) * _weights(_TILE, together.numel(), flat.device)).sum()


def _tiles(device: torch.device) -> int:
    return 1 if device.type == "cpu" else _TILES


def _tile_sums(piece: Tensor, weights: Tensor, scratch: Tensor, exact: bool) -> Tensor:
    if not exact and piece.dtype in _FLOATS:
        piece = _alike(piece)
    words = _words(piece.view(torch.uint8))
    tile = min(words.numel(), _TILE)
    return _mixed(words, scratch[: words.numel()]).view(-1, tile).mul_(weights[:tile]).sum(1)


def _flat(tensor: Tensor) -> Tensor:
    flat = flat_elements(tensor)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _alike(flat: Tensor) -> Tensor:
    return torch.nan_to_num(flat, _ALIKE, torch.inf, -torch.inf).add_(0.0)


def _words(data: Tensor) -> Tensor:
    if data.storage_offset() % _WORD or data.numel() % _WORD:
        padded = torch.zeros(-(-data.numel() // _WORD) * _WORD, dtype=torch.uint8, device=data.device)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int64)


def _mixed(words: Tensor, out: Tensor | None = None) -> Tensor:
    # Otherwise two changes of the highest bit, such as two signs, would cancel with any weights.
    return torch.bitwise_right_shift(words, 32, out=out).bitwise_xor_(words)


@lru_cache(maxsize=8)
def _weights(first: int, count: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, so that neither order nor small opposite changes cancel."""
    weights = torch.arange(first + 1, first + count + 1, device=device) * 0x1E3779B97F4A7C15
    weights = (weights ^ (weights >> 30)) * 0x3F58476D1CE4E5B9
    return (weights ^ (weights >> 27)) | 1
