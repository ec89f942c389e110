"""Fits in which a step's losses come from all active ranks together, or some have none."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.support.front_ends.lightning import Fit, Module
from tests.support.run import Batch, Expected, reference

Losses = Callable[[Any, dict[int, Batch], int, int], dict[int, Tensor | None]]


@dataclass(frozen=True)
class Joint(Fit):
    """A fit, and the losses of all active ranks, of which some may be `None`."""

    by: Losses | None = None

    def joint_losses(self, net: Any, batches: dict[int, Batch], epoch: int, step: int) -> dict[int, Tensor]:
        assert self.by is not None
        return {rank: loss for rank, loss in self.by(net, batches, epoch, step).items() if loss is not None}


def joint_reference(case: Fit, losses: Losses) -> Expected:
    return reference(Joint(**vars(case), by=losses))


def returns_none(case: Fit, rank: int, epoch: int, step: int) -> bool:
    """A fixed pattern, in which sometimes one rank and sometimes all have no loss."""
    return (7 * rank + 5 * epoch + 3 * step + rank * step) % 5 < 2 or (epoch, step % 5) in ((0, 0), (1, 2), (1, 3))


class JointModule(Module):
    """Knows the epoch and step that it is in."""

    @property
    def moment(self) -> tuple[int, int]:
        return self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
