"""Training resumed from inside an epoch: the batches that were left, and the same bits at the end."""

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from tests.covering import others_long
from tests.support.front_ends.lightning import (
    ANY_CHECKPOINT,
    Fit,
    Module,
    Result,
    assert_same_bits,
    build_trainer,
    result_of,
)
from tests.support.run import loss_of
from tests.support.workers import Workers
from torch_join import JoinError

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


CASES = [
    Reading(Fit((2, 4), epochs=2, optimizer=optimizer, scheduler="step", iterable=iterable), early)
    for iterable, optimizer in ((False, "adam"), (True, "sgd"))
    for early in (False, True)
]
CASES += [
    Reading(Fit((4, 2), epochs=2, optimizer="sgd", scheduler="step", weighting="samples", ragged=True)),
    Reading(Fit((4, 2), epochs=2, scheduler="epoch", iterable=True, weighting="samples", ragged=True)),
    Reading(Fit((3, 0, 4), epochs=2, optimizer="sgd", scheduler="step"), early=True),
    Reading(Fit((0, 4, 1), epochs=2, scheduler="step", iterable=True)),
    Reading(Fit((2, 6), epochs=2, iterable=True), mode="max_size_cycle"),
    Reading(Fit((6, 2), epochs=2, iterable=True), mode="max_size"),
    Reading(Fit((6, 2), epochs=2), mode="max_size"),
    Reading(Fit((6, 4), epochs=2, iterable=True), gaps=True),
    Reading(Fit((6, 4), epochs=2, optimizer="sgd"), gaps=True, early=True),
    Reading(Fit((6, 2), epochs=2), stateful=False, mode="max_size_cycle"),
    Reading(Fit((6, 4), epochs=2), stateful=False, gaps=True),
    Reading(Fit((2, 4), epochs=2), validates=True),
    Reading(Fit((4, 2), epochs=2, iterable=True), validates=True),
]


@pytest.mark.parametrize("number", others_long(range(len(CASES)), *range(0, len(CASES), 2)))
def test_what_was_left(workers: Workers, tmp_path: Path, number: int) -> None:
    run = CASES[number]
    last = max(run.case.lengths_in(0)) - 1 - run.gaps
    places = {"before-0-0": (0, 0), "after-0-0": (0, 1), "before-0-2": (0, 2), "after-0-2": (0, 3)}
    places |= {f"after-0-{last}": (1, 0), f"end-0-{last}": (1, 0), "after-1-1": (1, 2)}
    if run.validates:
        places = {"validated-0-1": (0, 2), "validated-0-3": (1, 0), "validated-1-1": (1, 2)}
    results = workers.run(run.case.world_size, whole_and_resumed, run, str(tmp_path), list(places))
    for number, (name, place) in enumerate(places.items(), start=1):
        for rank, of_rank in enumerate(results):
            (whole, everything), (resumed, seen) = of_rank[0], of_rank[number]
            assert seen == [it for it in everything if it[:2] >= place], (name, rank)
            assert_same_bits([whole, resumed])
            if not run.gaps:
                assert len(everything) == 2 * run.case.lengths_in(0)[rank]
        assert_same_bits([of_rank[number][0] for of_rank in results])


def fit_after_the_end(rank: int, run: Reading, longer: Reading, path: str) -> tuple[Any, Any]:
    fit_whole(rank, run, path)
    return fit_from(longer, f"{path}/fitted.ckpt"), fit_whole(rank, longer, f"{path}/longer")


@pytest.mark.parametrize("iterable", [False, True])
def test_a_checkpoint_that_is_saved_after_the_fit(workers: Workers, tmp_path: Path, iterable: bool) -> None:
    run, longer = (Reading(Fit((2, 1), epochs=epochs, iterable=iterable)) for epochs in (1, 2))
    for (resumed, seen), (whole, everything) in workers.run(2, fit_after_the_end, run, longer, str(tmp_path)):
        assert seen == [it for it in everything if it[0] == 1]
        assert_same_bits([whole, resumed])


