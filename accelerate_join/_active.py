"""Accelerate's gathers and reductions over the active ranks, each with any number of rows.

Accelerate gathers tensors of one shape from all processes. Here joined ranks contribute no rows, so the result holds
only the active ranks' rows.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from zlib import crc32

import torch
import torch.distributed as dist
from accelerate.utils import gather, gather_object
from accelerate.utils.operations import recursively_apply
from torch import Tensor

from accelerate_join import _compat
from torch_join import JoinDataWarning, JoinError
from torch_join.integration import Driver, Participant, join_rows

_MAIN = 0


class ActiveOperations(Participant):
    """These operations, on active and on joined ranks.

    Args:
        device: This rank's device.
    """

    kinds: ClassVar[dict[str, Any]] = {
        "gather": tuple[list[tuple[torch.Size, torch.dtype, str]], bool],
        "gather_object": bool,
    }
    for_metrics = False  # whether the gather is for metrics: then joined ranks warn that they miss it

    def __init__(self, device: torch.device, driver: Driver, index: int) -> None:
        super().__init__(driver, index)
        self._device = device
        self._has_warned = False

    @property
    def active(self) -> Sequence[int]:
        """The ranks whose data are gathered, broadcast and reduced."""
        raise NotImplementedError

    def are_over(self) -> bool:
        """Whether the context has ended, so that Accelerate's own functions must be called."""
        return False

    def before_gather(self, name: str) -> None:
        """Called before an active rank gathers."""

    def replacing(self) -> AbstractContextManager[None]:
        """In this context, Accelerate's functions call these methods."""
        return _compat.operations_replaced(self)

    def gather(self, data: Any) -> Any:
        """Return the active ranks' rows of each tensor in `data`, by rank.

        Raises:
            JoinError: The ranks' tensors differ in more than their number of rows.
        """
        if self.are_over():
            return gather(data)
        tensors: list[Tensor] = []
        recursively_apply(tensors.append, data, error_on_other_type=True)
        if not tensors:
            return data
        tensors = [tensor.detach()[None] if tensor.ndim == 0 else tensor.detach() for tensor in tensors]
        self.before_gather("accelerator.gather")
        if self.members.rank not in self.active:  # it runs a placeholder
            tensors = [tensor[:0] for tensor in tensors]
        # Joined ranks gather tensors like these with no rows.
        self.announce("gather", ([(t.shape[1:], t.dtype, t.device.type) for t in tensors], self.for_metrics))
        with self.tail_log.own_collectives():
            gathered = iter(self._gather(tensors))
        return recursively_apply(lambda _: next(gathered), data, error_on_other_type=True)

    def pad(self, own: Callable[..., Any], data: Any, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
        """Pad to the active ranks' size, as Accelerate does. A placeholder's tensors consist of padding only."""

        def emptied(tensor: Tensor) -> Tensor:
            return tensor.narrow(dim, 0, 0) if -tensor.ndim <= dim < tensor.ndim else tensor

        counts = self.are_over() or self.members.rank in self.active
        return own(data if counts else recursively_apply(emptied, data), dim, *args, **kwargs)

    def gather_object(self, data: Any) -> list[Any]:
        """Return the contents of the active ranks' lists, by rank."""
        if self.are_over():
            return gather_object(data)  # type: ignore[no-any-return]
        self.before_gather("accelerator.gather_object")
        self.announce("gather_object", self.for_metrics)
        with self.tail_log.own_collectives():
            lists = self._gather_object(data)
        return [item for rank in self.active for item in lists[rank]]

    def broadcast(self, own: Callable[..., Any], data: Any, src: int = _MAIN) -> Any:
        """Broadcast from rank `src`, or from the lowest active rank if `src` has joined."""
        if self.are_over():
            return own(data, src=src)
        return own(data, src=src if src in self.active else self.active[0])

    def reduce(self, own: Callable[..., Any], tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        """Reduce over the active ranks; joined ranks contribute nothing and do not count in a mean."""
        world_size = self.members.world_size
        count = world_size if self.are_over() else len(self.active)
        if count == world_size:
            return own(tensor, reduction, scale)
        if reduction != "mean":
            return own(self._counted(tensor), reduction, scale)
        return recursively_apply(lambda total: total.div_(count), own(self._counted(tensor), "sum", scale))

    def _counted(self, tensor: Any) -> Any:
        """Return this rank's contribution to a sum: zeros if it runs a placeholder."""
        return tensor if self.members.rank in self.active else recursively_apply(torch.zeros_like, tensor)

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "gather":
            specs, for_metrics = payload
            self._note_missed(for_metrics)
            own = self._device
            self._gather([torch.empty((0, *s), dtype=d, device=own if own.type == t else t) for s, d, t in specs])
        else:
            self._note_missed(payload)
            self._gather_object([])

    def _note_missed(self, for_metrics: bool) -> None:
        """Warn once on a joined rank that its metrics lack the samples that other ranks gather."""
        if for_metrics and not self._has_warned:
            self._has_warned = True
            JoinDataWarning.warn(
                f"Rank {self.members.rank} has finished, so it does not receive the samples that the other ranks"
                " gather for metrics in this loop, and its own metric lacks them. For a metric on all ranks,"
                " sum on each rank and reduce after the loop, or call gather_in_order. (A loader that Accelerate shards"
                " may also be evaluated outside the loop's context, by a plain `for`.)"
            )

    def _gather(self, tensors: list[Tensor]) -> list[Tensor]:
        kinds = [f"{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors]
        own = crc32(" ".join(kinds).encode()), [len(tensor) for tensor in tensors]
        # Exchanged over the channel, so that no rank waits for its device.
        answers = self.tail_log.channel.gather(own, of=tuple[int, list[int]])
        if any(kinds_there != own[0] for kinds_there, _ in answers):
            raise JoinError(
                f"The tensors to gather differ between ranks in more than the number of rows: rank {self.members.rank}"
                f" has {', '.join(kinds)}. Call pad_across_processes on the other dimensions first."
            )
        rows = [counts for _, counts in answers]
        return [
            join_rows(tensor, each, lambda padded: _compat.gather(padded).unflatten(0, (len(rows), -1)))
            for tensor, each in zip(tensors, zip(*rows, strict=True), strict=True)
        ]

    def _gather_object(self, data: Any) -> list[Any]:
        lists: list[Any] = [None] * self.members.world_size
        dist.all_gather_object(lists, data)
        return lists
