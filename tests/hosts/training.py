"""One rank's part of an uneven training on several hosts; prints what the parameters are in the end, or the error."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from torch_join import Join, JoinError

Batches = list[Tensor]


def plain(net: nn.Module, batches: Batches, does: str) -> dict[str, Any]:
    """Train in a plain loop; if it `does` so, rank 1 is "killed" in its last step, or each rank "waits" before."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.01)
    if does == "waits":
        print("ready", flush=True)
        time.sleep(3)
    begun = time.monotonic()
    with Join([model, optimizer], timeout=timedelta(seconds=5 if does == "waits" else 60)) as join:
        entered = time.monotonic() - begun
        for batch in join.batches(batches):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if dist.get_rank() == 1 and does == "killed" and join.step == len(batches) - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return {"entered": entered}


def of_fabric(net: nn.Module, batches: Batches, does: str) -> dict[str, Any]:
    from lightning.fabric import Fabric

    import lightning_join.fabric  # noqa: F401

    fabric = Fabric(strategy="ddp_join", accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(batches, batch_size=None), use_distributed_sampler=False)  # type: ignore[arg-type]
    for batch in loader:
        optimizer.zero_grad()
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    return {}


def of_accelerate(net: nn.Module, batches: Batches, does: str) -> dict[str, Any]:
    from accelerate_join import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for batch in accelerator.join_batches(batches):
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
    return {}


def of_lightning(net: nn.Module, batches: Batches, does: str) -> dict[str, Any]:
    import lightning.pytorch as pl

    import lightning_join  # noqa: F401

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Tensor) -> Tensor:
            return self.net(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(net.parameters(), lr=0.01)

        def train_dataloader(self) -> Any:
            return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    options |= {"enable_model_summary": False, "use_distributed_sampler": False, "max_epochs": 1}
    pl.Trainer(
        strategy="ddp_join", accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), **options
    ).fit(Module())
    return {}


def of_transformers(net: nn.Module, batches: Batches, does: str) -> dict[str, Any]:
    from transformers import TrainingArguments

    from accelerate_join.transformers import JoinTrainer

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.net(x).square().mean()}

    class Trainer(JoinTrainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader([{"x": batch} for batch in batches], batch_size=None)  # type: ignore[arg-type]

    arguments = TrainingArguments(
        "/tmp/unused", num_train_epochs=1, use_cpu=True, optim="sgd", learning_rate=0.01, lr_scheduler_type="constant",
        max_grad_norm=0.0, save_strategy="no", report_to=[], disable_tqdm=True, weight_decay=0.0,
    )  # fmt: skip
    Trainer(Loss(), arguments, train_dataset=batches).train()
    return {}


KINDS: dict[str, Callable[[nn.Module, Batches, str], dict[str, Any]]] = {
    "plain": plain,
    "Fabric": of_fabric,
    "Accelerate": of_accelerate,
    "Lightning": of_lightning,
    "Trainer": of_transformers,
}


def main(kind: str, does: str) -> None:
    """Train: rank 0 has two steps, rank 1 five, rank 2 eight."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = nn.Linear(1, 1).double()
    batches = [torch.full((2, 1), 1.0 + rank + step, dtype=torch.float64) for step in range(2 + 3 * rank)]
    try:
        found = KINDS[kind](net, batches, does)
    except JoinError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
        return
    parameters = [float(parameter.detach()) for parameter in net.parameters()]
    print(json.dumps({"parameters": parameters, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
