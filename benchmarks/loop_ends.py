"""Measure what the start and the end of a loop cost: epochs of four small batches, even and uneven, in each front end.

    python -m benchmarks.loop_ends [plain] [fabric] [accelerate] [lightning] [trainer]

For each front end it prints the milliseconds of an epoch without torch-join on even inputs, and with it on even inputs
and on uneven ones (two ranks: four batches, and two). They are CPU time of the longer rank, since that is steadier than
the time of day on a shared machine. Each number is the median of 40 epochs.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

EPOCHS, WARM_UP, BATCHES = 45, 5, 4
Epochs = Iterator[None]  # yields once before the first epoch, and after each one


def data_of(length: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(4)}] * length


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def step(model: Any, optimizer: Any, batch: Any, backward: Callable[[Any], None]) -> None:
    backward(model(**batch)["loss"])
    optimizer.step()
    optimizer.zero_grad()


def plain(joins: bool, length: int) -> Epochs:
    from torch_join import Join

    model = DistributedDataParallel(Net())
    optimizer, loader = torch.optim.Adam(model.parameters()), DataLoader(data_of(length))  # type: ignore[arg-type,var-annotated]
    with Join([model, optimizer], enable=joins) as join:
        for _ in range(EPOCHS):
            yield
            for batch in join.batches(loader):
                step(model, optimizer, batch, torch.Tensor.backward)
    yield


def fabric(joins: bool, length: int) -> Epochs:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from lightning_join.fabric import DDPJoinStrategy

    each = Fabric(accelerator="cpu", devices=2, strategy=DDPJoinStrategy() if joins else DDPStrategy())
    each.launch()
    net = Net()
    model, optimizer = each.setup(net, torch.optim.Adam(net.parameters()))
    loader: Any = each.setup_dataloaders(DataLoader(data_of(length)), use_distributed_sampler=False)  # type: ignore[arg-type]
    for _ in range(EPOCHS):
        yield
        for batch in loader:
            step(model, optimizer, batch, each.backward)
    yield


def accelerate(joins: bool, length: int) -> Epochs:
    from accelerate.data_loader import DataLoaderShard

    from accelerate_join import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
    loader: Any = DataLoaderShard(data_of(length))  # type: ignore[arg-type]
    for _ in range(EPOCHS):
        yield
        for batch in accelerator.join_batches(loader) if joins else loader:
            step(model, optimizer, batch, accelerator.backward)
    yield


def lightning(joins: bool, length: int) -> list[float]:
    import lightning.pytorch as pl

    import lightning_join  # noqa: F401  registers the strategy

    times: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def on_train_epoch_start(self) -> None:
            times.append(time.process_time())

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_join" if joins else "ddp",
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Module(), DataLoader(data_of(length)))  # type: ignore[arg-type]
    return times


def trainer(joins: bool, length: int) -> list[float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from accelerate_join.transformers import JoinTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.process_time())

    kind: Any = type("Joined", (JoinTrainer,), {"own_shards": True}) if joins else Trainer
    with TemporaryDirectory() as folder:
        options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=1, num_train_epochs=EPOCHS, remove_unused_columns=False, **options
        )
        rows = data_of(length if joins else 2 * length)  # Trainer's own deals them out
        kind(Net(), arguments, train_dataset=rows, callbacks=[Clock()]).train()
    return times


WAYS: dict[str, Callable[[bool, int], Any]] = {
    each.__name__: each for each in (plain, fabric, accelerate, lightning, trainer)
}


def measure(way: str) -> None:
    """Print the row of a front end; each of the two ranks calls this."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    row = []
    for joins, lengths in ((False, (BATCHES, BATCHES)), (True, (BATCHES, BATCHES)), (True, (2, BATCHES))):
        found = WAYS[way](joins, lengths[dist.get_rank()])
        times = found if isinstance(found, list) else [time.process_time() for _ in found]
        spent = [1000 * (after - before) for before, after in pairwise(times)][WARM_UP:]
        row.append(statistics.median(spent))
    if dist.get_rank() == 1:
        print(f"| {way} | " + " | ".join(f"{each:.1f}" for each in row) + " |", flush=True)
    os._exit(0)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        measure(sys.argv[1])
    print("| | without | even | uneven |\n|---|---:|---:|---:|", flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks.loop_ends"]
    for name in sys.argv[1:] or WAYS:
        subprocess.run([*torchrun, name], check=True, env={**os.environ, "ACCELERATE_USE_CPU": "true"})
