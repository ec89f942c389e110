"""Hears of a model's gradients before they come: by prehooks on the nodes that add to them.

Contract: between `begin` and `end` alone does anything here refer to who hears.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torch_join._base.attributes import setting
from torch_join._base.weighting import finite
from torch_join._compat import ddp as _compat
from torch_join._shadow.lost_hooks import noticed

Gradients = tuple[Tensor | None, ...]


class Watch:
    """Watches the gradients of parameters, once begun.

    Args:
        parameters: The model's.

    Attributes:
        is_on: Whether it has begun, and not ended.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._ends: list[Callable[[], None]] = []
        self._nodes: list[Any] = []
        self.is_on = False

    def begin(self, before: Callable[[int, Gradients], Gradients | None]) -> None:
        """Watch them all: what is frozen now may be trained after its forward.

        Args:
            before: Called with a parameter's place and what is about to be added to its gradient; returns what is to be
                added in place of that, or `None`.
        """
        if self.is_on:
            return
        self.is_on = True
        for place, parameter in enumerate(self._parameters):
            with setting(parameter, requires_grad=True):
                node = get_gradient_edge(parameter).node
                hook, end = noticed(parameter, partial(before, place))
            self._ends += [node.register_prehook(hook).remove, end]
            self._nodes.append(node)

    def end(self) -> None:
        """Watch nothing any more."""
        self.is_on = False
        while self._ends:
            self._ends.pop()()
        self._nodes.clear()

    @property
    def will_run(self) -> bool:
        """Whether the backward that is under way will add to any of them."""
        return any(map(_compat.will_run, self._nodes))


@contextmanager
def leaving_out(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Put around the backward of a loss that counts 0, of these: its gradients may be infinite, and times 0 NaN."""
    watch = Watch(parameters)
    watch.begin(lambda _, gradients: tuple(None if g is None else finite(g) for g in gradients))
    try:
        yield
    finally:
        watch.end()
