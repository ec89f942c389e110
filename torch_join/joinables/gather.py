"""A gather through which gradients flow, between the forward and the backward of a model.

Its backward is a collective too, which comes somewhere among DistributedDataParallel's own. So it has a
process group of its own, and what matters is only its place among its like: each gather depends on the
one before it, and the loss on the last. So all of them have a backward on every rank, in the reverse
of the forward's order, whether the loss uses them or not, and also where there is no loss.
"""

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_join._base import compat as _compat
from torch_join._base.errors import UnsupportedError
from torch_join._collectives.gather import stack_of_all
from torch_join.joinables.part import Driver, Part


class GatherPart(Part):
    """The gathers of one step, on an active rank and on one that has joined."""

    kinds: ClassVar[dict[str, Any]] = {"gather": tuple[tuple[int, ...], torch.dtype, str]}

    def __init__(self, driver: Driver, index: int) -> None:
        super().__init__(driver, index)
        self.group: Any = None
        self._last: Tensor | None = None

    @property
    def pending(self) -> bool:
        """Whether there has been a gather since the last loss."""
        return self._last is not None

    def gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, stacked; all active ranks call this, with the same shape and type."""
        self.announce("gather", (tuple(tensor.shape), tensor.dtype, tensor.device.type))
        with self.server.own_collectives():
            return self._gather(tensor)

    def answer(self, kind: str, payload: Any) -> None:
        shape, dtype, device = payload
        self._gather(torch.zeros(shape, dtype=dtype, device=device, requires_grad=True))

    def chain(self, loss: Tensor) -> Tensor:
        """Return the loss of this step, on which the gathers' backward now depends."""
        last, self._last = self._last, None
        return loss if last is None else loss + last.to(loss)

    def forget(self) -> None:
        """Forget the gathers of this step: the active ranks announce what their backward has with others."""
        self._last = None

    def exit(self) -> None:
        super().exit()
        self._last = None
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def _gather(self, tensor: Tensor) -> Tensor:
        if self.group is None:
            # All ranks come here at once. It is not seen by the tap.
            self.group = _compat.another_group(self.members.group, tensor.device)
        before = self._last if self._last is not None else torch.zeros((), device=tensor.device)
        gathered: Tensor
        gathered, self._last = _Gather.apply(self, tensor, before)  # type: ignore[no-untyped-call]
        return gathered


class _Gather(torch.autograd.Function):
    """The tensor and the gather before it; returns all ranks' tensors, and what the next gather depends on."""

    @staticmethod
    def forward(ctx: Any, part: GatherPart, tensor: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        ctx.part = part
        ctx.set_materialize_grads(False)
        gathered = stack_of_all(tensor, part.group)
        ctx.like = gathered[0]
        return gathered, torch.zeros_like(before)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[None, Tensor | None, None]:
        part, like = ctx.part, ctx.like
        in_pieces = part.server.in_pieces
        if part.server.in_tail and not in_pieces:  # and not after the step, in its backward
            raise UnsupportedError(
                "The step ran a backward of its own (as a rule torch.autograd.grad) through"
                f" all_gather(sync_grads=True), while ranks {part.members.joined_ranks} have run out of batches and"
                " cannot take part in it. Differentiate with respect to tensors behind the gather, or gather detached"
                " ones."
            )
        group = part.members.group if in_pieces else part.group
        # The last element counts the ranks whose loss the gather is a part of.
        flat = like.new_zeros(dist.get_world_size(group) * like.numel() + 1)
        if gradient is not None:
            flat[:-1], flat[-1] = gradient.reshape(-1), 1
        with nullcontext() if in_pieces else part.server.own_collectives():
            dist.all_reduce(flat, group=group)
        if gradient is None and not flat[-1]:
            return None, None, None  # no gradient at all, which differs from zero: parameters may go unused
        mine = flat[:-1].view(-1, *like.shape)[dist.get_rank(group)]
        return None, mine.clone(), None
