"""Fits whose modules note which batches they have trained on, and go on from checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from tests.support.front_ends.lightning import ANY_CHECKPOINT, Fit, Module, Result, build_trainer, result_of
from tests.support.run import loss_of

Sample = tuple[Tensor, Tensor, int]


class Samples(Dataset[Sample | None]):
    """A rank's batches, each with its number."""

    def __init__(self, case: Fit, rank: int, gaps: bool = False) -> None:
        self.case, self.rank, self.gaps = case, rank, gaps

    def __len__(self) -> int:
        return self.case.lengths_in(0)[self.rank]

    def __getitem__(self, index: int) -> Sample | None:
        if self.gaps and self.rank == 0 and index == 1:
            return None
        return *self.case.batch(self.rank, 0, index), index


class Stream(IterableDataset[Sample | None]):
    """The same without a length, in an order that changes with each pass; `state` says where it is."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.state = {"passes": 0, "index": 0}

    def __iter__(self) -> Iterator[Sample | None]:
        # The one dictionary is changed in place: a state that is not copied would go on.
        while self.state["index"] < len(self.samples):
            self.state["index"] += 1
            yield self.samples[(self.state["index"] + self.state["passes"]) % len(self.samples)]
        self.state.update(passes=self.state["passes"] + 1, index=0)

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


@dataclass(frozen=True)
class Reading:
    """How a case is read."""

    case: Fit
    early: bool = False  # the data is set up before the checkpoint is loaded
    stateful: bool = True
    mode: str | None = None  # how it is combined with a loader that is shorter
    gaps: bool = False  # rank 0 has a batch that is None, and rank 1 leaves at its second
    validates: bool = False
    strategy: str | None = None
    seeded: bool = True  # it shuffles by a generator of its own


class Reader(Module):
    """Notes the epoch, step and number of every batch that it trains on."""

    def __init__(self, run: Reading) -> None:
        super().__init__(run.case)
        self.reads = run
        self.seen: list[tuple[int, ...]] = []

    def setup(self, stage: str) -> None:
        if self.reads.early:
            assert self.trainer.estimated_stepping_batches

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        loader = self.loader(Samples(self.case, rank, self.reads.gaps))
        if self.reads.mode is None:
            return loader
        shorter = Fit([length // 2 for length in self.case.lengths_in(0)], iterable=self.case.iterable)
        return CombinedLoader([self.loader(Samples(shorter, rank)), loader], self.reads.mode)

    def loader(self, data: Samples) -> DataLoader[Any]:
        kind = StatefulDataLoader if self.reads.stateful else DataLoader
        if self.case.iterable:
            return kind(Stream(data), batch_size=None)
        # A generator of the sampler's own: from one given to the loader, torchdata draws once less when it resumes.
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(data.rank)) if len(data) else None
        return kind(data, batch_size=None, sampler=sampler)

    def val_dataloader(self) -> Any:
        return DataLoader(range(1 + self.trainer.global_rank)) if self.reads.validates else []

    def validation_step(self, *_: Any) -> None:
        pass

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.reads.gaps and self.trainer.global_rank == 1 and batch_idx == 1 else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = [batch] if self.reads.mode is None else [each for each in batch if each is not None]
        self.seen.append((self.trainer.current_epoch, batch_idx, *(int(number) for *_, number in batches)))
        return sum((loss_of(self.net, each[:2]) for each in batches), torch.zeros(()))


class Unseeded(Reader):
    """Shuffles by torch's own generator, as whoever passes `shuffle=True` does."""

    def loader(self, data: Samples) -> DataLoader[Any]:
        return DataLoader(data, batch_size=None, shuffle=len(data) > 0)


class SavesEverywhere(pl.Callback):
    """Saves in each step while the batch is trained on, after it, and at the end of epochs and of the fit."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def save(self, trainer: pl.Trainer, name: str) -> None:
        trainer.save_checkpoint(f"{self.folder}/{name}-{trainer.current_epoch}-{trainer.fit_loop.batch_idx}.ckpt")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "before")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "after")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "validated")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "end")


def build(run: Reading, **options: Any) -> pl.Trainer:
    if run.validates:
        options = {"val_check_interval": 2, "num_sanity_val_steps": 0, **options}
    return build_trainer(run.case, strategy=run.strategy, **options)


def fit_whole(rank: int, run: Reading, folder: str) -> tuple[Result, list[tuple[int, ...]]]:
    module = (Reader if run.seeded else Unseeded)(run)
    trainer = build(run, callbacks=[SavesEverywhere(folder)])
    trainer.fit(module)
    trainer.save_checkpoint(f"{folder}/fitted.ckpt")
    return result_of(trainer, module), module.seen


def fit_from(run: Reading, path: str) -> tuple[Result, list[tuple[int, ...]]]:
    module = (Reader if run.seeded else Unseeded)(run)
    trainer = build(run)
    trainer.fit(module, ckpt_path=path, **ANY_CHECKPOINT)
    return result_of(trainer, module), module.seen


def whole_and_resumed(rank: int, run: Reading, folder: str, names: list[str]) -> list[Any]:
    return [fit_whole(rank, run, folder), *(fit_from(run, f"{folder}/{name}.ckpt") for name in names)]
