"""A cheap digest of captured state: by value, whatever the memory layout and the device."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_join._raw import raw_bytes
from torch_join._state import Keep, Nested, Pickled, Slot

_COLUMNS = 4096
_WORD = 8  # bytes


def digest(trees: Sequence[Any], tensors: Sequence[Tensor]) -> int:
    """Return a number from 0 to 2**63 - 1 for canonical trees and the tensors in their slots."""
    sums = checksums(tensors)
    described = [f"{tensor.dtype}{tuple(tensor.shape)}:{value};" for tensor, value in zip(tensors, sums, strict=True)]
    hashed = hashlib.blake2b(digest_size=_WORD)
    for tree in trees:
        _feed(hashed, tree, described)
    return int.from_bytes(hashed.digest(), "big") >> 1


def _feed(hashed: Any, tree: Any, tensors: Sequence[str]) -> None:
    if isinstance(tree, Slot):
        hashed.update(tensors[tree.index].encode())
    elif isinstance(tree, dict):
        hashed.update(f"dict{len(tree)};".encode())
        for key in sorted(tree, key=repr):  # equal dictionaries may have been filled in another order
            hashed.update(f"{key!r}:".encode())
            _feed(hashed, tree[key], tensors)
    elif isinstance(tree, (list, tuple)):
        hashed.update(f"{type(tree).__name__}{len(tree)};".encode())
        for item in tree:
            _feed(hashed, item, tensors)
    elif isinstance(tree, Nested):
        _feed(hashed, tree.tree, tensors)
    elif isinstance(tree, Pickled):
        hashed.update(tree.data)
        _feed(hashed, [Slot(index) for index in tree.slots], tensors)
    else:
        hashed.update(f"{tree.kind if isinstance(tree, Keep) else repr(tree)};".encode())


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for each tensor, by its bytes."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        by_device[tensor.device].append(index)
    sums = [0] * len(tensors)
    for device, indices in by_device.items():
        weights = _weights(device)
        # One transfer for each device, not one for each tensor.
        values = torch.stack([_weighted_sum(tensors[index], weights) for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            sums[index] = value
    return sums


def _weighted_sum(tensor: Tensor, weights: Tensor) -> Tensor:
    """Sum the tensor's bytes as 64-bit words, each column of a long one with a weight of its own."""
    data = raw_bytes(tensor)
    if data.storage_offset() % _WORD:
        data = data.clone()
    whole = data.numel() // _WORD
    words = data[: whole * _WORD].view(torch.int64)
    tail = torch.zeros(_WORD, dtype=torch.uint8, device=data.device)
    tail[: data.numel() - whole * _WORD] = data[whole * _WORD :]
    rows = whole // _COLUMNS
    columns = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)
    rest = torch.cat([words[rows * _COLUMNS :], tail.view(torch.int64)])
    return (columns * weights[:_COLUMNS]).sum() + (rest * weights[_COLUMNS : _COLUMNS + rest.numel()]).sum()


def _weights(device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, so that neither order nor small opposite changes cancel."""
    weights = torch.arange(1, 2 * _COLUMNS + 1, device=device) * 0x1E3779B97F4A7C15
    weights = (weights ^ (weights >> 30)) * 0x3F58476D1CE4E5B9
    return (weights ^ (weights >> 27)) | 1
