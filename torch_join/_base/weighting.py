"""The weight of each active rank's gradient, and the count of its batch."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from torch_join._base.errors import JoinError, JoinValueError, UnsupportedError

Count: TypeAlias = Callable[[Any], float]  # called with a batch
_Name = Literal["world", "active", "samples"]
Weighting: TypeAlias = _Name | Count
# The default in signatures. A separate object, because an explicit "world" may contradict torch's argument.
WORLD: Any = str(b"world", "ascii")


_MOST = 2.0**512  # so that no sum of counts is infinite


class Window(list[Any]):
    """The micro-batches of one step, as `windows` makes them."""


def resolve_weighting(
    weighting: str | Count | None = WORLD, divide_by_initial_world_size: bool | None = None
) -> Weighting:
    """Check the weighting and reconcile it with torch's argument for it.

    Args:
        weighting: `"world"` (the default) divides the sum of the active ranks' gradients by the
            world size, `"active"` by the number of active ranks, `"samples"` weighs each gradient
            by its rank's number of samples, as one process training on the union would. A function
            that takes a batch from the loader and returns its count (of tokens, say)
            weighs each gradient by that.
        divide_by_initial_world_size: torch's argument: `True` is `"world"`, `False` is `"active"`.

    Returns:
        The weighting.

    Raises:
        JoinValueError: The weighting is unknown, or the two arguments contradict each other.
    """
    weighting = WORLD if weighting is None else weighting
    is_given = weighting is not WORLD
    if is_given and not callable(weighting) and weighting not in get_args(_Name):
        raise JoinValueError(
            f"weighting={weighting!r} is unknown. Use one of {', '.join(map(repr, get_args(_Name)))}, or a function"
            " that takes a batch and returns its weight."
        )
    if divide_by_initial_world_size is None:
        return weighting if is_given else "world"  # type: ignore[return-value]
    same: Weighting = "world" if divide_by_initial_world_size else "active"
    if is_given and weighting != same:
        raise JoinValueError(
            f"{name_of(weighting)} contradicts divide_by_initial_world_size={divide_by_initial_world_size},"
            f" which means weighting={same!r}. Pass `weighting` alone."
        )
    return same


def name_of(weighting: str | Count) -> str:
    """Return a weighting's name in errors."""
    return f"weighting={getattr(weighting, '__qualname__', weighting) if callable(weighting) else repr(weighting)}"


def loss_factor(weighting: Weighting, world_size: int, active: int, count: float, total: float) -> float:
    """Return the factor for a rank's mean loss, given that DDP divides the sum of gradients by the world size.

    Args:
        weighting: See `resolve_weighting`.
        world_size: Number of ranks.
        active: Number of ranks that have a batch at this step.
        count: The count of this rank's batch.
        total: The sum of all ranks' counts at this step.

    Returns:
        The factor; 1.0 if there is nothing to do.
    """
    if weighting == "active":
        return world_size / active
    if weighting == "world":
        return 1.0
    return factor_of_count(world_size, count, total)


def factor_of_count(world_size: int, count: float, total: float) -> float:
    """Return the factor for a mean loss over `count` items that turns DDP's average into the mean over all items.

    Args:
        world_size: Number of ranks, by which DDP divides.
        count: The number of items in this rank's mean loss.
        total: The number of items on all ranks.

    Returns:
        The factor; 0.0 if no rank has any items.
    """
    return world_size * count / total if total else 0.0


def weighted(gradient: Tensor, factor: float) -> Tensor:
    """Return a gradient times the factor. A factor of 0 gives zeros, even where a mean over no items is NaN."""
    return gradient * factor if factor else torch.zeros_like(gradient)


def finite(gradient: Tensor) -> Tensor:
    """Replace NaN and infinities by zeros in the gradient of a loss that counts 0."""
    return torch.nan_to_num(gradient, 0.0, 0.0, 0.0)


def counter(weighting: Weighting, rank: int, count_samples: Callable[[Any], int]) -> Count | None:
    """Return the function that counts a batch; `None` if nothing is counted.

    Args:
        weighting: See `resolve_weighting`.
        rank: This rank's name in errors.
        count_samples: Returns a batch's number of samples.
    """
    if not callable(weighting):
        if weighting != "samples":
            return None
        return lambda batch: sum(map(count_samples, batch if isinstance(batch, Window) else [batch]))
    count, name = weighting, name_of(weighting)

    def checked(batch: Any) -> float:
        try:
            counted = count(batch)
        except StopIteration as error:  # it would end a loop silently
            raise JoinError(f"{name} raised StopIteration.") from error
        try:
            # An object that is no number may still have `__float__`; a tensor's may raise.
            number = float(counted) if hasattr(type(counted), "__float__") else math.nan
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
        if not 0 <= number <= _MOST:
            raise JoinValueError(
                f"{name} returned {str(counted)[:80]} (of type {type(counted).__name__}) for a batch of rank {rank}. It"
                " must return the number of items in the batch: a finite number, 0 or more."
            )
        return number

    return checked


def check_sees_batches(weighting: Weighting) -> None:
    """Raise for a weighting by a function of the batch if only the arguments of a forward are known.

    Raises:
        UnsupportedError: The weighting is a function.
    """
    if callable(weighting):
        raise UnsupportedError(
            f"{name_of(weighting)} needs to see the batches, which Join cannot see in a plain `for` or under torch's"
            " own Join. Use torch_join.Join, and loop with `for batch in join.batches(loader)`."
        )


def count_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in `batch`.

    Raises:
        JoinValueError: There is no such tensor.
    """
    first = _first_tensor(batch)
    if first is None:
        raise JoinValueError(
            "weighting='samples' takes a batch's size from the first dimension of its first tensor, but a batch of type"
            f" {type(batch).__name__} has no tensor. Use another weighting, or put a tensor in the batch."
        )
    return len(first)


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch if batch.ndim > 0 else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
