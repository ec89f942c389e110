"""Whether the ranks' optimizers still have the same hyperparameters.

A rank that has joined does not run the user's code, and does not see what the others gather after that. If
it then decides something (a learning rate, from a metric of a loop that was uneven), it decides otherwise, and
from the next step on the replicas drift apart. So all compare, where they meet anyway.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_join._errors import JoinError

Hyperparameters = list[tuple[str, str]]


def hyperparameters(objects: Sequence[Any]) -> Hyperparameters:
    """Return the name and value of each, of all optimizers among `objects`."""
    return [
        (f"{name} of {type(thing).__name__}", repr(value.tolist() if isinstance(value, Tensor) else value))
        for thing in objects
        for group in getattr(thing, "param_groups", ())
        for name, value in group.items()
        if isinstance(value, (bool, int, float, tuple, str)) or (isinstance(value, Tensor) and value.ndim == 0)
    ]


def compare(everyone: Sequence[Hyperparameters]) -> None:
    """Compare what the ranks have.

    Raises:
        JoinError: Some differ.
    """
    for values in zip(*everyone, strict=False):
        if any(value != values[0] for value in values):
            said = ", ".join(f"{value} on rank {rank}" for rank, (_, value) in enumerate(values))
            raise JoinError(
                f"The ranks' optimizers differ: {values[0][0]} is {said}. A rank has decided something (an LR scheduler"
                " on a metric, for example) from a value that the others do not have: ranks that run out of inputs do"
                " not see what others gather after that. Decide from a value that was reduced after the loop, or"
                " on one rank that broadcasts it."
            )
