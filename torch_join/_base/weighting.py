"""How much the gradient of each active rank counts, and how many samples a batch has."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor

from torch_join._base.errors import JoinValueError

Weighting = Literal["world", "active", "samples"]


def resolve_weighting(weighting: str | None = None, divide_by_initial_world_size: bool | None = None) -> Weighting:
    """Check the weighting and reconcile it with torch's name for the same thing.

    Args:
        weighting: `"world"` (the default) divides the sum of the active ranks' gradients by the
            world size, `"active"` by the number of active ranks, `"samples"` weighs each gradient
            by its rank's number of samples, as one process training on the union would.
        divide_by_initial_world_size: torch's argument: `True` is `"world"`, `False` is `"active"`.

    Returns:
        The weighting.

    Raises:
        JoinValueError: The weighting is unknown, or the two arguments contradict each other.

    """
    if weighting is not None and weighting not in get_args(Weighting):
        raise JoinValueError(
            f"weighting={weighting!r} is unknown. Use one of {', '.join(map(repr, get_args(Weighting)))}."
        )
    if divide_by_initial_world_size is None:
        return weighting or "world"  # type: ignore[return-value]
    same: Weighting = "world" if divide_by_initial_world_size else "active"
    if weighting is not None and weighting != same:
        raise JoinValueError(
            f"weighting={weighting!r} contradicts divide_by_initial_world_size={divide_by_initial_world_size},"
            f" which means weighting={same!r}. Pass `weighting` alone."
        )
    return same


def loss_factor(weighting: Weighting, world_size: int, active: int, samples: int, total_samples: int) -> float:
    """Return what to multiply a rank's mean loss with, as DDP divides the sum of gradients by the world size.

    Args:
        weighting: See `resolve_weighting`.
        world_size: Number of ranks.
        active: Number of ranks that have a batch at this step.
        samples: Number of samples in this rank's batch.
        total_samples: Number of samples in all ranks' batches at this step.

    Returns:
        The factor; 1.0 where nothing is to be done.

    """
    if weighting == "active":
        return world_size / active
    if weighting == "samples":
        return world_size * samples / total_samples if total_samples else 1.0
    return 1.0


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
