"""What only a fit in which batches are rebalanced has; in other tests `rebalance` is a field of their cases."""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, SumMetric

from tests.covering import others_long
from tests.lightning.reading import Reader, Reading, Samples, build
from tests.support.front_ends.lightning import (
    ANY_CHECKPOINT,
    Fit,
    Module,
    Result,
    assert_exact,
    assert_same_bits,
    fit,
)
from tests.support.inside import planned_rows
from tests.support.run import TOLERANCE, Batch, difference, loss_of, reference
from tests.support.workers import Workers
from torch_join import UnsupportedError


def name_of(case: Fit) -> str:
    return "-".join(map(str, case.lengths)) + (" iterable" if case.iterable else "")


# ---------------------------------------------------------------- whose batch it is, and what is logged of it


def number_of(batch: Batch) -> Tensor:
    """A number that float32, in which metrics add up, holds exactly."""
    return batch[0].sum().detach().mul(64).round()


class Logs(Module):
    """Notes whose batch it gets, and logs numbers that tell which one it is, in all ways."""

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.mean = MeanMetric().set_dtype(torch.float64)
        self.each = SumMetric(dist_sync_on_step=True).set_dtype(torch.float64)
        self.noted = [], [], []  # by step: whose batch it was, and what was logged; by epoch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        assert strategy.joined == (strategy.batch_owner is None)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        epoch, owner, index = self.trainer.current_epoch, strategy.batch_owner, strategy.owner_batch_idx
        assert torch.equal(batch[0], self.case.batch(owner, epoch, index)[0])
        self.noted[0].append((epoch, batch_idx, owner, index))
        number = number_of(batch)
        options: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("number", number, **options)
        self.log("total", number, reduce_fx="sum", **options)
        self.mean.update(number)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.each(number)
        self.log("each", self.each, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        values = self.trainer.callback_metrics
        self.noted[1].append((float(values["number_step"]), float(values["total_step"])))

    def on_train_epoch_end(self) -> None:
        values = self.trainer.callback_metrics
        self.noted[2].append([float(values[name]) for name in ("number_epoch", "total_epoch", "mean", "each")])


@pytest.mark.parametrize(
    "case",
    [
        Fit((2, 7), rebalance=True),
        Fit((0, 7, 1), rebalance=True, iterable=True),
        Fit(((4, 1, 0), (0, 2, 6)), rebalance=True, reload=1, ragged=True, weighting="samples"),
        Fit((1, 4)),
    ],
    ids=name_of,
)
def test_whose_batch_it_is_and_what_is_logged(workers: Workers, case: Fit) -> None:
    case = replace(case, epochs=2)
    steps, epochs = [], []
    for epoch in range(2):
        rows = [[case.batch(owner, epoch, i) for owner, i in row.values()] for row in case.rows(epoch)]
        for row in rows:
            numbers = [float(number_of(batch)) for batch in row]
            steps.append((sum(numbers) / len(numbers), sum(numbers)))
        every = [(float(number_of(batch)), len(batch[0])) for row in rows for batch in row]
        weighted = sum(number * size for number, size in every) / sum(size for _, size in every)
        total, mean = sum(number for number, _ in every), sum(number for number, _ in every) / len(every)
        epochs.append([weighted, total, mean, total])
    places = [(epoch, step, row) for epoch in range(2) for step, row in enumerate(case.rows(epoch))]
    for rank, result in enumerate(workers.run(case.world_size, fit, case, Logs)):
        its_places, its_steps, its_epochs = result.noted
        assert its_places == [(epoch, step, *row[rank]) for epoch, step, row in places if rank in row]
        assert its_epochs == [pytest.approx(values, abs=1e-4) for values in epochs]
        assert its_steps == [pytest.approx(values, abs=1e-4) for values in steps]


# ---------------------------------------------------------------- epochs that are not run to their end


class Stops(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            self.trainer.should_stop = True


@pytest.mark.parametrize("case", [Fit((1, 9)), Fit((0, 2, 9), iterable=True, scheduler="step")], ids=name_of)
def test_should_stop_on_one_rank(workers: Workers, case: Fit) -> None:
    case = replace(case, rebalance=True)
    results = workers.run(case.world_size, fit, case, Stops)
    assert_same_bits(results)
    expected = reference(replace(case, max_steps=2))
    assert results[0].global_step == 2
    assert difference(results[0].parameters, expected.parameters) < TOLERANCE


def fit_in_a_row(rank: int, cases: list[Fit]) -> list[Result]:
    return [fit(rank, case) for case in cases]


@pytest.mark.parametrize(("lengths", "iterable"), [((1, 9), True), ((0, 0, 9), False)])
def test_one_fit_after_another_that_ended_while_gifts_travelled(
    workers: Workers, lengths: tuple[int, ...], iterable: bool
) -> None:
    whole = Fit(lengths, iterable=iterable, rebalance=True)
    short = [replace(whole, max_steps=steps, optimizer="sgd") for steps in (1, 2, 4)]
    cases = [short[0], whole, short[1], short[2], replace(whole, rebalance=False), whole]
    for case, *results in zip(cases, *workers.run(len(lengths), fit_in_a_row, cases), strict=True):
        assert_exact(case, results)


@dataclass(frozen=True)
class Leaving(Fit):
    """A rank leaves each epoch at a step; of nothing that it would have had after that anything is trained on."""

    leaves: tuple[int, int] = (0, 0)
    rebalance: bool = True

    def rows(self, epoch: int) -> list[dict[int, tuple[int, int]]]:
        lengths = self.lengths_in(epoch)
        said = [length if length < 2 else None for length in lengths] if self.iterable else None
        return planned_rows(lengths, said, leaves=self.leaves)


class Leaves(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.trainer.global_rank, batch_idx) == self.case.leaves else None  # type: ignore[attr-defined]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        self.noted.append((self.trainer.current_epoch, batch_idx, strategy.batch_owner, strategy.owner_batch_idx))
        return super().training_step(batch, batch_idx)


LEAVING = [
    Leaving((4, 6), leaves=(0, 1)),
    Leaving((1, 9), leaves=(0, 2)),  # it leaves a batch that it was given
    Leaving((2, 12), leaves=(0, 1), scheduler="epoch"),
    Leaving((9, 1), leaves=(0, 1), optimizer="sgd"),
    Leaving((9, 2, 9), leaves=(1, 1), weighting="active"),
    Leaving((0, 2, 9), leaves=(0, 1), accumulate=2),
    Leaving((8, 0, 2), leaves=(2, 1), iterable=True),
    Leaving((0, 7, 7), leaves=(1, 2), iterable=True, weighting="samples", ragged=True),
]


@pytest.mark.parametrize("number", others_long(range(len(LEAVING)), 1, 3, 5, 7), ids=lambda at: name_of(LEAVING[at]))
def test_a_rank_that_leaves_the_epoch(workers: Workers, number: int) -> None:
    case = LEAVING[number]
    results = workers.run(case.world_size, fit, case, Leaves)
    for rank, result in enumerate(results):
        rows = [(epoch, step, row) for epoch in range(case.epochs) for step, row in enumerate(case.rows(epoch))]
        assert result.noted == [(epoch, step, *row[rank]) for epoch, step, row in rows if rank in row]
    assert_same_bits(results)
    expected = reference(case)
    assert difference(results[0].parameters, expected.parameters) < TOLERANCE
    assert (results[0].global_step, results[0].lr) == (expected.steps, expected.lr)


def test_gifts_to_a_rank_that_leaves_are_counted(workers: Workers) -> None:
    result, _ = workers.run(2, fit, Leaving((1, 9), leaves=(0, 2), epochs=1), Leaves)
    # That of the step, and that of the next one, which was on its way.
    assert "ranks [1] continue. 2 batches that other ranks had sent to them are dropped in this epoch." in result.warned
    assert result.warned.count("returned -1") == 1


class Holds(Module):
    """Batches of rank 1 cannot be sent."""

    def setup(self, stage: str) -> None:
        self.noted = self.trainer.estimated_stepping_batches

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        batches = [(x, y, (lambda: 0) if rank else 0) for x, y in self.case.batches(rank, 0)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)


def test_more_steps_than_were_estimated_are_told(workers: Workers) -> None:
    for rank, result in enumerate(workers.run(2, fit, Fit((2, 10), epochs=2, rebalance=True), Holds)):
        assert (result.noted, result.global_step) == (12, 20)
        assert result.warned.count("the epoch has 10 steps, not trainer.estimated_stepping_batches (6)") == (rank == 0)


# ---------------------------------------------------------------- several loaders


class Endless(IterableDataset[Batch]):
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def combined(case: Fit, shorter: tuple[int, ...], mode: str, rank: int) -> CombinedLoader:
    """A rank's batches beside a loader of its own with fewer, or more."""
    others = Fit(shorter, ragged=case.ragged)
    parts = [case.batches(rank, 0), [others.batch(rank, 7, index) for index in range(shorter[rank])]]
    loaders: list[Any] = [
        DataLoader(Endless(part) if case.iterable else part, batch_size=None)  # type: ignore[arg-type]
        for part in parts
    ]
    return CombinedLoader(loaders, mode)  # type: ignore[arg-type]


def combined_loss(net: Any, batches: Any) -> Tensor:
    return sum((loss_of(net, batch) for batch in batches if batch is not None), torch.zeros((), dtype=torch.float64))


class Combined(Module):
    shorter: tuple[int, ...]
    mode: str

    def train_dataloader(self) -> Any:
        return combined(self.case, self.shorter, self.mode, self.trainer.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.append((self.trainer.current_epoch, batch_idx))
        return combined_loss(self.net, batch)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_combined_loaders(workers: Workers, mode: str, iterable: bool) -> None:
    case, shorter = Fit((2, 7, 1), epochs=2, optimizer="sgd", iterable=iterable, rebalance=True), (1, 5, 2)
    read = [[batch for batch, *_ in combined(case, shorter, mode, rank)] for rank in range(3)]
    net = case.build()
    optimizer = case.optimizers(net, sharded=False)[0]
    lengths = [len(mine) for mine in read]
    said = [length if length < 2 else None for length in lengths] if iterable else None
    rows = planned_rows(lengths, said)
    for row in [*rows, *rows]:
        optimizer.zero_grad()
        torch.stack([combined_loss(net, read[owner][i]) / 3 for owner, i in row.values()]).sum().backward()
        optimizer.step()
    results = workers.run(3, fit, case, Combined, {"shorter": shorter, "mode": mode})
    assert_same_bits(results)
    assert results[0].global_step == 2 * len(rows)
    assert difference(results[0].parameters, list(net.parameters())) < TOLERANCE


# ---------------------------------------------------------------- checkpoints with rebalancing, and without


class Numbered(Samples):
    """The number of a batch says whose it is."""

    def __getitem__(self, index: int) -> Any:
        *batch, number = super().__getitem__(index)  # type: ignore[misc]
        return *batch, 100 * self.rank + number


class Noting(Reader):
    def loader(self, data: Samples) -> DataLoader[Any]:
        return super().loader(Numbered(data.case, data.rank))


class Leaver(Noting):
    """Rank 0 leaves at its second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.trainer.global_rank, batch_idx) == (0, 1) else None


class SavesSteps(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/{trainer.fit_loop.batch_idx}.ckpt")


def seen_by(module: Reader, run: Reading, folder: str, path: Path | None = None) -> list[tuple[int, ...]]:
    callbacks = [] if path else [SavesSteps(folder)]
    build(run, callbacks=callbacks).fit(module, ckpt_path=path, **ANY_CHECKPOINT)
    return module.seen


def resume_otherwise(rank: int, run: Reading, folder: str) -> tuple[Any, dict[str, Any]]:
    other = dataclasses.replace(run, case=replace(run.case, rebalance=not run.case.rebalance))
    whole = seen_by(Noting(run), run, folder)
    found: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("*.ckpt")):
        try:
            found[path.stem] = seen_by(Noting(other), other, folder, path)
        except UnsupportedError as error:
            found[path.stem] = str(error)
    return whole, found


@pytest.mark.parametrize("stateful", [False, True])
def test_a_checkpoint_of_a_fit_without(workers: Workers, tmp_path: Path, stateful: bool) -> None:
    run = Reading(Fit((1, 7), epochs=1), stateful=stateful)
    results = workers.run(2, resume_otherwise, run, str(tmp_path))
    for step in range(7):
        rest = [it for _, found in results for it in found[str(step)]]
        assert sorted({at for _, at, _ in rest}) == list(range(step + 1, step + 1 + (7 - step) // 2))
        assert len(rest) == 6 - step
        if stateful:
            assert {it[2] for it in rest} == {it[2] for seen, _ in results for it in seen if it[1] > step}


@pytest.mark.parametrize("stateful", [False, True])
def test_a_checkpoint_for_a_fit_without(workers: Workers, tmp_path: Path, stateful: bool) -> None:
    run = Reading(Fit((1, 7), epochs=1, rebalance=True), stateful=stateful)
    for _, found in workers.run(2, resume_otherwise, run, str(tmp_path), timeout=5.0):
        assert all("with rebalanced batches" in found[str(step)] for step in range(3))
        assert found["3"] == []


def leave_and_resume(rank: int, run: Reading, folder: str) -> list[Any]:
    whole = seen_by(Leaver(run), run, folder)
    return [whole, *(seen_by(Leaver(run), run, folder, Path(folder, f"{step}.ckpt")) for step in range(6))]


@pytest.mark.parametrize("iterable", [False, True])
def test_a_rank_that_has_left_stays_away(workers: Workers, tmp_path: Path, iterable: bool) -> None:
    run = Reading(Fit((5, 8), epochs=1, iterable=iterable, rebalance=True))
    for whole, *resumed in workers.run(2, leave_and_resume, run, str(tmp_path)):
        for step, seen in enumerate(resumed[1:], start=1):
            assert seen == [it for it in whole if it[1] > step], step
