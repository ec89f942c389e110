"""`JoinMonitor` with Accelerate: the numbers of each epoch, in its trackers and on a page."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker, on_main_process
from torch import nn
from torch.utils.data import DataLoader

from tests.support.front_ends.accelerate import accelerator_of
from tests.support.report import summary_of
from tests.support.workers import Workers
from torch_join import JoinMonitor
from torch_join.integration import EpochRecord

LENGTHS = (2, 5, 0)
Logged = list[tuple[dict[str, float], int | None]]


class Kept(GeneralTracker):
    """Keeps what is logged, on the main process."""

    name = "kept"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.logged: Logged = []

    @on_main_process
    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.logged.append((values, step))


def train(rank: int, lengths: tuple[int, ...], folder: str, how: str) -> tuple[list[EpochRecord], Logged]:
    kept, monitor = Kept(), JoinMonitor(f"{folder}/report.html")
    with accelerator_of(rank, log_with=kept) as accelerator:
        accelerator.init_trackers("run")
        net = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader: Any = DataLoader(torch.ones(2 * lengths[rank], 2), batch_size=2)  # type: ignore[arg-type]

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            accelerator.backward(model(batch).mean())
            optimizer.step()

        for _ in range(2):
            if how == "loop":
                for batch in accelerator.join_batches(loader, monitor=monitor):
                    step(batch)
            elif how == "left":
                for index, batch in enumerate(accelerator.join_batches(loader, monitor=monitor)):
                    step(batch)
                    if index == 1:
                        break
            else:
                with accelerator.join_uneven_inputs(monitor=monitor) as join:
                    for batch in join.batches(loader):
                        step(batch)
        accelerator.end_training()
    return monitor.epochs, kept.logged


@pytest.mark.parametrize("how", ["loop", "with", "left"])
def test_the_numbers_of_each_epoch(workers: Workers, tmp_path: Path, how: str) -> None:
    lengths = (4, 5, 3) if how == "left" else LENGTHS
    (epochs, logged), *others = workers.run(3, train, lengths, str(tmp_path), how)
    assert all(theirs == epochs and nothing == [] for theirs, nothing in others)
    batches = [2, 2, 2] if how == "left" else [*LENGTHS]
    assert [[rank.batches for rank in epoch.ranks] for epoch in epochs] == [batches, batches]
    assert all(rank.left == (how == "left") for epoch in epochs for rank in epoch.ranks)
    assert [step for _, step in logged] == [None, None]  # W&B drops values of earlier steps
    for (values, _), epoch in zip(logged, epochs, strict=True):
        assert values == pytest.approx(epoch.metrics())
    assert summary_of(tmp_path / "report.html") == f"3 ranks, 2 epochs, {2 * sum(batches)} batches"


@pytest.mark.parametrize("how", ["loop", "left"])
def test_one_process(workers: Workers, tmp_path: Path, how: str) -> None:
    ((epochs, logged),) = workers.run(1, train, (3,), str(tmp_path), how)
    batches = 2 if how == "left" else 3
    assert [(epoch.batches, epoch.steps_to_save) for epoch in epochs] == [(batches, 0), (batches, 0)]
    assert [step for _, step in logged] == [None, None]
