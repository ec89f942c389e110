"""How much the gradient of each active rank counts, and what its batch counts."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from torch_join._base.errors import JoinError, JoinValueError, UnsupportedError

Count: TypeAlias = Callable[[Any], float]  # gets a batch
_Name = Literal["world", "active", "samples"]
Weighting: TypeAlias = _Name | Count
# What signatures have for a default. It is an object of its own: a "world" that is given may contradict torch's name.
WORLD: Any = str(b"world", "ascii")


_MOST = 2.0**512  # so that no sum of counts is infinite


class Window(list[Any]):
    """The micro-batches of one step, as `windows` makes them."""


def resolve_weighting(
    weighting: str | Count | None = WORLD, divide_by_initial_world_size: bool | None = None
) -> Weighting:
    """Check the weighting and reconcile it with torch's name for the same thing.

    Args:
        weighting: `"world"` (the default) divides the sum of the active ranks' gradients by the
            world size, `"active"` by the number of active ranks, `"samples"` weighs each gradient
            by its rank's number of samples, as one process training on the union would. A function
            that gets a batch, as the loader yields it, and returns what it counts (its tokens, say)
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
            " that gets a batch and returns what it counts."
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
    """Return what errors call a weighting."""
    return f"weighting={getattr(weighting, '__qualname__', weighting) if callable(weighting) else repr(weighting)}"


def loss_factor(weighting: Weighting, world_size: int, active: int, count: float, total: float) -> float:
    """Return what to multiply a rank's mean loss with, as DDP divides the sum of gradients by the world size.

    Args:
        weighting: See `resolve_weighting`.
        world_size: Number of ranks.
        active: Number of ranks that have a batch at this step.
        count: What this rank's batch counts.
        total: What all ranks' batches at this step count together.

    Returns:
        The factor; 1.0 where nothing is to be done.
    """
    if weighting == "active":
        return world_size / active
    if weighting == "world":
        return 1.0
    return factor_of_count(world_size, count, total)


def factor_of_count(world_size: int, count: float, total: float) -> float:
    """Return what to multiply the mean loss over `count` items with, so that DDP's average is that over all `total`.

    Args:
        world_size: Number of ranks, by which DDP divides.
        count: How many items this rank has, of whatever a loss is the mean over.
        total: How many all ranks have together.

    Returns:
        The factor; 0.0 where no rank has any.
    """
    return world_size * count / total if total else 0.0


def weighted(gradient: Tensor, factor: float) -> Tensor:
    """Return a gradient times the factor; zeros for 0, also where the mean over nothing has made it NaN."""
    return gradient * factor if factor else torch.zeros_like(gradient)


def finite(gradient: Tensor) -> Tensor:
    """Return a gradient of a loss that counts 0, in which only what is not finite is the loss's own: without that."""
    return torch.nan_to_num(gradient, 0.0, 0.0, 0.0)


def counter(weighting: Weighting, rank: int, count_samples: Callable[[Any], int]) -> Count | None:
    """Return what counts a batch; `None` where nothing is counted.

    Args:
        weighting: See `resolve_weighting`.
        rank: What errors call this rank.
        count_samples: Returns a batch's number of samples.
    """
    if not callable(weighting):
        return None if weighting != "samples" else lambda batch: _samples_of(batch, count_samples)
    count, name = weighting, name_of(weighting)

    def checked(batch: Any) -> float:
        try:
            counted = count(batch)
        except StopIteration as error:  # which would end a loop without a word
            raise JoinError(f"{name} raised StopIteration.") from error
        try:
            # What has no number for a type may still have a method that makes one of it: a tensor's raises.
            number = float(counted) if hasattr(type(counted), "__float__") else math.nan
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
        if not 0 <= number <= _MOST:
            raise JoinValueError(
                f"{name} returned {str(counted)[:80]} (of type {type(counted).__name__}) for a batch of rank {rank}. It"
                " must return how many items the batch counts: a finite number, 0 or more."
            )
        return number

    return checked


def _samples_of(batch: Any, count_samples: Callable[[Any], int]) -> int:
    return sum(map(count_samples, batch)) if isinstance(batch, Window) else count_samples(batch)


def check_sees_batches(weighting: Weighting) -> None:
    """Raise for a weighting by a function of the batch where nothing but the arguments of a forward is seen.

    Raises:
        UnsupportedError: It is one.
    """
    if callable(weighting):
        raise UnsupportedError(
            f"{name_of(weighting)} counts batches, which a plain `for` and torch's own Join do not show. Use"
            " torch_join.Join, and `for batch in join.batches(loader)`."
        )


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
