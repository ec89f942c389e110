"""The bytes of a tensor."""

import torch
from torch import Tensor


def flat_elements(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in order, in one dimension: a view of it where they lie in memory so."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element counts as contiguous whatever its stride, but its bytes cannot be viewed then.
    return dense.as_strided((dense.numel(),), (1,))


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in order, as bytes: its own memory where they lie in it so, else a copy."""
    return flat_elements(tensor).view(torch.uint8)


def raw_words(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` in order as the longest integers that they can be viewed as: fewer to go through."""
    data = raw_bytes(tensor)
    for word in (torch.int64, torch.int32, torch.int16):
        if data.numel() % word.itemsize == 0 and data.storage_offset() % word.itemsize == 0:
            return data.view(word)
    return data