def fit_warning(rank: int, run: Reading, path: str) -> tuple[list[tuple[int, ...]], int, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, seen = fit_from(run, path)
    return seen, result.global_step, "\n".join(str(each.message) for each in caught)


@pytest.mark.parametrize("world", [(4,), (2, 4), (4, 0)])
@pytest.mark.parametrize("iterable", [False, True])
def test_loaders_without_a_state(workers: Workers, tmp_path: Path, world: tuple[int, ...], iterable: bool) -> None:
    run = Reading(Fit(world, epochs=2, iterable=iterable), stateful=False)
    whole = workers.run(len(world), fit_whole, run, str(tmp_path))
    for step in (1, 3):
        path = f"{tmp_path}/after-0-{step - 1}.ckpt"
        results = workers.run(len(world), fit_warning, run, path)
        for length, (seen, steps, warned), (_, everything) in zip(world, results, whole, strict=True):
            if len(world) > 1:
                assert seen == [it for it in everything if it[:2] >= (0, step)]
                assert "not resumable" not in warned
                assert "begin anew" not in warned
                continue
            # They begin anew, in one process: it has as many batches as it had left, or all of them without a length.
            left = length if iterable else max(length - step, 0)
            assert [index for epoch, index, _ in seen if epoch == 0] == list(range(step, step + left))
            assert steps == (step + 8 if iterable else 8)
            assert ("your dataloader is not resumable" in warned) == (not iterable)
        if len(world) == 1:
            (alone,) = workers.run(1, fit_warning, dataclasses.replace(run, strategy="ddp"), path)
            assert results[0][:2] == alone[:2]
            assert ("not resumable" in alone[2]) == (not iterable)


def test_a_place_that_nobody_can_have_again_warns(workers: Workers, tmp_path: Path) -> None:
    run = Reading(Fit((6, 4), epochs=2), stateful=False, mode="max_size_cycle", seeded=False)
    workers.run(2, fit_whole, run, str(tmp_path))
    results = workers.run(2, fit_warning, run, f"{tmp_path}/after-0-3.ckpt")
    assert "where train dataloaders were in it is not known (DataLoader: A CombinedLoader" in results[0][2]
    assert "give it one, `DataLoader(..., generator=torch.Generator())`" in results[0][2]
    assert [steps for _, steps, _ in results] == [12, 12]


def resuming_fails(rank: int, run: Reading, path: str) -> str:
    with pytest.raises(JoinError) as error:
        fit_from(run, path)
    return str(error.value)


class Unplaced(IterableDataset[Sample | None]):
    """A stream that does not know its place: torchdata reads it again up to there."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Sample | None]:
        yield from map(self.samples.__getitem__, range(len(self.samples)))


class ReadsAgain(Reader):
    def loader(self, data: Samples) -> DataLoader[Any]:
        return StatefulDataLoader(Unplaced(data), batch_size=None)


def fit_reading_again(rank: int, case: Fit, folder: str, path: str | None) -> str:
    trainer = build(Reading(case), callbacks=[SavesEverywhere(folder)] if path is None else [])
    try:
        trainer.fit(ReadsAgain(Reading(case)), ckpt_path=path)
    except JoinError as error:
        return str(error)
    return ""


def test_a_stream_that_has_become_shorter_than_what_was_trained_of_it(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, fit_reading_again, Fit((4, 6), epochs=1), str(tmp_path), None) == ["", ""]
    path = f"{tmp_path}/after-0-2.ckpt"
    for message in workers.run(2, fit_reading_again, Fit((1, 6), epochs=1), str(tmp_path), path):
        assert "ended before the position at which" in message


def test_another_world(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, fit_whole, Reading(Fit((2, 3), epochs=2)), str(tmp_path))
    run = Reading(Fit((3, 1, 2), epochs=2))
    for message in workers.run(3, resuming_fails, run, f"{tmp_path}/after-0-1.ckpt"):
        assert "written in the middle of a loop by 2 ranks, and there are 3 now" in message
    for name in ("after-0-2", "end-0-2"):
        results = workers.run(3, fit_warning, run, f"{tmp_path}/{name}.ckpt")
        assert [[epoch for epoch, *_ in seen] for seen, _, _ in results] == [[1] * 3, [1], [1] * 2]
        assert "the states of its dataloaders are left out" in results[0][2]


def test_checkpoints_of_plain_ddp_and_for_it(workers: Workers, tmp_path: Path) -> None:
    run = Reading(Fit((4, 4), epochs=2))
    plain = dataclasses.replace(run, strategy="ddp")
    workers.run(2, fit_whole, plain, str(tmp_path))
    results = workers.run(2, fit_warning, run, f"{tmp_path}/after-0-1.ckpt")
    assert "saves the state of rank 0's dataloaders only" in results[0][2]
    expected = workers.run(2, fit_warning, plain, f"{tmp_path}/after-0-1.ckpt")
    assert [seen[:2] for seen, *_ in results] == [seen[:2] for seen, *_ in expected]
    assert [steps for _, steps, _ in results] == [8, 8]

    alone = Reading(Fit((4,), epochs=2))
    ((_, everything),) = workers.run(1, fit_whole, alone, f"{tmp_path}/alone")
    ((seen, *_),) = workers.run(
        1, fit_warning, dataclasses.replace(alone, strategy="ddp"), f"{tmp_path}/alone/after-0-1.ckpt"
    )
    assert [it for it in seen if it[0] == 0] == everything[2:4]


class SavesInTheStep(Reader):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx in (0, 2):
            self.trainer.save_checkpoint(f"{self.folder}/step-{batch_idx}.ckpt")
        return super().training_step(batch, batch_idx)


def fit_saving_in_the_step(rank: int, run: Reading, folder: str) -> Any:
    module = SavesInTheStep(run)
    module.folder = folder
    with pytest.raises(JoinError) as error:
        build(run).fit(module)
    return module.seen, str(error.value), fit_from(run, f"{folder}/step-0.ckpt")


def test_saving_inside_of_a_step(workers: Workers, tmp_path: Path) -> None:
    run = Reading(Fit((2, 3), epochs=1))
    for seen, message, (_, again) in workers.run(2, fit_saving_in_the_step, run, str(tmp_path)):
        assert "cannot be saved inside a step for which only rank 1 of 2 ranks have a batch" in message
        assert again[:2] == seen
