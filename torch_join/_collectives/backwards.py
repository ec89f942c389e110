"""Collectives in backward: who has to know of one before it is issued, and how it is weighted."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.errors import UnsupportedError


class Backwards(Protocol):
    """What a `CollectiveTap` tells of collectives in backward, and asks.

    Attributes:
        in_pieces: Whether there may be some besides DistributedDataParallel's: an autograd function has had one in
            forward. Once true it stays so.
    """

    in_pieces: bool

    def before_collective(self, group: list[int], ddps: bool) -> None:
        """Hear of a collective in backward; what this raises, the collective raises.

        Args:
            group: The global ranks of its process group.
            ddps: Whether it is DistributedDataParallel's.
        """

    @property
    def factor(self) -> float:
        """What the gradients of the backward that is under way are multiplied with where they reach the parameters."""


def late(operation: str) -> UnsupportedError:
    """Return the error of a collective that comes in a backward which was announced as a whole."""
    return UnsupportedError(
        f"{operation} in backward, after a forward in which no autograd function had a collective, while some ranks"
        " have joined: those have gone through the whole backward already. Set backward_collectives=True (of Join, or"
        " of the strategy), so that they follow every backward piece by piece; or use a collective on detached tensors"
        " in the forward pass."
    )


def issue_weighted(issue: Callable[..., Any], args: dict[str, Any], factor: float) -> Any:
    """Issue a collective of gradients that are multiplied by a factor of this rank's own only later.

    What a rank sends is, on another rank, a part of gradients that are multiplied with the other one's factor. So it
    is multiplied here, with this rank's own, and what is received is divided by that.

    Args:
        issue: Issues it.
        args: The arguments of its operator.
        factor: The factor, not zero.
    """
    sends = [name for name in args if name.startswith("input") and "split" not in name]
    receives = [name for name in args if name.startswith("output") and "split" not in name]
    if not sends and not receives:
        sends = receives = [name for name in args if name.startswith("tensor")]
    elif not sends:
        sends = [name for name in args if name.startswith("tensor")]
    with torch.no_grad():
        if sends == receives:
            for tensor in _floating([args[name] for name in sends]):
                tensor.mul_(factor)
        else:
            args = {name: _multiplied(value, factor) if name in sends else value for name, value in args.items()}
        result = issue(*args.values())
        dist.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
        for tensor in _floating([args[name] for name in receives]):
            tensor.div_(factor)
    return result


def _multiplied(value: Any, factor: float) -> Any:
    if isinstance(value, Tensor):
        return value * factor if _is_floating(value) else value
    return [_multiplied(each, factor) for each in value]


def _floating(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if not isinstance(value, Tensor):
            yield from _floating(value)
        elif _is_floating(value):
            yield value


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
