"""A gather of the active ranks' tensors, through which gradients may flow."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def gather_active(tensor: Tensor, active: Sequence[int], group: Any, sync_grads: bool) -> Tensor:
    """Return the tensors of the active ranks, stacked; all active ranks call this, with the same shape and type.

    Args:
        tensor: This rank's tensor.
        active: The active ranks, as ranks of the group.
        group: The group of all ranks, `None` in a single process.
        sync_grads: Whether each rank's tensor gets the gradients of all ranks' losses, or none.

    Returns:
        Shape `(len(active), *tensor.shape)`, in the order of the ranks.
    """
    if group is None:
        return (tensor if sync_grads else tensor.detach()).unsqueeze(0)
    if sync_grads:
        gathered: Tensor = _Gather.apply(tensor, group)  # type: ignore[no-untyped-call]
    else:
        gathered = _stack_of_all(tensor.detach(), group)
    return gathered if len(active) == len(gathered) else gathered[list(active)]


def join_rows(tensor: Tensor, rows: Sequence[int], gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Return all ranks' rows, concatenated, with a gather that needs tensors of one shape.

    Args:
        tensor: This rank's rows, of shape `(own rows, ...)`; only the first dimension may differ between ranks.
        rows: Each rank's number of rows.
        gather: Returns, for tensors of `max(rows)` rows, one of shape `(len(rows), max(rows), ...)`.
    """
    most = max(rows)
    if most == 0:
        return tensor
    padding = tensor.new_zeros((most - len(tensor), *tensor.shape[1:]))
    gathered = gather(torch.cat([tensor, padding]) if len(padding) else tensor)
    if min(rows) == most:
        return gathered.flatten(0, 1)
    return torch.cat([own[:count] for own, count in zip(gathered, rows, strict=True)])


def _stack_of_all(tensor: Tensor, group: Any) -> Tensor:
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return torch.stack(gathered)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _stack_of_all(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)].clone(), None
