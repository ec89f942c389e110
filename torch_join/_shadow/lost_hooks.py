"""Detects parameter hooks that older torch loses, so that training does not continue as if they had been called."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from torch_join._base.errors import UnsupportedError


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, gradients[0] * x


@functools.cache
def are_lost() -> bool:
    """Whether torch loses a parameter's hooks when a checkpoint reruns an autograd function that saved it."""
    seen: list[bool] = []
    with torch.inference_mode(False), torch.enable_grad():
        x, weight = (torch.ones(1, device="cpu", requires_grad=True) for _ in range(2))
        weight.register_hook(lambda _: seen.append(True))  # type: ignore[no-untyped-call]
        checkpoint(lambda x: _Scaled.apply(x, weight), x, use_reentrant=False).backward()  # type: ignore[no-untyped-call]
    return not seen


def noticed(
    parameter: Tensor, hook: Callable[..., Any], matters: Callable[[], bool] = lambda: True
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Return a hook that runs before a parameter's gradient, and a function that ends the watch over it.

    Args:
        parameter: The parameter.
        hook: Called by the returned hook. If torch loses that, the backward raises `UnsupportedError`.
        matters: Whether the hook would change anything.
    """
    if not are_lost():
        return hook, lambda: None
    runs: list[bool] = []

    def noting(*args: Any) -> Any:
        runs.append(True)
        return hook(*args)

    def added(*_: Any) -> None:
        if not runs and matters():
            raise UnsupportedError(
                f"torch {torch.__version__} lost the hooks with which Join weights and tracks a gradient, because a"
                " checkpoint reran an autograd function that saves the parameter, such as SyncBatchNorm. Use a newer"
                " torch, checkpoint(..., use_reentrant=True), or no checkpoint there."
            )
        runs.clear()

    return noting, get_gradient_edge(parameter).node.register_hook(added).remove
