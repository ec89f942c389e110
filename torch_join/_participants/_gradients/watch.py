"""Watches a model's gradients before they are accumulated, with prehooks on the nodes that accumulate them.

Contract: Objects here keep the callback only between `begin` and `end`.
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
    """Watches the gradients of parameters, between `begin` and `end`.

    Args:
        parameters: The model's parameters.

    Attributes:
        is_on: Whether it is watching.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._removers: list[Callable[[], None]] = []
        self._nodes: list[Any] = []
        self.is_on = False

    def begin(self, before: Callable[[int, Gradients], Gradients | None]) -> None:
        """Start to watch all parameters, since parameters frozen now may be trained after their forward.

        Args:
            before: Called with a parameter's place and the gradients about to be added; returns replacements, or
                `None`.
        """
        if self.is_on:
            return
        self.is_on = True
        for place, parameter in enumerate(self._parameters):
            with setting(parameter, requires_grad=True):
                node = get_gradient_edge(parameter).node
                hook, end = noticed(parameter, partial(before, place))
            self._removers += [node.register_prehook(hook).remove, end]
            self._nodes.append(node)

    def end(self) -> None:
        """Stop watching."""
        self.is_on = False
        while self._removers:
            self._removers.pop()()
        self._nodes.clear()

    @property
    def will_run(self) -> bool:
        """Whether the current backward will add to the gradient of any parameter."""
        return any(map(_compat.will_run, self._nodes))


@contextmanager
def leaving_out(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Wrap the backward of a loss that counts 0: its gradients may be infinite, and 0 times infinity is NaN."""
    watch = Watch(parameters)
    watch.begin(lambda _, gradients: tuple(None if g is None else finite(g) for g in gradients))
    try:
        yield
    finally:
        watch.end()
