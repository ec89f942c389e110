"""`JoinMonitor` in Fabric: the numbers of training loops, in its loggers and on a page."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_join.fabric import DDPJoinStrategy
from tests.support.front_ends.fabric import fabric_of
from tests.support.report import summary_of
from tests.support.workers import Workers
from torch_join import JoinMonitor
from torch_join.integration import EpochRecord

LENGTHS = (2, 5, 0)


def train(rank: int, lengths: tuple[int, ...], folder: str, rebalance: bool, leaves: bool) -> list[EpochRecord]:
    monitor = JoinMonitor(f"{folder}/reports")
    logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
    strategy = DDPJoinStrategy(monitor=monitor, rebalance=rebalance)
    fabric = fabric_of(len(lengths), strategy, loggers=logger)
    net = nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data: Any = DataLoader(torch.ones(2 * lengths[rank], 2), batch_size=2)  # type: ignore[arg-type]
    loader = fabric.setup_dataloaders(data, use_distributed_sampler=False)
    for _ in range(2):
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            fabric.backward(model(batch).mean())
            optimizer.step()
            if leaves and step == 1:
                break
        with torch.no_grad():
            for batch in loader:  # no epoch
                model(batch)
    fabric.barrier()
    return monitor.epochs


@pytest.mark.parametrize("how", ["serving", "rebalance", "break"])
def test_the_numbers_of_each_epoch(workers: Workers, tmp_path: Path, how: str) -> None:
    lengths = (5, 5, 5) if how == "break" else LENGTHS
    found = workers.run(3, train, lengths, str(tmp_path), how == "rebalance", how == "break")
    epochs = found[0]
    assert all(theirs == epochs for theirs in found)
    assert len(epochs) == 2
    batches, shadow_steps = {
        "serving": ([2, 5, 0], [3, 0, 5]),
        "rebalance": ([3, 2, 2], [0, 1, 1]),
        "break": ([2, 2, 2], [0, 0, 0]),
    }[how]
    for epoch in epochs:
        assert sorted(rank.batches for rank in epoch.ranks) == sorted(batches)
        assert sorted(rank.shadow_steps for rank in epoch.ranks) == sorted(shadow_steps)
        if how != "rebalance":
            assert [rank.batches for rank in epoch.ranks] == batches
        else:
            assert (epoch.steps_saved, epoch.steps_to_save) == (2, 0)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    steps = max(batches)
    assert [int(row["step"]) for row in rows] == [steps - 1, 2 * steps - 1]
    for row, epoch in zip(rows, epochs, strict=True):
        for name, value in epoch.metrics().items():
            assert float(row[name]) == pytest.approx(value)
    report = tmp_path / "reports" / "join-report.html"
    assert summary_of(report) == f"3 ranks, 2 epochs, {2 * sum(batches)} batches"
