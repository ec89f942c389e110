"""A scalar zero whose backward reaches parameters but gives them no gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _ZeroGradient(torch.autograd.Function):
    """A scalar zero that depends on all parameters and whose gradients are undefined."""

    @staticmethod
    def forward(ctx: Any, sparse: Sequence[bool], before: Tensor | None, *parameters: Tensor) -> Tensor:
        # DDP insists on a defined gradient only where it expects a sparse one.
        ctx.gradients = [empty_sparse(p) if s else None for p, s in zip(parameters, sparse, strict=True)]
        ctx.goes_on = before is not None
        # Real, so that backward can start there.
        return torch.zeros((), dtype=parameters[0].dtype.to_real(), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0] if ctx.goes_on else None, *ctx.gradients


def zero_gradient(parameters: Sequence[Tensor], sparse: Sequence[bool], before: Tensor | None) -> Tensor:
    """Return a scalar zero whose backward gives each of `parameters` an undefined gradient.

    Args:
        parameters: The parameters.
        sparse: For which of them DDP expects a sparse gradient.
        before: Another such zero, whose parameters get their gradients after these.
    """
    zero: Tensor = _ZeroGradient.apply(sparse, before, *parameters)  # type: ignore[no-untyped-call]
    return zero


class _Following(torch.autograd.Function):
    """A scalar zero in whose backward a joined rank follows the active ranks' backward."""

    @staticmethod
    def forward(ctx: Any, follow: Callable[[], Any], seed: Tensor) -> Tensor:
        ctx.follow = follow
        return torch.zeros_like(seed)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        ctx.follow()
        return None, None


def following_zero(follow: Callable[[], Any], device: torch.device) -> Tensor:
    """Return a scalar zero whose backward calls `follow`."""
    zero: Tensor = _Following.apply(follow, torch.zeros((), device=device, requires_grad=True))  # type: ignore[no-untyped-call]
    return zero


class _OwnFirst(torch.autograd.Function):
    """A loss joined to a zero that it does not depend on: its own backward runs first, and then that of the zero."""

    @staticmethod
    def forward(ctx: Any, own: list[Tensor], between: Callable[[], None], zero: Tensor) -> Tensor:
        ctx.own, ctx.between, ctx.zero = own, between, torch.zeros_like(zero)
        return own[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        torch.autograd.backward(ctx.own[0], gradient)
        ctx.between()
        return None, None, ctx.zero


def own_first(loss: Tensor, between: Callable[[], None], zero: Tensor) -> Tensor:
    """Return `loss` with a backward that runs the loss's own backward, calls `between`, and runs that of `zero`."""
    found: Tensor = _OwnFirst.apply([loss], between, zero)  # type: ignore[no-untyped-call]
    return found


def broadcast_gradient(parameter: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Copy the gradient of rank `source` to all ranks of `group`; a sparse one is sent as a dense one."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    is_sparse = gradient.is_sparse
    dense = gradient.to_dense() if is_sparse else gradient
    dist.broadcast(dense, group_src=source, group=group)
    parameter.grad = dense.to_sparse(1) if is_sparse else dense


def empty_sparse(parameter: Tensor) -> Tensor:
    """Return an empty gradient in the form of an embedding's sparse gradient."""
    # An embedding's gradient has one sparse dimension, its rows; each row is dense.
    rows = parameter.new_zeros((1, 0), dtype=torch.long)
    values = parameter.new_zeros((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(rows, values, parameter.shape)
