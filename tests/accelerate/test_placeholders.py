"""A finished process runs the step itself: what Accelerate gathers, logs and counts is of those with a batch."""

import warnings
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.fabric import to_the_end
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
        gathered, reduced, widths, synced = [], [], [], []
        for x in accelerator.join_batches(loader, placeholder="last", weighting="active"):
            with accelerator.accumulate(model):
                out = model(x)
                loss = out.square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
            gathered.append(accelerator.gather_for_metrics(x[:, 0]).tolist())
            wide = accelerator.pad_across_processes(x[:, :1].repeat(1, 5 - LENGTHS[rank]), dim=1, pad_index=-1)
            widths.append(accelerator.gather(wide).ne(-1).sum(1).tolist())
            reduced.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.log({"loss": loss.item()})
            accelerator.print(loss.item())
        return log.values, gathered, reduced, widths, synced, net.weight.flatten().tolist()


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
    for _, gathered, reduced, widths, synced, weight in ranks:
        rows = [
            [rows_of(rank, step)[:, 0] for rank, length in enumerate(LENGTHS) if step < length] for step in range(4)
        ]
        assert gathered == [torch.cat(each).tolist() for each in rows]
        active = [[rank for rank, length in enumerate(LENGTHS) if step < length] for step in range(4)]
        assert widths == [[5 - LENGTHS[r] for r in each for _ in rows_of(r, 0)] for each in active]
        assert reduced == pytest.approx(means)
        assert synced == [False, False, True, True]
        assert weight == pytest.approx(net.weight.flatten().tolist(), abs=1e-10)


def log_alone(rank: int, what: str) -> list[str]:
    """Log in each step on the main process alone, or on all of them what cannot be sent."""
    with accelerator_of(rank) as accelerator, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net, log = network(), Log()
        accelerator.trackers = [log] if rank == 0 else []
        model = accelerator.prepare(net)
        data: Any = [rows_of(rank, step) for step in range((1, 3)[rank])]
        for x in accelerator.join_batches(DataLoaderShard(data, batch_size=None), placeholder="last"):
            accelerator.backward(model(x).square().mean())
            if what == "object":
                accelerator.log({"loss": object()})
            elif rank == 0:
                accelerator.log({"loss": 0.0})
        accelerator.end_training()
        assert len(log.values) == (rank == 0)
        return [str(one.message) for one in caught]


def test_what_a_finished_main_process_cannot_log(workers: Workers) -> None:
    warned, _ = workers.run(2, log_alone, "object")
    assert sum("alues that rank 1 logged in step" in text for text in warned) == 2
    for outcome in workers.outcomes(2, to_the_end, log_alone, "alone", deadline=40.0):
        assert "that rank completed the step without logging" in outcome.error


def see(rank: int, samples: int) -> list[list[float]]:
    configuration = DataLoaderConfiguration(use_seedable_sampler=True)
    with accelerator_of(rank, dataloader_config=configuration) as accelerator:
        loader = DataLoader(torch.arange(float(samples))[:, None].double(), shuffle=True)
        net = nn.Linear(1, 1).double()
        model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters()), loader)
        seen: list[list[float]] = []
        with accelerator.join_uneven_inputs(placeholder="last") as join:
            for _ in range(3):
                seen.append([])
                for x in loader:
                    seen[-1] += [] if join.joined else x.flatten().tolist()
                    accelerator.backward(model(x).mean())
                    optimizer.step()
                    optimizer.zero_grad()
        assert loader.iteration == 3
        return seen


@pytest.mark.parametrize("samples", [2, 7])
def test_each_epoch_is_shuffled_anew(workers: Workers, samples: int) -> None:
    """Lengths are certain; the rank with most batches ends its epoch as the others do, and one without a batch."""
    ranks = workers.run(3, see, samples)
    for epoch in zip(*ranks, strict=True):
        assert sorted(number for seen in epoch for number in seen) == [*range(samples)]
    assert samples == 2 or len({str(epoch) for epoch in zip(*ranks, strict=True)}) == 3
