"""Shadow steps run the hooks of callbacks and module, and leave no trace in logged values and metrics."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, SumMetric

from tests.support.front_ends.lightning import Fit, Module, build_trainer, fit
from tests.support.run import Batch
from tests.support.workers import Workers


class Watch(pl.Callback):
    """Notes every batch hook: name, joined, index, the batch's first number, the output's loss."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, index: int) -> None:
        module.noted.append(("start", trainer.strategy.joined, index, float(batch[0][0, 0]), None))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Batch, index: int) -> None:
        loss = float(outputs["loss"])
        module.noted.append(("end", trainer.strategy.joined, index, float(batch[0][0, 0]), loss))


@pytest.mark.parametrize("iterable", [False, True])
def test_hooks_run_in_every_step_on_every_rank(workers: Workers, iterable: bool) -> None:
    case = Fit((0, 2, 4), epochs=2, iterable=iterable)
    results = workers.run(3, fit, case, Module, {}, {"callbacks": [Watch()]})
    for rank, result in enumerate(results):
        length, calls = case.lengths[rank], result.noted
        assert len(result.trained) == 2 * length
        assert [(name, index) for name, _, index, _, _ in calls] == [
            (name, i) for _ in range(2) for i in range(4) for name in ("start", "end")
        ]
        assert [joined for _, joined, *_ in calls] == [i >= length for _ in range(2) for i in range(4) for _ in "ab"]
    first, second = results[0].noted, results[1].noted
    # Rank 1 keeps its last batch and output; rank 0, which never had one, got rank 1's first batch.
    own = [float(case.batch(1, epoch, 1)[0][0, 0]) for epoch in range(2)]
    assert [call[3] for call in second[4:8]] == [own[0]] * 4
    assert [call[3] for call in second[12:]] == [own[1]] * 4
    assert [call[4] for call in second[5:8:2]] == [second[3][4]] * 2
    assert {call[3] for call in first} == {float(case.batch(1, 0, 0)[0][0, 0])}
    assert {call[4] for call in first} == {None, 0.0}


class Recorder(Logger):
    """Keeps what is logged."""

    name, version = "recorder", 0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, {k: v for k, v in metrics.items() if k != "epoch"}))


class Logs(Module):
    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.seen = SumMetric()
        self.all = CatMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=False)
        self.log(
            "mean", float(self.trainer.global_rank + 1), on_step=False, on_epoch=True, sync_dist=True, batch_size=3
        )
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.log("late", float(batch_idx))
        self.seen.update(1.0)
        self.all.update(torch.tensor([1.0]))


def fit_logging(rank: int, case: Fit) -> tuple[Any, float, int, dict[str, float]]:
    module, recorder = Logs(case), Recorder()
    trainer = build_trainer(case, logger=recorder, log_every_n_steps=1)
    trainer.fit(module)
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return recorder.rows, float(module.seen.sum_value), len(module.all.value), metrics


def test_shadow_steps_leave_no_trace(workers: Workers) -> None:
    case = Fit((2, 4), epochs=1)
    results = workers.run(2, fit_logging, case)
    rows = results[0][0]  # a logger writes on rank 0, which joined first
    assert [step for step, row in rows if "loss" in row] == [0, 1], "a stale loss was written again"
    assert [row["late"] for _, row in rows if "late" in row] == [0.0, 1.0]
    for rank, (_, seen, stored, metrics) in enumerate(results):
        assert (seen, stored) == (case.lengths[rank], case.lengths[rank])
        assert metrics["mean"] == pytest.approx((2 * 1 + 4 * 2) / 6, abs=1e-6)


class ReadsEarly(pl.Callback):
    """Logs at the epoch's end, and on rank 0 alone reads all values at once, as progress bars do."""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank == 1:
            module.log("some", 3.0, sync_dist=True)
        module.log("all", float(trainer.global_rank), sync_dist=True)
        if trainer.global_rank == 0:
            assert trainer.callback_metrics["all"] == 0.5

    on_validation_epoch_end = on_train_epoch_end  # type: ignore[assignment]


class Validates(Logs):
    def val_dataloader(self) -> Any:
        return DataLoader([self.case.batch(0, 0, 0)] * self.trainer.global_rank, batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, *_: Any) -> None:
        self.log("rank", float(self.trainer.global_rank), sync_dist=True, batch_size=1)


@pytest.mark.parametrize("bar", [False, True])
def test_a_rank_that_reads_epoch_values_early(workers: Workers, bar: bool) -> None:
    options = {"callbacks": [TQDMProgressBar() if bar else ReadsEarly()], "enable_progress_bar": bar}
    for result in workers.run(2, fit, Fit((0, 3), epochs=2), Validates, {}, options):
        metrics = result.metrics
        assert metrics["mean"] == pytest.approx(2.0)
        assert metrics["rank"] == 1.0
        assert bar or (metrics["some"], metrics["all"]) == (3.0, 0.5)


def test_epoch_values_of_a_rank_that_never_logged(workers: Workers) -> None:
    for *_, metrics in workers.run(3, fit_logging, Fit((0, 1, 3), epochs=2)):
        assert metrics["mean"] == pytest.approx((2 + 3 * 3) / 4, abs=1e-6)
