"""An optimizer as a `Joinable` of its own, for torch's `Join` too."""

import torch
import torch.distributed as dist

from torch_join._base.errors import JoinTypeError
from torch_join._handover.compat import is_sharded
from torch_join.joinables._torch.joinable import WrappingJoinable
from torch_join.joinables.optimizer import ShardedOptimizerPart
from torch_join.joinables.part import Driver, Part


class JoinableOptimizer(WrappingJoinable):
    """An optimizer as a `Joinable` of its own.

    `Join([JoinableOptimizer(optimizer)])` of this package is the same as `Join([optimizer])`. In torch's, the
    last rank's optimizer state replaces the others' at the end, bit for bit; a rank that never stepped
    gets it too. The shards of a `ZeroRedundancyOptimizer` are stepped in each step, with the gradients and
    the hyperparameters that an active rank sends.

    Args:
        optimizer: The optimizer.
        process_group: The process group, by default the whole world, or that of a sharded optimizer.

    Raises:
        JoinTypeError: `optimizer` is not an optimizer.

    Limits:
        In torch's `Join` a `ZeroRedundancyOptimizer` comes after a `JoinableModel`, and after joinables with
        collectives that are not of this package; it steps at most once after each backward.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JoinTypeError(f"JoinableOptimizer takes an optimizer, not {type(optimizer).__name__}.")
        if process_group is None and is_sharded(optimizer):
            process_group = optimizer.process_group  # type: ignore[attr-defined]
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        super().__init__(optimizer, process_group, next(parameters).device)

    def make_part(self, driver: Driver, index: int) -> Part | None:
        return ShardedOptimizerPart(driver, index, self.wrapped) if is_sharded(self.wrapped) else None
