"""`self.log` on uneven inputs, in every combination: step values over the active ranks, epoch values over all."""

import csv
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.support.front_ends.lightning import Fit, Module, assert_same_bits, build_trainer, fit
from tests.support.run import Batch
from tests.support.workers import Workers

REDUCTIONS: dict[str, Callable[[Iterable[float]], float]] = {"mean": mean, "sum": sum, "min": min, "max": max}
Values = dict[str, float]
Place = tuple[int, int, int]  # rank, epoch (or dataloader), index


def options_of(key: str) -> dict[str, Any]:
    reduce_fx, levels, kind = key.split("-")
    return {
        "reduce_fx": reduce_fx,
        "on_step": "step" in levels,
        "on_epoch": "epoch" in levels,
        "sync_dist": kind != "own",
        "rank_zero_only": kind == "zero",
        "prog_bar": reduce_fx == "mean",
    }


KEYS = ["-".join(parts) for parts in product(REDUCTIONS, ("step", "epoch", "stepepoch"), ("sync", "own", "zero"))]
HOOK_KEYS = ["mean-stepepoch-sync", "max-step-sync", "sum-step-own"]


def value(rank: int, epoch: int, index: int, shift: float = 0.0) -> float:
    """A number that is like no other, on both sides of zero."""
    return shift + ((7 * rank + 5 * epoch + 3 * index) % 11 - 5) / 3 + rank / 7


def size(rank: int, epoch: int, index: int) -> int:
    return 1 + (rank + 2 * index) % 4


