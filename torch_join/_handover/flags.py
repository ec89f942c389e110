"""What is trained and what is in training mode, and what a rank's own code changes of it after it has left a loop.

A rank that leaves a loop by `break` goes on with the code behind it (`model.eval()`, say), and takes the last rank's
state only where the ranks meet next. What its code has set in between must stay.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class Flags:
    """The flags of the modules among some objects, at one moment.

    Args:
        objects: Any objects.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._training, self._trained = _read(objects)

    def changed_since(self) -> "Changes":
        """Return what is set otherwise now."""
        training, trained = _read(self._objects)
        return Changes(
            [(m, flag) for m, flag in training.items() if self._training.get(m, flag) != flag],
            [(p, flag) for p, flag in trained.items() if self._trained.get(p, flag) != flag],
        )


class Changes:
    """Flags to be set again.

    Args:
        training: Modules, and whether each is in training mode.
        trained: Parameters, and whether each is trained.
    """

    def __init__(self, training: list[tuple[nn.Module, bool]], trained: list[tuple[Tensor, bool]]) -> None:
        self._training = training
        self._trained = trained

    def __add__(self, later: "Changes") -> "Changes":
        return Changes(self._training + later._training, self._trained + later._trained)

    def make(self) -> None:
        """Set them."""
        for module, flag in self._training:
            module.training = flag
        for parameter, flag in self._trained:
            parameter.requires_grad_(flag)


def _read(objects: Sequence[Any]) -> tuple[dict[nn.Module, bool], dict[Tensor, bool]]:
    modules = [module for thing in objects if isinstance(thing, nn.Module) for module in thing.modules()]
    return {m: m.training for m in modules}, {p: p.requires_grad for m in modules for p in m.parameters(recurse=False)}
