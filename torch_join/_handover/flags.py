"""What is trained and what is in training mode, and what a rank's own code changes of it after it has left a loop.

A rank that leaves a loop by `break` goes on with the code behind it (`model.eval()`, say), and takes the last rank's
state only where the ranks meet next. What its code has set in between must stay.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class Flags:
    """The flags of the modules and parameters among some objects, and what this rank's own code has set of them.

    Args:
        objects: Any objects.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._before = _read(objects)
        self._set: dict[nn.Module | Tensor, bool] = {}

    def note(self) -> None:
        """Note what is set otherwise now than when this was made, or than after the last `set_again`."""
        self._set |= {one: flag for one, flag in _read(self._objects).items() if self._before.get(one, flag) != flag}

    def set_again(self) -> None:
        """Set what has been noted so far."""
        for one, flag in self._set.items():
            if isinstance(one, nn.Module):
                one.training = flag
            else:
                one.requires_grad_(flag)
        self._before = _read(self._objects)


def _read(objects: Sequence[Any]) -> dict[nn.Module | Tensor, bool]:
    modules = [module for thing in objects if isinstance(thing, nn.Module) for module in thing.modules()]
    return {m: m.training for m in modules} | {p: p.requires_grad for m in modules for p in m.parameters(recurse=False)}
