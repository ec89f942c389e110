"""How many samples a batch has, for `weighting="samples"`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torch_join._base.errors import JoinValueError


def count_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in `batch`.

    Raises:
        JoinValueError: There is none.
    """
    first = _first_tensor(batch)
    if first is None:
        raise JoinValueError(
            f"weighting='samples' takes a batch's size from the first dimension of its first tensor, and a batch of"
            f" type {type(batch).__name__} has none. Use another weighting, or put a tensor in the batch."
        )
    return len(first)


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch if batch.ndim > 0 else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