class Logs(Module):
    """Logs the same values in steps and batch hooks, in training and validation."""

    def __init__(self, case: Fit, sizes: list[tuple[int, ...]], streams: bool = False) -> None:
        super().__init__(case)
        self.sizes, self.streams = sizes, streams
        self.bars: list[Values] = []

    def log_all(self, keys: list[str], prefix: str, shift: float, place: Place) -> None:
        for key in keys:
            number = torch.tensor(value(*place, shift), dtype=torch.float64)
            self.log(f"{prefix}{key}", number, batch_size=size(*place), **options_of(key))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        rank, epoch = self.trainer.global_rank, self.trainer.current_epoch
        place = (rank, epoch, batch_idx)
        self.log_all(KEYS, "", 0.0, place)
        self.log_dict({"a": 1.0 + rank, "b": 2}, on_step=True, on_epoch=True, sync_dist=True)  # the batch's size
        if batch_idx == 1 and rank == 1:
            self.log("some", torch.tensor(4.0).double(), on_step=False, on_epoch=True, sync_dist=True, batch_size=2)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if not self.trainer.strategy.joined:  # type: ignore[attr-defined]
            self.log("guarded", float(batch_idx), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.log_all(HOOK_KEYS, "late-", 0.5, (self.trainer.global_rank, self.trainer.current_epoch, batch_idx))

    def val_dataloader(self) -> Any:
        numbers = [list(range(sizes[self.trainer.global_rank])) for sizes in self.sizes]
        loaders = [DataLoader(Unsized(each) if self.streams else each, batch_size=None) for each in numbers]  # type: ignore[arg-type]
        return loaders if len(loaders) > 1 else loaders[0]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log_all(KEYS, "val-", 1.5, (self.trainer.global_rank, dataloader_idx, batch_idx))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log_all(HOOK_KEYS, "val-late-", 2.5, (self.trainer.global_rank, dataloader_idx, batch_idx))

    test_dataloader = val_dataloader
    test_step = validation_step  # type: ignore[assignment]
    on_test_batch_end = on_validation_batch_end


class Unsized(IterableDataset[int]):
    def __init__(self, data: list[int]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def rows_of(folder: str) -> list[tuple[int, Values]]:
    with open(next(Path(folder).rglob("metrics.csv"))) as file:
        return [
            (int(row["step"]), {k: float(v) for k, v in row.items() if v != "" and k not in ("step", "epoch")})
            for row in csv.DictReader(file)
        ]


def fit_logging(rank: int, case: Fit, folder: str, *args: Any) -> tuple[list[Any], Values, Values]:
    module = Logs(case, *args)
    options = {"logger": CSVLogger(folder), "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    trainer = build_trainer(case, **options)
    trainer.fit(module)
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return rows_of(folder) if rank == 0 else [], metrics, dict(trainer.progress_bar_metrics)  # type: ignore[arg-type]


def named(prefix: str, key: str, on_step: bool) -> str:
    forked = "stepepoch" in key
    return f"{prefix}{key}" + (("_step" if on_step else "_epoch") if forked else "")


def step_values(prefix: str, keys: list[str], shift: float, active: list[Place]) -> Values:
    """What rank 0's logger gets of a step."""
    values = {}
    for key in keys:
        reduce_fx, levels, kind = key.split("-")
        own = [place for place in active if place[0] == 0]
        places = active if kind == "sync" else own
        if "step" in levels and places:
            values[named(prefix, key, True)] = REDUCTIONS[reduce_fx]([value(*place, shift) for place in places])
    return values


def epoch_values(prefix: str, keys: list[str], shift: float, places: list[Place], rank: int) -> Values:
    """What a rank holds when an epoch has ended."""
    values = {}
    for key in keys:
        reduce_fx, levels, kind = key.split("-")
        mine = places if kind == "sync" else [place for place in places if place[0] == rank]
        if "epoch" not in levels or not mine:
            continue
        numbers = [value(*place, shift) for place in mine]
        if reduce_fx == "mean":
            weights = [size(*place) for place in mine]
            values[named(prefix, key, False)] = sum(w * v for w, v in zip(weights, numbers, strict=True)) / sum(weights)
        else:
            values[named(prefix, key, False)] = REDUCTIONS[reduce_fx](numbers)
    return values


def assert_holds(found: Values, expected: Values) -> None:
    for name, number in expected.items():
        assert found[name] == pytest.approx(number, abs=1e-10), name


def places_at(lengths: Any, epoch: int, index: int) -> list[Place]:
    return [(rank, epoch, index) for rank, length in enumerate(lengths) if index < length]


def all_places(lengths: Any, epoch: int) -> list[Place]:
    return [place for index in range(max(lengths)) for place in places_at(lengths, epoch, index)]


TRAINED = [
    Fit(((2, 4), (4, 1)), epochs=2),
    Fit(((0, 2, 3), (3, 1, 2)), epochs=2),
    Fit((1, 4, 0), epochs=2, iterable=True),
]


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_values_of_training(workers: Workers, case: Fit, tmp_path: Path) -> None:
    results = workers.run(case.world_size, fit_logging, case, str(tmp_path), LOADERS["empty"])
    rows = results[0][0]
    step = 0
    for epoch in range(case.epochs):
        lengths = case.lengths_in(epoch)
        for index in range(max(lengths)):
            active = places_at(lengths, epoch, index)
            (found,) = (row for at, row in rows if at == step and "guarded" in row)
            expected = step_values("", KEYS, 0.0, active) | step_values("late-", HOOK_KEYS, 0.5, active)
            expected |= {"guarded": index, "a_step": mean(1.0 + rank for rank, *_ in active), "b_step": 2.0}
            assert found.keys() == expected.keys(), (epoch, index)
            assert_holds(found, expected)
            step += 1
        (found,) = (row for at, row in rows if at == step - 1 and "a_epoch" in row)
        expected = epoch_values("", KEYS, 0.0, all_places(lengths, epoch), rank=0)
        expected |= epoch_values("late-", HOOK_KEYS, 0.5, all_places(lengths, epoch), rank=0)
        ranks = [rank for rank, *_ in all_places(lengths, epoch)]
        expected |= {"a_epoch": mean(1.0 + rank for rank in ranks), "b_epoch": 2.0}
        expected |= {"some": 4.0} if lengths[1] > 1 else {}
        assert found.keys() == expected.keys()
        assert found["a_epoch"] == pytest.approx(expected.pop("a_epoch"), rel=1e-6)  # logged as a float32
        assert_holds(found, expected)
    for rank, (_, metrics, bar) in enumerate(results):
        assert_holds(metrics, epoch_values("", KEYS, 0.0, all_places(lengths, case.epochs - 1), rank))
        shared = [name for name in metrics if "own" not in name and "zero" not in name]
        assert shared == [name for name in shared if metrics[name] == results[0][1][name]]
        assert {n for n in results[0][1] if "own" not in n and "zero" not in n} == {*shared}
        shown = {name: number for name, number in bar.items() if "sync" in name}
        assert {"mean-step-sync", "mean-stepepoch-sync_step", "mean-stepepoch-sync_epoch", "mean-epoch-sync"} <= {
            *shown
        }
        assert shown == {name: its for name, its in results[0][2].items() if "sync" in name}


LOADERS = {"one": [(1, 3, 2)], "empty": [(0, 2, 3)], "two": [(2, 0, 3), (3, 1, 0)], "even": [(2, 2, 2)]}


def evaluate(rank: int, folder: str, loaders: str, streams: bool) -> Any:
    case = Fit((1, 1, 1), epochs=1)
    rows, metrics = [], []
    for stage in ("validate", "test"):
        module = Logs(case, LOADERS[loaders], streams)
        trainer = build_trainer(case, logger=CSVLogger(f"{folder}/{stage}"))
        getattr(trainer, stage)(module, verbose=False)
        rows.append(rows_of(f"{folder}/{stage}") if rank == 0 else [])
        metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})
    return rows, metrics


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("loaders", LOADERS)
def test_values_of_evaluation(workers: Workers, loaders: str, streams: bool, tmp_path: Path) -> None:
    results = workers.run(3, evaluate, str(tmp_path), loaders, streams)
    lengths = LOADERS[loaders]
    for stage in range(2):
        rows = results[0][0][stage]
        expected_rows = []
        for index, lens in enumerate(lengths):
            suffix = f"/dataloader_idx_{index}" if len(lengths) > 1 else ""
            for step in range(max(lens)):
                active = places_at(lens, index, step)
                values = step_values("val-", KEYS, 1.5, active) | step_values("val-late-", HOOK_KEYS, 2.5, active)
                expected_rows.append((step, {name + suffix: number for name, number in values.items()}))
        assert len(rows) == len(expected_rows) + 1
        for (at, found), (step, expected) in zip(rows, expected_rows, strict=False):
            assert (at, found.keys()) == (step, expected.keys())
            assert_holds(found, expected)
        for rank, (_, metrics) in enumerate(results):
            for index, lens in enumerate(lengths):
                suffix = f"/dataloader_idx_{index}" if len(lengths) > 1 else ""
                expected = epoch_values("val-", KEYS, 1.5, all_places(lens, index), rank)
                expected |= epoch_values("val-late-", HOOK_KEYS, 2.5, all_places(lens, index), rank)
                assert_holds(metrics[stage], {name + suffix: number for name, number in expected.items()})


# ---------------------------------------------------------------- callbacks that decide by what was logged


class Decides(Module):
    """Values go down and up again, on each rank at its own time."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        place = (self.trainer.global_rank, self.trainer.current_epoch, batch_idx)
        number = torch.tensor(value(*place), dtype=torch.float64)
        self.log("at", number, on_step=True, on_epoch=True, sync_dist=True, batch_size=size(*place))
        if batch_idx % 2 == 0:
            self.log("even", number, on_step=True, on_epoch=False, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        step = {"scheduler": scheduler, "interval": "step", "monitor": "at_step"}
        return {"optimizer": optimizer, "lr_scheduler": step}


class Rates(EarlyStopping):
    """Stops early, and keeps the learning rate of every step and what was on record for "even"."""

    def __init__(self) -> None:
        super().__init__("at_epoch", patience=1, check_on_train_epoch_end=True)
        self.steps: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.steps.append((trainer.optimizers[0].param_groups[0]["lr"], float(trainer.callback_metrics.get("even", 0))))


def fit_deciding(rank: int, case: Fit, folder: str) -> Any:
    rates = Rates()
    best = ModelCheckpoint(folder, monitor="at_step", save_top_k=2, every_n_train_steps=1, filename="{step}")
    trainer = build_trainer(case, callbacks=[rates, best], enable_checkpointing=True, log_every_n_steps=1)
    trainer.fit(Decides(case))
    kept = {Path(path).name: float(score) for path, score in best.best_k_models.items()}
    return rates.steps, rates.stopped_epoch, float(rates.best_score), kept


@pytest.mark.parametrize(
    "case", [Fit((2, 5), epochs=6), Fit(((0, 2, 4), (4, 1, 4)) * 3, epochs=6, accumulate=2)], ids=str
)
def test_callbacks_decide_alike(workers: Workers, case: Fit, tmp_path: Path) -> None:
    results = workers.run(case.world_size, fit_deciding, case, str(tmp_path))
    assert results == [results[0]] * case.world_size

    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    steps: list[tuple[float, float]] = []
    scores: dict[str, float] = {}
    best, wait, even = float("inf"), 0, 0.0
    for epoch in range(case.epochs):
        for index in range(longest := max(case.lengths_in(epoch))):
            steps.append((optimizer.param_groups[0]["lr"], even))
            number = mean(value(*place) for place in places_at(case.lengths_in(epoch), epoch, index))
            even = number if index % 2 == 0 else even
            if (index + 1) % case.accumulate == 0 or index + 1 == longest:
                scheduler.step(number)
                scores[f"step={len(scores) + 1}.ckpt"] = number
        score = epoch_values("", ["mean-epoch-sync"], 0.0, all_places(case.lengths_in(epoch), epoch), 0)
        best, wait = min(best, *score.values()), 0 if min(score.values()) < best else wait + 1
        if wait == 1:
            break
    found, stopped, best_score, kept = results[0]
    assert found == [pytest.approx(step) for step in steps]
    assert stopped == epoch < case.epochs - 1
    assert best_score == pytest.approx(best)
    assert sorted(kept.values()) == pytest.approx(sorted(scores.values())[:2])
    assert all(kept[name] == pytest.approx(scores[name]) for name in kept)


# ---------------------------------------------------------------- what users get wrong


class LogsAlone(Module):
    """Logs where the other active rank does not, which deadlocks in plain Lightning too."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.global_rank == 2:
            self.log("alone", 1.0, on_step=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


def test_a_value_that_one_rank_alone_syncs_is_named(workers: Workers) -> None:
    for outcome in workers.outcomes(3, fit, Fit((1, 4, 4)), LogsAlone, timeout=3.0):
        # The module has hooks in its optimization, whose window is announced too.
        assert (
            "rank 2 had announced 6 operations, the last of them"
            " log `self.log('alone', on_step=True, sync_dist=True)`" in outcome.error in outcome.error
        )


class Plateau(Module):
    """Decides on its learning rate by a value of each rank's own, which is worse in each step on rank 0."""

    interval: str
    worse_on: int

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        sign = 1.0 if self.trainer.global_rank == self.worse_on else -1.0
        self.log("own", sign * (self.trainer.current_epoch + batch_idx), on_step=True, on_epoch=True)
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def on_train_epoch_end(self) -> None:
        if self.interval == "by hand":
            scheduler: Any = self.lr_schedulers()
            scheduler.step(self.trainer.callback_metrics["own_epoch"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        monitor = "own_step" if self.interval == "step" else "own_epoch"
        interval = "epoch" if self.interval == "by hand" else self.interval
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": interval, "monitor": monitor},
        }


@pytest.mark.parametrize(("interval", "where"), [("step", "own_step"), ("epoch", "own_epoch"), ("by hand", "")])
def test_learning_rates_that_differ_raise_on_all_ranks(workers: Workers, interval: str, where: str) -> None:
    given = {"interval": interval, "automatic_optimization": interval != "by hand"}
    for outcome in workers.outcomes(2, fit, Fit((2, 4)), Plateau, {**given, "worse_on": 0}):
        said = "The learning rates differ (rank 0: 0.025; rank 1: 0.05)"
        if interval == "by hand":  # which all compare as the next epoch begins
            said = "The ranks' optimizers differ: lr of Adam is 0.025 on rank 0, 0.05 on rank 1"
        assert said in outcome.error, outcome.trace
        assert (f"monitors {where!r}" in outcome.error and "sync_dist=True" in outcome.error) or not where
    assert_same_bits(
        workers.run(2, fit, Fit((3, 3)), Plateau, {**given, "worse_on": -1})
    )  # values of their own, and the same decisions
