"""One training for each front end, that saves in the middle of an uneven epoch, or goes on from there.

The files in `0.2.0` were written by `python -m tests.states.trainings` under that version.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler
from transformers import TrainingArguments

import lightning_join  # noqa: F401  its strategies
from accelerate_join.transformers import JoinTrainer
from tests.support.front_ends.accelerate import accelerator_of
from torch_join import Join

FILES = Path(__file__).parent / "0.2.0"
SAVED = (0, 2)  # after this epoch's step
Seen = dict[tuple[int, int], list[int]]  # by epoch and step, the samples that were trained on


class Samples(Dataset[Any]):
    """A rank's numbers: rank 1 has two steps', rank 0 five steps'. Or all ranks', for a framework to deal out."""

    def __init__(self, rank: int | None, as_dict: bool = False) -> None:
        self.numbers = [*range(14)] if rank is None else [*range(100 * rank, 100 * rank + (10, 4)[rank])]
        self.as_dict = as_dict

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return {"number": self.numbers[index]} if self.as_dict else self.numbers[index]


def shuffled(rank: int | None) -> DataLoader[Any]:
    return DataLoader(Samples(rank), 2, shuffle=True, generator=torch.Generator().manual_seed(3 + (rank or 0)))


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    return (net(batch.float().reshape(-1, 1) / 10) - 1).square().mean()


def in_a_loop(rank: int, folder: Path, resumes: bool) -> Seen:
    net, loader, seen = DistributedDataParallel(nn.Linear(1, 1)), shuffled(rank), Seen()
    optimizer, join = torch.optim.SGD(net.parameters(), 0.01), Join([net])
    if resumes:
        join.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    with join:
        for epoch in range(2):
            for batch in join.batches(loader):
                seen[epoch, join.step] = batch.tolist()
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
                if (epoch, join.step) == SAVED and not resumes:
                    state = join.state_dict()
                    if rank == min(join.active_ranks):
                        torch.save(state, folder / "state.pt")
    return seen


class Module(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net, self.folder, self.seen = nn.Linear(1, 1), folder, Seen()

    def train_dataloader(self) -> Any:
        data = Samples(self.global_rank)
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3 + self.global_rank))
        return StatefulDataLoader(data, 2, sampler=sampler)

    def training_step(self, batch: Tensor, step: int) -> Tensor:
        self.seen[self.current_epoch, step] = batch.tolist()
        return loss_of(self.net, batch)

    def on_train_batch_end(self, _: Any, __: Any, step: int) -> None:
        if (self.current_epoch, step) == SAVED:
            self.trainer.save_checkpoint(self.folder / "state.ckpt")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def in_lightning(rank: int, folder: Path, resumes: bool) -> Seen:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "default_root_dir": folder, "use_distributed_sampler": False}
    module = Module(folder)
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp_join", **quiet)
    trainer.fit(module, ckpt_path=str(FILES / "lightning" / "state.ckpt") if resumes else None, weights_only=False)
    return module.seen


def in_accelerate(rank: int, folder: Path, resumes: bool) -> Seen:
    seen, net = Seen(), nn.Linear(1, 1)
    with accelerator_of(rank, dataloader_config=DataLoaderConfiguration(even_batches=False)) as accelerator:
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        model, optimizer, loader = accelerator.prepare(net, optimizer, shuffled(None))
        if resumes:
            accelerator.load_state(str(folder))
        for epoch in range(2):
            done = SAVED[1] + 1 if resumes and not epoch else 0
            batches = accelerator.skip_first_batches(loader, done) if done else loader
            with accelerator.join_uneven_inputs([model]):
                for step, batch in enumerate(batches, done):
                    seen[epoch, step] = batch.tolist()
                    optimizer.zero_grad()
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    if (epoch, step) == SAVED and not resumes:
                        accelerator.save_state(str(folder))
    return seen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = nn.Linear(1, 1), []

    def forward(self, number: Tensor) -> dict[str, Tensor]:
        self.seen.append(number.tolist())
        return {"loss": loss_of(self.net, number)}


def in_trainer(rank: int, folder: Path, resumes: bool) -> Seen:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": SAVED[1] + 1, "save_total_limit": None}
    arguments = TrainingArguments(
        str(folder), num_train_epochs=2, use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=0.01, **saves
    )
    arguments.per_device_train_batch_size = 2
    net = Net()
    trainer = JoinTrainer(net, arguments, train_dataset=Samples(None, as_dict=True))
    checkpoint = FILES / "trainer" / f"checkpoint-{SAVED[1] + 1}"
    trainer.train(resume_from_checkpoint=str(checkpoint) if resumes else False)
    return {(0, number): samples for number, samples in enumerate(net.seen)}


TRAININGS: dict[str, Callable[[int, Path, bool], Seen]] = {
    "loop": in_a_loop,
    "lightning": in_lightning,
    "accelerate": in_accelerate,
    "trainer": in_trainer,
}


def train(rank: int, name: str, folder: str, resumes: bool) -> Seen:
    """Return what this rank trains on."""
    torch.manual_seed(5)
    return TRAININGS[name](rank, Path(folder), resumes)


def _write(rank: int, name: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if name != "lightning":
        dist.init_process_group("gloo")
    train(rank, name, str(FILES / name), resumes=False)


if __name__ == "__main__":
    for number, which in enumerate(sys.argv[1:] or TRAININGS):
        shutil.rmtree(FILES / which, ignore_errors=True)
        (FILES / which).mkdir(parents=True)
        torch.multiprocessing.spawn(_write, args=(which, 29600 + number), nprocs=2)
        for more in (FILES / which).glob("checkpoint-[!3]"):
            shutil.rmtree(more)
        for more in (FILES / which).glob("*/training_args.bin"):
            more.unlink()
