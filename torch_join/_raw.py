"""The bytes of a tensor."""

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in order, as bytes: its own memory where they lie in it so, else a copy."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element counts as contiguous whatever its stride, but its bytes cannot be viewed then.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
