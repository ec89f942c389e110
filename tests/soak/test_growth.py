"""A thousand uneven epochs in one pair of processes, in which nothing grows, on each front end.

What a rank holds is looked at after each epoch: resident memory, threads, open files, process groups, and the keys of
the job's store. What counts is the slope after the first fifty.
"""

import ctypes
import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_join import DDPJoinStrategy
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.fabric import fabric_of
from tests.support.workers import Workers
from torch_join import Join, JoinMonitor

EPOCHS = int(os.environ.get("TORCH_JOIN_SOAK_EPOCHS", 1000))
WARM = 50  # epochs, in which caches fill
_MOST = 2.0  # MB, by which memory may have grown in the end: the pages of some malloc arenas
WHAT = ("memory in MB", "threads", "open files", "process groups", "keys in the store")


def held() -> tuple[float, ...]:
    """Return what this process holds, as `WHAT` says."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        len([*Path("/proc/self/task").iterdir()]),
        len([*Path("/proc/self/fd").iterdir()]),
        len(dist.distributed_c10d._world.pg_map),
        dist.distributed_c10d._get_default_store().num_keys(),
    )


def loader(rank: int) -> DataLoader[Any]:
    """Return this rank's shard: rank 0 has two batches, the other five."""
    return DataLoader(TensorDataset(torch.ones(2 + 3 * rank, 4)), batch_size=1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def plain(rank: int, epochs: int, look: Callable[[], None]) -> None:
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    batches, monitor = loader(rank), JoinMonitor()
    for epoch in range(epochs):
        # The monitor keeps a record of each epoch, as it says.
        monitor = JoinMonitor() if epoch % 100 == 0 else monitor
        with Join([ddp, optimizer], rebalance=epoch % 10 == 9, monitor=monitor) as join:
            for (x,) in join.batches(batches):
                optimizer.zero_grad()
                ddp(x).sum().backward()
                optimizer.step()
                if join.step == 1 and epoch % 10 != 9:
                    join.state_dict()
            with torch.no_grad():
                for (x,) in join.batches(batches):
                    dist.all_reduce(ddp(x).sum())
        look()


def lightning(rank: int, epochs: int, look: Callable[[], None]) -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.net(batch[0]).sum()
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validated", self.net(batch[0]).sum(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> Any:
            return loader(rank)

        val_dataloader = train_dataloader

        def on_train_epoch_end(self) -> None:
            look()

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPJoinStrategy(),
        max_epochs=epochs,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module())


def fabric(rank: int, epochs: int, look: Callable[[], None]) -> None:
    own = fabric_of(2)
    net = model()
    ddp, optimizer = own.setup(net, torch.optim.Adam(net.parameters(), lr=1e-3))
    batches = own.setup_dataloaders(loader(rank), use_distributed_sampler=False)
    for _ in range(epochs):
        for (x,) in batches:
            loss = ddp(x).sum()
            own.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            own.all_reduce(loss.detach())
        look()


def accelerate(rank: int, epochs: int, look: Callable[[], None]) -> None:
    from accelerate.data_loader import DataLoaderShard

    with accelerator_of(rank) as accelerator:
        net = model()
        ddp, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-3))
        batches = DataLoaderShard(TensorDataset(torch.ones(2 + 3 * rank, 4)), batch_size=1)
        for _ in range(epochs):
            for (x,) in accelerator.join_batches(batches):
                accelerator.backward(ddp(x).sum())
                optimizer.step()
                optimizer.zero_grad()
                accelerator.gather(x)
            look()


FRONT_ENDS = {"plain": plain, "lightning": lightning, "fabric": fabric, "accelerate": accelerate}


def watch(rank: int, name: str, epochs: int) -> list[list[float]]:
    """Train, and return what this rank held after each epoch."""
    seen = torch.zeros(epochs, len(WHAT), dtype=torch.float64)  # all at once: it must not grow itself
    rows = iter(seen)

    def look() -> None:
        next(rows).copy_(torch.tensor(held(), dtype=torch.float64))

    FRONT_ENDS[name](rank, epochs, look)
    assert next(rows, None) is None, "an epoch was not looked at"
    return seen.tolist()  # type: ignore[no-any-return]


def slope(values: list[float]) -> float:
    """Return by how much values grow, each against the one before, by least squares."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    above = sum((place - middle) * (value - mean) for place, value in enumerate(values))
    return above / sum((place - middle) ** 2 for place in range(len(values)))


def check(name: str, rank: int, seen: list[list[float]]) -> None:
    """Check that nothing has grown since the first epochs."""
    columns = {what: list(column) for what, column in zip(WHAT, zip(*seen[WARM:], strict=True), strict=True)}
    found = {what: slope(column) for what, column in columns.items()}
    print(f"\n{name}, rank {rank}, each epoch:", ", ".join(f"{what} {value:+.2g}" for what, value in found.items()))
    grown = {what: value * (len(seen) - WARM) for what, value in found.items()}
    assert grown.pop("memory in MB") < _MOST, f"memory grows by {1e6 * found['memory in MB']:.0f} bytes each epoch"
    # A thread of autograd's or the loader's may end a moment later, now and then.
    assert max(map(abs, grown.values())) < 0.5, found
    assert all(median(columns[what][:9]) == median(columns[what][-9:]) for what in grown), found


@pytest.mark.long
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_nothing_grows(workers: Workers, name: str) -> None:
    for rank, seen in enumerate(workers.run(2, watch, name, EPOCHS, deadline=60 + 2.0 * EPOCHS, store="tcp")):
        check(name, rank, seen)


@pytest.mark.parametrize("leaks", [False, True])
def test_a_leak_is_noticed(leaks: bool) -> None:
    files, rows = [], []
    for epoch in range(WARM + 20):
        if leaks or epoch == 0:
            files.append(os.open(os.devnull, os.O_RDONLY))
        rows.append([0.0, 0.0, float(len([*Path("/proc/self/fd").iterdir()])), 0.0, 0.0])
    for file in files:
        os.close(file)
    with pytest.raises(AssertionError, match="open files") if leaks else nullcontext():
        check("leaking", 0, rows)


def test_growth_is_noticed() -> None:
    assert slope([0.0, 0.1, 0.2, 0.3]) == pytest.approx(0.1)
    assert slope([1.0, 2.0, 1.0, 2.0, 1.0]) == pytest.approx(0.0)
