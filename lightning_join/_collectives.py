"""A strategy's own collectives: in the tail, they run over the active ranks only."""

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join import UnsupportedError
from torch_join.integration import Channel, Options, gather_objects, in_backward, join_rows, whole_signature


class ActiveCollectives:
    """The common part of the Trainer's and Fabric's strategies; a base class before Lightning's own class.

    A joined rank mirrors the active ranks' collectives. Averages are over the active ranks, gathers return only their
    entries, and a broadcast from a joined rank comes from the lowest active rank instead.
    """

    options: Options
    # Whether gathered tensors are certain to have the same shape on all ranks, because all their batches are full.
    gathers_alike = False
    world_size: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        with suppress(TypeError, ValueError):  # a user's class may order its parameters differently
            cls.__signature__ = whole_signature(cls, ActiveCollectives)  # type: ignore[attr-defined]

    @property
    def all_call(self) -> bool:
        """Whether joined ranks also make every call, on a placeholder."""
        return False

    @property
    def in_placeholder(self) -> bool:
        """Whether this rank runs a placeholder."""
        return False

    def find_step_ranks(self) -> tuple[int, ...] | None:
        """Return the active ranks, in a step in which some rank has no batch; otherwise `None`."""
        raise NotImplementedError

    @property
    def meets_over(self) -> Channel | None:
        """The channel over which the ranks can meet; `None` outside of a run."""
        raise NotImplementedError

    def check_backward(self, over_all: bool) -> None:
        """Record that gradients flow through a gather, over all ranks (`over_all`) or over some.

        Raises:
            UnsupportedError: Joined ranks cannot follow it.
        """

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        ranks = self.find_step_ranks()
        source = src if ranks is None or src in ranks else ranks[0]
        return super().broadcast(obj, source)  # type: ignore[misc]

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        ranks = self.find_step_ranks()
        over_all = group is None or group == dist.group.WORLD
        # A forward that activation checkpointing repeats in backward has been checked before.
        if over_all and tensor.dim() > 0 and not self.gathers_alike and not in_backward():
            self._check_shapes(self._shapes_of_all(tensor))
        with_backward = sync_grads and tensor.requires_grad and torch.is_grad_enabled()
        if with_backward:
            self.check_backward(over_all)
        # Detached, because a result without a backward must not require gradients.
        gathered: Tensor = super().all_gather(tensor if with_backward else tensor.detach(), group, sync_grads)  # type: ignore[misc]
        return gathered if ranks is None else gathered[active_places(ranks, group)]

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks that take part, without gradients; all of these ranks call this.

        Args:
            tensor: This rank's tensor, with any number of rows, even none. Its other dimensions must match on all
                ranks.

        Returns:
            A tensor with all rows, in the order of the ranks.

        Raises:
            UnsupportedError: The ranks' tensors differ in more than the number of rows.
        """
        tensor = tensor.detach()[:0] if self.in_placeholder else tensor.detach()
        shapes = self._shapes_of_all(tensor)
        rows = [shape[0] for shape in shapes.values()]
        if any(shape[1:] != [*tensor.shape[1:]] for shape in shapes.values()):
            self._check_shapes(shapes)
        if not self.options.enable or len(rows) == 1:
            return tensor
        own = super().all_gather  # type: ignore[misc]
        return join_rows(tensor, rows, lambda padded: own(padded)[list(shapes)])

    def _shapes_of_all(self, tensor: Tensor) -> dict[int, list[int]]:
        """Exchange the shapes of the tensors to gather, because gloo ends the process if one does not fit."""
        shape, ranks = [*tensor.shape], self.find_step_ranks()
        if not self.options.enable or self.world_size == 1 or not dist.is_initialized():
            return {0: shape}
        if (channel := self.meets_over) is not None:
            among = None if ranks is None or self.all_call else (f"shapes/{channel.records}", ranks)
            found = channel.gather(shape, of=list[int], among=among)
            return dict(zip(range(len(found)) if among is None else sorted(among[1]), found, strict=True))
        return dict(enumerate(gather_objects(shape, "A shape", None)))

    def _check_shapes(self, shapes: dict[int, list[int]]) -> None:
        if all(shape == next(iter(shapes.values())) for shape in shapes.values()):
            return
        shown = ", ".join(f"{tuple(shape)} on rank {rank}" for rank, shape in shapes.items())
        raise UnsupportedError(
            f"`all_gather` needs tensors of the same shape, but the shapes differ between ranks: {shown}. If only the"
            " number of rows differs, call `self.trainer.strategy.gather_rows(tensor)` or"
            " `fabric.strategy.gather_rows(tensor)`, which returns the rows of all ranks in one tensor."
        )

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        own = super().reduce_boolean_decision  # type: ignore[misc]
        decision = all if self.in_placeholder else decision
        found: bool = (
            own(decision, all) if self.find_step_ranks() is None or not all else not own(not decision, all=False)
        )
        return found


def neutral(tensor: Tensor, reduce_op: Any) -> Tensor:
    """Return the tensor that a rank with a placeholder contributes to a reduction in place of its tensor.

    Raises:
        UnsupportedError: The reduction has no neutral value.
    """
    name = "sum" if is_mean(reduce_op) else str(reduce_op).lower().removeprefix("redoptype.").removeprefix("reduceop.")
    values: dict[str, float] = {"sum": 0, "product": 1}
    if not tensor.is_complex() and tensor.dtype != torch.bool:
        limits = (torch.finfo if tensor.is_floating_point() else torch.iinfo)(tensor.dtype)
        values |= {"min": limits.max, "max": limits.min}
    if name not in values:
        raise UnsupportedError(
            f"A reduction with {reduce_op!r} cannot exclude this rank, which is running a placeholder. Use mean, sum,"
            " product, min or max, which have a neutral value."
        )
    return torch.full_like(tensor, values[name])


def is_mean(reduce_op: Any) -> bool:
    """Whether a reduction averages, by Lightning's names."""
    return isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")


def active_places(ranks: tuple[int, ...], group: Any | None) -> list[int]:
    """Return the positions of the active ranks within a group."""
    whole = dist.group.WORLD if group is None else group  # older torch does not take `None` for it
    return [place for place, rank in enumerate(dist.get_process_group_ranks(whole)) if rank in ranks]
