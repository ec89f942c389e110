"""A `Student` in Lightning, whose `training_step` changes what the student says."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.step_changes import Student


class StudentModule(pl.LightningModule):
    """Trains a student, and notes its state in each validation.

    Args:
        student: The student.
        lengths: The number of each rank's batches.
        rows: Returns a rank's batch of a step.
    """

    def __init__(self, student: Student, lengths: Sequence[int], rows: Callable[[int, int], Tensor]) -> None:
        super().__init__()
        self.student, self._lengths, self._rows = student, lengths, rows
        self.seen: list[list[Tensor]] = []

    def configure_optimizers(self) -> Any:
        return self.student.optimizer()

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        return DataLoader([self._rows(rank, step) for step in range(self._lengths[rank])], batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader([torch.zeros(1)], batch_size=None)  # type: ignore[arg-type]

    def training_step(self, x: Tensor, index: int) -> Tensor:
        optimizer: Any = self.optimizers()
        self.student.change(optimizer.optimizer, self.trainer.global_step)
        return self.student.loss(x)

    def validation_step(self, x: Tensor, index: int) -> None:
        self.seen.append(self.student.state())
