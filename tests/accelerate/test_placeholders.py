"""A finished process runs the step itself: what Accelerate gathers, logs and counts is of those with a batch."""

from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.tracking import GeneralTracker
from torch import Tensor, nn

from tests.support.front_ends.accelerate import accelerator_of
from tests.support.workers import Workers

LENGTHS = (1, 4, 2)


class Log(GeneralTracker):
    name = "log"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    @property
    def tracker(self) -> Any:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.values.append(values["loss"])


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


def train(rank: int) -> tuple[Any, ...]:
    with accelerator_of(rank, gradient_accumulation_steps=3) as accelerator:
        net, log = network(), Log()
        accelerator.trackers = [log] if rank == 0 else []
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        data: Any = [rows_of(rank, step) for step in range(LENGTHS[rank])]
        loader = DataLoaderShard(data, batch_size=None)
        gathered, reduced, printed, synced = [], [], [], []
        for x in accelerator.join_batches(loader, placeholder="last", weighting="active"):
            with accelerator.accumulate(model):
                out = model(x)
                loss = out.square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
            gathered.append(accelerator.gather_for_metrics(x[:, 0]).tolist())
            reduced.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.log({"loss": loss.item()})
            accelerator.print(loss.item())
        return log.values, gathered, reduced, printed, synced, net.weight.flatten().tolist()


def test_what_is_gathered_and_logged(workers: Workers, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = workers.run(3, train)
    net = network()
    optimizer, means, firsts = torch.optim.SGD(net.parameters(), lr=0.1), [], []
    for step in range(4):
        batches = [rows_of(rank, step) for rank, length in enumerate(LENGTHS) if step < length]
        losses = torch.stack([net(x).square().mean() for x in batches])
        (losses.mean() / 3).backward()
        means.append(losses.mean().item())
        firsts.append(losses[0].item())
        if step in (2, 3):
            optimizer.step()
            optimizer.zero_grad()
    assert ranks[0][0] == pytest.approx(firsts)
    for _, gathered, reduced, _, synced, weight in ranks:
        rows = [
            [rows_of(rank, step)[:, 0] for rank, length in enumerate(LENGTHS) if step < length] for step in range(4)
        ]
        assert gathered == [torch.cat(each).tolist() for each in rows]
        assert reduced == pytest.approx(means)
        assert synced == [False, False, True, True]
        assert weight == pytest.approx(net.weight.flatten().tolist(), abs=1e-10)
