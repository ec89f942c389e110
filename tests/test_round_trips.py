"""How often ranks wait for each other, one wait after the other, in an epoch: what a slow network multiplies."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import lightning_join  # noqa: F401
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.inside import counting_trips
from tests.support.workers import Workers
from torch_join import Join

STEPS = 6  # of rank 0, in each epoch


def epochs_of(rank: int, uneven: bool) -> Iterator[list[Tensor]]:
    for _ in range(4):
        yield [torch.ones(2, 3)] * (STEPS - 3 * uneven * rank)


def step(net: Callable[[Tensor], Tensor], optimizer: Any, batches: Iterable[Tensor]) -> None:
    for batch in batches:
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(rank: int, uneven: bool) -> list[int]:
    net = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    with Join([net, optimizer]) as join, counting_trips() as counts:
        for batches in epochs_of(rank, uneven):
            step(net, optimizer, join.batches(batches))
            found.append(counts.pop("trips"))
    return found


def accelerate(rank: int, uneven: bool) -> list[int]:
    found = []
    with accelerator_of(rank) as accelerator, counting_trips() as counts:
        net, optimizer = accelerator.prepare(model := nn.Linear(3, 1), torch.optim.SGD(model.parameters(), 0.1))
        for batches in epochs_of(rank, uneven):
            step(net, optimizer, accelerator.join_batches(batches))
            found.append(counts.pop("trips"))
    return found


class Module(pl.LightningModule):
    def __init__(self, uneven: bool) -> None:
        super().__init__()
        self.net, self.uneven = nn.Linear(3, 1), uneven

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        batches = next(epochs_of(self.trainer.global_rank, self.uneven))
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class Epochs(pl.Callback):
    def __init__(self, counts: Any) -> None:
        self.counts, self.found = counts, list[int]()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # from the first step of an epoch to that of the next
            self.found.append(self.counts.pop("trips", 0))


def lightning(rank: int, uneven: bool) -> list[int]:
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with counting_trips() as counts:
        callback = Epochs(counts)
        trainer = pl.Trainer(
            strategy="ddp_join", accelerator="cpu", devices=dist.get_world_size(), max_epochs=4, callbacks=[callback],
            use_distributed_sampler=False, **options,
        )  # fmt: skip
        trainer.fit(Module(uneven))
    return callback.found


MOST = {"plain": (1, 6), "accelerate": (2, 8), "lightning": (12, 15)}  # of an even epoch, and of an uneven one
WAYS = {"plain": plain, "accelerate": accelerate, "lightning": lightning}


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_waits_so_often_at_most(workers: Workers, way: str, uneven: bool) -> None:
    """One of an uneven epoch in plain loops is for nobody, and five of Lightning's are behind forwards."""
    waits = workers.run(2, WAYS[way], uneven)[0]
    assert min(waits[1:]) <= MOST[way][uneven], waits
