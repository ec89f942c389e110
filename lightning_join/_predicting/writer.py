"""`JoinPredictionWriter`: the predictions of all ranks in one file, in order."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_join._predicting.order import Order, Reading, agree, describe, is_copy, read_indices
from torch_join import JoinError
from torch_join.integration import FileRows, RowsPart, read_rows


class JoinPredictionWriter(BasePredictionWriter):
    """Writes all ranks' predictions to one file, in the order of `gather_predictions`, in bounded memory.

    ```python
    trainer = Trainer(strategy="ddp_join", callbacks=[JoinPredictionWriter("predictions.rows")])
    trainer.predict(model, loader, return_predictions=False)
    predictions = read_predictions("predictions.rows")
    ```

    Each rank appends its batches to a file of its own beside that one. When all are done rank 0 goes through these and
    writes all predictions in order; only then the file is there, and the ranks' own ones are removed. What is kept in
    memory are three numbers for each sample.

    Args:
        path: Of the file, on a file system that all ranks have. One that is there is replaced at the end.
        order: As in `gather_predictions`.

    Raises:
        JoinError: On all ranks, if something in the predictions of one has no row for each sample, or the file cannot
            be written, or the order is not known.
    """

    def __init__(self, path: str | os.PathLike[str], order: Order | None = None) -> None:
        super().__init__("batch")
        self.path, self.order = Path(path), order
        self._part: RowsPart | None = None
        self._read: list[tuple[int, bool]] = []  # by dataloader: how many batches, and whether all indices are known

    def on_predict_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        loaders = trainer.predict_loop.num_dataloaders
        self._part = RowsPart(self.path, trainer.global_rank, loaders, "predictions")
        self._read = [(0, True)] * loaders

    def write_on_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if self._part is None or is_copy(trainer.strategy):
            return
        combined: Any = trainer.predict_loop._combined_loader
        # Not `batch_indices`: where these are not known, they are still those of the dataloader before.
        found = read_indices(combined.flattened[dataloader_idx], [batch_idx])
        prediction = move_data_to_device(prediction, torch.device("cpu"))
        self._part.append(dataloader_idx, prediction, None if found is None else found[0])
        batches, known = self._read[dataloader_idx]
        self._read[dataloader_idx] = batches + 1, known and found is not None

    def on_predict_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        part, combined = self._part, trainer.predict_loop._combined_loader
        assert part is not None
        assert combined is not None
        mine: list[Reading] | JoinError
        try:
            mine = [
                describe(loader, place, *read, self.order)
                for place, (loader, read) in enumerate(zip(combined.flattened, self._read, strict=True))
            ]
        except JoinError as error:  # the others wait
            mine = error
        part.finish([by_rank for by_rank, _ in agree(mine)])
        self._part = None

    def teardown(self, *_: Any, **__: Any) -> None:
        if self._part is not None:
            self._part.abandon()
            self._part = None

    def on_exception(self, *_: Any) -> None:
        self.teardown()


def read_predictions(path: str | os.PathLike[str]) -> FileRows | list[FileRows]:
    """Return the predictions that a `JoinPredictionWriter` has written; none is read before it is asked for.

    `predictions[i]` is that of a sample, `predictions[i:j]` a structure like a batch's, and `predictions[:]` what
    `gather_predictions` returns. A loop goes through the samples, in bounded memory.

    Args:
        path: Of the file. It holds pickles, which can run code: read only files that you trust.

    Returns:
        The predictions; of several dataloaders a list.

    Raises:
        JoinValueError: It is no such file.
    """
    found = read_rows(path)
    return found[0] if len(found) == 1 else found
