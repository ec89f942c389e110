"""Accelerate's operations inside the context: with batches of different sizes, and over the active ranks.

Accelerate gathers tensors of one shape from all processes. Here each rank may have as many rows as it likes;
ranks that have joined take part with none, so that what comes back holds the active ranks' rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils.operations import recursively_apply
from torch import Tensor

from accelerate_join import _compat
from torch_join import JoinError
from torch_join.joinables import Part

if TYPE_CHECKING:
    from accelerate_join._context import AcceleratorJoin

_MAIN = 0


class Operations(Part):
    """What processes do together through Accelerate, on an active rank and on one that has joined.

    Args:
        join: The context.
        index: Of this part.
        accelerator: Whose operations these are.
    """

    join: "AcceleratorJoin"

    def __init__(self, join: "AcceleratorJoin", index: int, accelerator: accelerate.Accelerator) -> None:
        super().__init__(join, index)
        self._accelerator = accelerator
        self._type = type(accelerator)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, Accelerate's functions do what these methods do."""
        with _compat.operations_replaced(self.gather, self.gather_object, self.broadcast, self.reduce):
            yield

    # ------------------------------------------------------------ operations

    def gather(self, data: Any) -> Any:
        """Return the active ranks' rows of each tensor in `data`, by rank.

        Raises:
            JoinError: The ranks' tensors differ in more than their number of rows.
        """
        tensors: list[Tensor] = []
        recursively_apply(tensors.append, data, error_on_other_type=True)
        if not tensors:
            return data
        tensors = [tensor.detach()[None] if tensor.ndim == 0 else tensor.detach() for tensor in tensors]
        # Who has joined takes part with no rows of these.
        self.announce("gather", [tensor[:0].cpu() for tensor in tensors])
        with self.join.own_collectives():
            gathered = iter(self._gather(tensors))
        return recursively_apply(lambda _: next(gathered), data, error_on_other_type=True)

    def gather_object(self, data: Any) -> list[Any]:
        """Return what is in the active ranks' lists, by rank."""
        self.announce("gather_object")
        with self.join.own_collectives():
            everyone = self._gather_object(data)
        return [item for rank in self.join.active_ranks for item in everyone[rank]]

    def broadcast(self, own: Callable[..., Any], data: Any, src: int = _MAIN) -> Any:
        """Send what rank `src` has to all, or what the lowest active rank has if that one has joined."""
        return own(data, src=src if src in self.join.active_ranks else self.join.leader)

    def reduce(self, own: Callable[..., Any], tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        """Reduce over the active ranks: others add nothing, and do not count in a mean."""
        count = len(self.join.active_ranks)
        if reduction != "mean" or count == self._accelerator.num_processes:
            return own(tensor, reduction, scale)
        return recursively_apply(lambda total: total.div_(count), own(tensor, "sum", scale))

    def together(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the accelerator's own on this rank and on those that have joined.

        Args:
            name: The method: `save_state` is called in the state of the active ranks everywhere.
            *args: Its arguments, which can be pickled.
            **kwargs: Others.
        """
        self.announce(name, (args, kwargs))
        with self.join.own_collectives():
            return self._call(name, args, kwargs, hands_over=self.join.in_tail)

    @contextmanager
    def for_main(self) -> Iterator[None]:
        """Within, the lowest active rank stands in for a main process that has joined."""
        if self.join.in_tail and _MAIN not in self.join.active_ranks and self.join.rank == self.join.leader:
            with _compat.standing_in_for_main():
                yield
        else:
            yield

    # ------------------------------------------------------------ on a joined rank

    def answer(self, kind: str, payload: Any) -> None:
        if kind == "gather":
            self._gather([tensor.to(self._accelerator.device) for tensor in payload])
        elif kind == "gather_object":
            self._gather_object(None)
        else:
            args, kwargs = payload
            self._call(kind, args, kwargs, hands_over=True)

    # ------------------------------------------------------------ on both

    def _gather(self, tensors: list[Tensor]) -> list[Tensor]:
        kinds = [f"{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors]
        word = [crc32(" ".join(kinds).encode()), *map(len, tensors)]
        words = _compat.gather(torch.tensor([word], device=self._accelerator.device)).tolist()
        if any(kinds_there != word[0] for kinds_there, *_ in words):
            raise JoinError(
                f"The tensors to gather differ between the ranks in more than their number of rows: rank"
                f" {self.join.rank} has {', '.join(kinds)}. Call pad_across_processes on the other dimensions first."
            )
        return [self._gather_rows(tensor, [rows[index] for _, *rows in words]) for index, tensor in enumerate(tensors)]

    def _gather_rows(self, tensor: Tensor, rows: list[int]) -> Tensor:
        most = max(rows)
        if most == 0:
            return tensor
        missing = tensor.new_zeros((most - len(tensor), *tensor.shape[1:]))
        gathered: Tensor = _compat.gather(torch.cat([tensor, missing]) if len(missing) else tensor)
        if min(rows) == most:
            return gathered
        parts = gathered.view(len(rows), most, *tensor.shape[1:])
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def _gather_object(self, data: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._accelerator.num_processes
        dist.all_gather_object(everyone, data)
        return everyone

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], hands_over: bool) -> Any:
        if name == "save_state" and hands_over:
            self.join.hand_over_states()
        return getattr(self._type, name)(self._accelerator, *args, **kwargs)
