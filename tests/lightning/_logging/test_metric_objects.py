"""Metrics of torchmetrics that are logged as objects, by ranks that have a batch in some epochs and steps only."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.support.front_ends.lightning import Fit, Module, fit
from tests.support.run import Batch
from tests.support.workers import Workers


class Logs(Module):
    """Logs one metric per step and one per epoch, in training and validation."""

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.seen, self.each, self.valid = MeanMetric(), MeanMetric(dist_sync_on_step=True), MeanMetric()

    def value(self, rank: int, epoch: int, step: int) -> float:
        return 100.0 * epoch + 10 * rank + step

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        value = self.value(self.trainer.global_rank, self.trainer.current_epoch, batch_idx)
        self.seen(value)
        self.log("seen", self.seen, on_epoch=True)
        self.each(value)
        self.log("each", self.each, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        length = self.case.lengths_in(self.trainer.current_epoch)[self.trainer.global_rank]
        return DataLoader(range(length), batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, _: Any, batch_idx: int) -> None:
        self.valid(self.value(self.trainer.global_rank, self.trainer.current_epoch, batch_idx))
        self.log("valid", self.valid)

    def on_train_epoch_end(self) -> None:
        self.noted.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


@pytest.mark.parametrize("lengths", [((0, 3), (2, 3)), ((1, 4), (3, 2)), ((2, 0, 3), (3, 1, 0))])
def test_a_rank_may_log_in_some_epochs_only(workers: Workers, lengths: Any, tmp_path: Path) -> None:
    case = Fit(lengths, epochs=2, reload=1)
    loggers = [CSVLogger(tmp_path, name="", version=""), TensorBoardLogger(tmp_path, name="", version="events")]
    options = {"logger": loggers, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    ranks = [result.noted for result in workers.run(len(lengths[0]), fit, case, Logs, {}, options)]
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    column = rows[0].index("each_step")
    written = [float(row[column]) for row in rows[1:] if row[column]]
    events: Any = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    expected = []
    for epoch, by_rank in enumerate(lengths):
        values = [
            [100.0 * epoch + 10 * r + step for r, length in enumerate(by_rank) if step < length]
            for step in range(max(by_rank))
        ]
        expected += [sum(each) / len(each) for each in values]
        mean = sum(map(sum, values)) / sum(map(len, values))
        for held in ranks:
            assert held[epoch]["seen"] == held[epoch]["each_epoch"] == held[epoch]["valid"] == pytest.approx(mean)
            assert held[epoch]["each_step"] == pytest.approx(expected[-1])
    assert written == pytest.approx(expected)  # by rank 0, also where it had joined
    assert [event.value for event in events.Scalars("each_step")] == pytest.approx(expected)
