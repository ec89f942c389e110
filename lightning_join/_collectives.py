"""A strategy's own collectives: in a step for which some ranks have no batch, over the ranks that have one."""

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join import UnsupportedError
from torch_join.integration import Channel, Options, gather_objects, in_backward, join_rows, whole_signature


class ActiveCollectives:
    """What the strategies of the Trainer and of Fabric share; a base class before Lightning's own class.

    A rank that has no batch mirrors the others' collectives. Averages are then over the ranks that have one, gathers
    return only their entries, and a broadcast from a rank that has none comes from the lowest rank that has one.
    """

    options: Options
    # Whether tensors gathered now surely have the same shape on all ranks: they come from batches that are all full.
    gathers_alike = False
    world_size: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        with suppress(TypeError, ValueError):  # a user's class whose parameters have no common order with ours
            cls.__signature__ = whole_signature(cls, ActiveCollectives)  # type: ignore[attr-defined]

    @property
    def all_call(self) -> bool:
        """Whether ranks without a batch make each call too, on a placeholder."""
        return False

    @property
    def in_placeholder(self) -> bool:
        """Whether this rank runs a placeholder."""
        return False

    def find_step_ranks(self) -> tuple[int, ...] | None:
        """Return the ranks that have a batch, in a step for which some rank has none; otherwise `None`."""
        raise NotImplementedError

    @property
    def meets_over(self) -> Channel | None:
        """The channel over which the ranks can meet; `None` outside of a run."""
        raise NotImplementedError

    def check_backward(self, everyone: bool) -> None:
        """Record that gradients flow through a gather, of all ranks or of some.

        Raises:
            UnsupportedError: Ranks without a batch cannot follow it.
        """

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        ranks = self.find_step_ranks()
        source = src if ranks is None or src in ranks else ranks[0]
        return super().broadcast(obj, source)  # type: ignore[misc]

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        ranks = self.find_step_ranks()
        everyone = group is None or group == dist.group.WORLD
        # What checkpointing recomputes in backward was checked in forward.
        if everyone and tensor.dim() > 0 and not self.gathers_alike and not in_backward():
            self._check_shapes(self._shapes_of_all(tensor))
        with_backward = sync_grads and tensor.requires_grad and torch.is_grad_enabled()
        if with_backward:
            self.check_backward(everyone)
        # Detached: a tensor without a backward must not look as if it had one.
        gathered: Tensor = super().all_gather(tensor if with_backward else tensor.detach(), group, sync_grads)  # type: ignore[misc]
        return gathered if ranks is None else gathered[active_places(ranks, group)]

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks that take part, without gradients; all of these call it.

        Args:
            tensor: This rank's tensor, with any number of rows, also none; its other dimensions are as on the other
                ranks.

        Returns:
            One tensor of all rows, in the order of the ranks.

        Raises:
            UnsupportedError: The ranks' tensors differ in more than their number of rows.
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
        """Exchange the shapes of the tensors to gather: gloo ends the process if one does not fit."""
        mine, ranks = [*tensor.shape], self.find_step_ranks()
        if not self.options.enable or self.world_size == 1 or not dist.is_initialized():
            return {0: mine}
        if (channel := self.meets_over) is not None:
            among = None if ranks is None or self.all_call else (f"shapes/{channel.records}", ranks)
            found = channel.gather(mine, of=list[int], among=among)
            return dict(zip(range(len(found)) if among is None else sorted(among[1]), found, strict=True))
        return dict(enumerate(gather_objects(mine, "A shape", None)))

    def _check_shapes(self, shapes: dict[int, list[int]]) -> None:
        if all(shape == next(iter(shapes.values())) for shape in shapes.values()):
            return
        said = ", ".join(f"{tuple(shape)} on rank {rank}" for rank, shape in shapes.items())
        raise UnsupportedError(
            f"`all_gather` needs tensors of the same shape, but they differ between ranks: {said}. If only the numbers"
            " of rows differ, call `gather_rows(tensor)` of the strategy (`self.trainer.strategy`, `fabric.strategy`):"
            " it returns the rows of all ranks in one tensor, without repeating any."
        )

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        own = super().reduce_boolean_decision  # type: ignore[misc]
        decision = all if self.in_placeholder else decision
        found: bool = (
            own(decision, all) if self.find_step_ranks() is None or not all else not own(not decision, all=False)
        )
        return found


def neutral(tensor: Tensor, reduce_op: Any) -> Tensor:
    """Return the tensor that a rank running a placeholder contributes to a reduction, instead of its tensor.

    Raises:
        UnsupportedError: There is no such tensor.
    """
    name = "sum" if is_mean(reduce_op) else str(reduce_op).lower().removeprefix("redoptype.").removeprefix("reduceop.")
    values: dict[str, float] = {"sum": 0, "product": 1}
    if not tensor.is_complex() and tensor.dtype != torch.bool:
        limits = (torch.finfo if tensor.is_floating_point() else torch.iinfo)(tensor.dtype)
        values |= {"min": limits.max, "max": limits.min}
    if name not in values:
        raise UnsupportedError(
            f"A reduction with {reduce_op!r} cannot exclude this rank, which is running a placeholder. Only mean, sum,"
            " product, min and max can: they have a neutral value."
        )
    return torch.full_like(tensor, values[name])


def is_mean(reduce_op: Any) -> bool:
    """Whether a reduction averages, by Lightning's names."""
    return isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")


def active_places(ranks: tuple[int, ...], group: Any | None) -> list[int]:
    """Return the places, among the ranks of a group, of those that take part."""
    whole = dist.group.WORLD if group is None else group  # older torch does not take `None` for it
    return [place for place, rank in enumerate(dist.get_process_group_ranks(whole)) if rank in ranks]
