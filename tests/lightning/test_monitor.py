"""JoinMonitor: numbers of each epoch, logged, said and drawn."""

import csv
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy, JoinCallback, JoinMonitor
from tests.support.front_ends.lightning import ANY_CHECKPOINT, Fit, Module, build_trainer, fit
from tests.support.report import numbers_of, summary_of
from tests.support.run import Batch
from tests.support.workers import Workers
from torch_join import JoinTypeError, JoinValueError
from torch_join.integration import EpochRecord, RankRecord

SECONDS, VALIDATION = 0.03, 0.25


class Monitored(Module):
    def on_train_end(self) -> None:
        (monitor,) = (each for each in self.trainer.callbacks if isinstance(each, JoinMonitor))  # type: ignore[attr-defined]
        self.noted = monitor.epochs, self.noted


class Slow(Monitored):
    """Notes how long each epoch takes."""

    def on_train_epoch_start(self) -> None:
        self.begin = time.perf_counter()

    def on_train_epoch_end(self) -> None:
        self.noted.append(time.perf_counter() - self.begin)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        time.sleep(SECONDS)
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return DataLoader([self.case.batch(9, 0, 0)], batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        time.sleep(VALIDATION)  # none of it counts


@pytest.mark.parametrize(
    ("case", "with_callback"),
    [(Fit((2, 6), epochs=2), False), (Fit((0, 4, 6), epochs=2, iterable=True), True)],
    ids=["sized", "iterable"],
)
def test_the_numbers_of_each_epoch(workers: Workers, case: Fit, with_callback: bool, tmp_path: Path) -> None:
    monitor = JoinMonitor(tmp_path / "plots" / "timeline.png", report=tmp_path / "report.html")
    options = {
        "strategy": "ddp" if with_callback else "ddp_join",
        "callbacks": [monitor, *([JoinCallback()] if with_callback else [])],
        "logger": CSVLogger(tmp_path, name="", version=""),
        "val_check_interval": 2,
        "num_sanity_val_steps": 1,
        "log_every_n_steps": 1,
    }
    results = workers.run(case.world_size, fit, case, Slow, {}, options)
    longest = max(case.lengths)
    epochs, warnings = results[0].noted[0], results[0].warned
    assert all(result.noted[0] == epochs for result in results)
    idle = 1 - sum(case.lengths) / (longest * case.world_size)
    for number, epoch in enumerate(epochs):
        assert epoch.epoch == number
        assert abs(epoch.idle_share - idle) < 0.2
        for rank, length, result in zip(epoch.ranks, case.lengths, results, strict=True):
            assert (rank.batches, rank.shadow_steps) == (length, longest - length)
            assert rank.joined_at == (length if length < longest else None)
            assert (rank.active_seconds < rank.seconds) == (length < longest)
            assert (rank.active_seconds > 0) == (length > 0)
            # On busy cores all takes longer, but for what it sleeps.
            assert longest * SECONDS <= rank.seconds < result.noted[1][number] - 2 * VALIDATION
    assert warnings.count("Even shards would save 33% of the steps of epoch 0") == 1
    assert warnings.count("Even shards") == 1
    assert (tmp_path / "plots" / "timeline.png").read_bytes().startswith(b"\x89PNG")

    report = tmp_path / "report.html"
    assert summary_of(report) == f"{case.world_size} ranks, 2 epochs, {2 * sum(case.lengths)} batches"
    assert numbers_of(report)["all"]["steps_to_save"] == epochs[0].steps_to_save + epochs[1].steps_to_save

    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    rows = [row for row in csv.DictReader(lines) if row["join/idle_share"]]
    assert [int(row["step"]) for row in rows] == [longest - 1, 2 * longest - 1]
    for row, epoch in zip(rows, epochs, strict=True):
        for name, value in epoch.metrics().items():
            assert float(row[name]) == pytest.approx(value)
        assert [float(row[f"join/batches_rank_{rank}"]) for rank in range(case.world_size)] == list(case.lengths)


def fit_resumed(rank: int, case: Fit, folder: str) -> list[list[tuple[int, int, int | None]]]:
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    build_trainer(case, callbacks=[saving], enable_checkpointing=True, max_steps=4).fit(Module(case))
    monitor = JoinMonitor(reshard_above=1)
    build_trainer(case, callbacks=[monitor]).fit(Module(case), ckpt_path=f"{folder}/step=4.ckpt", **ANY_CHECKPOINT)
    return [[(rank.batches, rank.shadow_steps, rank.joined_at) for rank in epoch.ranks] for epoch in monitor.epochs]


def test_a_resumed_epoch_counts_from_there(workers: Workers, tmp_path: Path) -> None:
    for epochs in workers.run(2, fit_resumed, Fit((2, 6), epochs=2), str(tmp_path)):
        assert epochs == [[(0, 2, 4), (2, 0, None)], [(2, 4, 2), (6, 0, None)]]


def fit_alone(rank: int, folder: str) -> list[str]:
    lines = []
    for strategy in ("auto", "ddp_join"):
        monitor = JoinMonitor(f"{folder}/{strategy}.png")
        build_trainer(Fit((2,)), strategy=strategy, callbacks=[monitor], max_epochs=1).fit(Module(Fit((2,))))
        lines.append(str(monitor.epochs[0]))
    for strategy in ("ddp", DDPJoinStrategy(enable=False)):
        trainer = build_trainer(Fit((2,)), strategy=strategy, callbacks=[JoinMonitor()])
        try:
            trainer.fit(Module(Fit((2,))))
        except JoinTypeError as error:
            lines.append(str(error))
    return lines


def test_one_process_and_strategies_that_do_not_join(workers: Workers, tmp_path: Path) -> None:
    (lines,) = workers.run(1, fit_alone, str(tmp_path))
    assert len(lines) == 4
    for line in lines[:2]:
        assert line.startswith("Epoch 0: 2 batches (2 on 1 rank) in ")
        assert line.endswith(" s, no rank joined.")
    assert "DDPStrategy does not support joining. Use Trainer(strategy='ddp_join')" in lines[2]
    assert "DDPJoinStrategy with enable=False does not support joining" in lines[3]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["auto.png", "ddp_join.png"]


def record(*ranks: tuple[int, float]) -> EpochRecord:
    """An epoch of ten seconds, from the batches and active seconds of each rank."""
    most = max(batches for batches, _ in ranks)
    return EpochRecord(
        3,
        tuple(RankRecord(n, most - n, n if n < most else None, active, 10.0) for n, active in ranks),
    )


def test_shares() -> None:
    epoch = record((10, 10.0), (5, 4.0), (0, 0.0))
    assert epoch.idle_share == pytest.approx(16 / 30)
    assert epoch.saving == pytest.approx(0.5)
    assert str(epoch) == (
        "Epoch 3: 15 batches (10, 5, 0 on 3 ranks) in 10.0 s, 53% of rank-seconds idle."
        " Joined: rank 2 at batch 0 after 0.0 s, rank 1 at batch 5 after 4.0 s."
    )
    # One batch more on one rank cannot be dealt out any better.
    assert record((3, 10.0), (4, 10.0)).saving == 0
    assert record((0, 0.0), (0, 0.0)).saving == 0


def test_many_ranks_are_summed_up() -> None:
    epoch = record(*((10, 10.0) for _ in range(14)), (2, 2.0), (4, 5.0), (6, 7.0))
    values = epoch.metrics()
    assert len(values) == 6 + 9
    assert (values["join/batches_min"], values["join/batches_max"]) == (2, 10)
    assert values["join/shadow_steps_mean"] == pytest.approx(18 / 17)
    assert str(epoch) == (
        "Epoch 3: 152 batches (2 to 10 on 17 ranks) in 10.0 s, 9% of rank-seconds idle."
        " Joined: rank 14 at batch 2 after 2.0 s, 1 more, rank 16 at batch 6 after 7.0 s."
    )
    assert len(record(*((10, 10.0) for _ in range(16))).metrics()) == 6 + 3 * 16


def test_its_arguments_are_checked_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JoinValueError, match="between 0 and 1, not 30"):
        JoinMonitor(reshard_above=30)
    with pytest.raises(JoinTypeError, match=r"got True. Write JoinMonitor\(plot='timeline.png'\)"):
        JoinMonitor(plot=True)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(JoinValueError, match=r"pip install 'torch-join\[plot\]'"):
        JoinMonitor("timeline.png")
    JoinMonitor()
