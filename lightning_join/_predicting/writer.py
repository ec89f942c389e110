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
    """Writes all ranks' predictions to one file, in the order of `gather_in_order`, in bounded memory.

    ```python
    trainer = Trainer(strategy="ddp_join", callbacks=[JoinPredictionWriter("predictions.rows")])
    trainer.predict(model, loader, return_predictions=False)
    predictions = read_predictions("predictions.rows")
    ```

    Each rank appends its batches to its own file next to `path`. When all ranks have finished, rank 0 merges these
    files in order into `path`, and they are removed. Memory holds only three numbers per sample.

    Args:
        path: The result file, on a file system that all ranks share. An existing file is replaced at the end.
        order: As in `gather_in_order`.

    Raises:
        JoinError: On all ranks, if some rank's predictions do not have one row per sample, the file cannot be written,
            or the order is unknown.
    """

    def __init__(self, path: str | os.PathLike[str], order: Order | None = None) -> None:
        super().__init__("batch")
        self.path, self.order = Path(path), order
        self._part: RowsPart | None = None
        self._read: list[tuple[int, bool]] = []  # by dataloader: the number of batches; whether all indices are known

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
        # `batch_indices` still holds those of the previous dataloader if the indices are unknown.
        found = read_indices(combined.flattened[dataloader_idx], [batch_idx])
        prediction = move_data_to_device(prediction, torch.device("cpu"))
        self._part.append(dataloader_idx, prediction, None if found is None else found[0])
        batches, known = self._read[dataloader_idx]
        self._read[dataloader_idx] = batches + 1, known and found is not None

    def on_predict_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        part, combined = self._part, trainer.predict_loop._combined_loader
        assert part is not None
        assert combined is not None
        own: list[Reading] | JoinError
        try:
            own = [
                describe(loader, place, *read, self.order)
                for place, (loader, read) in enumerate(zip(combined.flattened, self._read, strict=True))
            ]
        except JoinError as error:  # raised on all ranks, which wait in `agree`
            own = error
        part.finish([by_rank for by_rank, _ in agree(own)])
        self._part = None

    def teardown(self, *_: Any, **__: Any) -> None:
        if self._part is not None:
            self._part.abandon()
            self._part = None

    on_exception = teardown


def read_predictions(path: str | os.PathLike[str]) -> FileRows | list[FileRows]:
    """Return the predictions that a `JoinPredictionWriter` wrote, each of which is read only on access.

    `predictions[i]` is the prediction of one sample, `predictions[i:j]` a structure like a batch's, and
    `predictions[:]` the result of `gather_in_order`. A loop iterates over the samples, in bounded memory.

    Args:
        path: The path of the file. It holds pickles, which can run code: read only files that you trust.

    Returns:
        The predictions; with several dataloaders, a list of them.

    Raises:
        JoinValueError: The file was not written by a `JoinPredictionWriter`.
    """
    found = read_rows(path)
    return found[0] if len(found) == 1 else found
