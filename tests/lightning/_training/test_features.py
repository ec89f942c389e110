"""Callbacks and trainer options on uneven loaders, against Lightning on one process with all ranks' batches."""

import inspect
import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.callbacks.progress import rich_progress
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_join
from tests.emulator.frameworks import lightning_accelerator
from tests.support.front_ends.lightning import Fit, build_trainer
from tests.support.run import FEATURES, TOLERANCE, Batch, loss_of
from tests.support.workers import Workers

Made = tuple[list[Any], dict[str, Any]]  # callbacks and the trainer's options


class Model(pl.LightningModule):
    """Trains on a rank's batches; or, on a single process, on those of all ranks at once, with their weights."""

    lr = 0.05

    def __init__(self, case: Fit, shuffle: bool = False) -> None:
        super().__init__()
        self.case, self.shuffle = case, shuffle
        self.net = case.build()
        self.history: list[float] = []

    @property
    def is_reference(self) -> bool:
        return self.trainer.world_size < self.case.world_size

    def train_dataloader(self) -> DataLoader[Any]:
        data = [self.case.batches(rank, 0) for rank in range(self.case.world_size)]
        steps = [{r: mine[i] for r, mine in enumerate(data) if i < len(mine)} for i in range(max(map(len, data)))]
        mine: Any = steps if self.is_reference else data[self.trainer.global_rank]
        return DataLoader(mine, batch_size=None, shuffle=self.shuffle and len(mine) > 0)

    def val_dataloader(self) -> DataLoader[Any]:
        data = [self.case.batches(rank, 1) for rank in range(self.case.world_size)]
        mine: Any = [batch for mine in data for batch in mine] if self.is_reference else data[self.trainer.global_rank]
        return DataLoader(mine, batch_size=None)

    def loss(self, batch: Batch) -> Tensor:
        x, y = (each.to(self.net.last.weight.dtype) for each in batch)
        return loss_of(self.net, (x, y))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.is_reference:
            return self.loss(batch)
        weight = self.case.weights(batch, 0)
        before = [buffer.clone() for buffer in self.net.buffers()]
        loss = torch.zeros((), dtype=self.net.last.weight.dtype)
        for rank in sorted(batch, reverse=True):
            # Every rank starts from the same buffers; those of the lowest rank are kept.
            if not self.trainer.fit_loop._skip_backward:
                for buffer, value in zip(self.net.buffers(), before, strict=True):
                    buffer.data = value.clone()
            loss = loss + weight[rank] * self.loss(batch[rank])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch).double(), sync_dist=True, batch_size=len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.history.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.case.make_optimizer(self.net.parameters())
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        return optimizer


class Fine(Model):
    """Has a backbone that is frozen at first."""

    first: Any = None

    def on_train_start(self) -> None:
        self.first = weakref.ref(self.trainer.model)

    def on_train_end(self) -> None:
        assert self.is_reference or self.first() is None, "the old wrapper's hooks are still there"

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3)).double()  # type: ignore[assignment]

    @property
    def backbone(self) -> nn.Module:
        return self.net[0]  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = batch if self.is_reference else {0: batch}
        weight = self.case.weights(batch, 0) if self.is_reference else {0: 1.0}
        losses = [weight[rank] * (self.net(x) - y).pow(2).mean() for rank, (x, y) in batches.items()]  # type: ignore[operator]
        return sum(losses)  # type: ignore[return-value]

    def validation_step(self, *_: Any) -> None:
        self.log("loss", 1.0, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[2].parameters(), lr=0.05)  # type: ignore[index]


def result_of(trainer: pl.Trainer, model: Model) -> dict[str, Any]:
    """What all ranks must hold alike."""
    states: dict[str, Any] = {}
    buffers = list(model.buffers())
    for index, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]
        state = {k: v for k, v in callback.state_dict().items() if k != "time_elapsed"}
        if hasattr(callback, "_average_model") and not isinstance(callback, StochasticWeightAveraging):
            state["average"] = list(callback._average_model.module.parameters())
            buffers += callback._average_model.module.buffers()
        states[f"{index} {type(callback).__name__}"] = state
    return {
        "parameters": list(model.parameters()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.num_training_batches,
        "validations": model.history,
        "callbacks": states,
        "buffers": buffers,
    }


def compare(mine: Any, its: Any, tolerance: float, where: str = "") -> None:
    """The same structure and numbers; of paths, the last part."""
    if isinstance(mine, dict):
        mine, its = ({str(k).rsplit("/", 1)[-1]: v for k, v in each.items()} for each in (mine, its))
        assert mine.keys() == its.keys(), where
        for key in mine:
            compare(mine[key], its[key], tolerance, f"{where}/{key}")
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(its), where
        for index, (a, b) in enumerate(zip(mine, its, strict=True)):
            compare(a, b, tolerance, f"{where}/{index}")
    elif isinstance(mine, (Tensor, float)):
        a, b = (torch.as_tensor(each, dtype=torch.float64).detach() for each in (mine, its))
        assert torch.equal(a, b) or float((a - b).abs().max()) <= tolerance, (where, mine, its)
    elif isinstance(mine, str):
        assert where.endswith("dirpath") or os.path.basename(mine) == os.path.basename(its), where
    else:
        assert mine == its, where


def fit(rank: int, case: Fit, make: Callable[[str], Made], folder: str, kind: type[Model] = Model) -> Any:
    trainer, model = build(case, make, folder, kind)
    trainer.fit(model)
    return result_of(trainer, model)


def build(case: Fit, make: Callable[[str], Made], folder: str, kind: type[Model]) -> tuple[pl.Trainer, Model]:
    callbacks, options = make(folder)
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    alone = world_size < case.world_size
    given: dict[str, Any] = {
        "accelerator": lightning_accelerator(),
        "devices": 1 if alone else case.world_size,
        "strategy": "auto" if alone else lightning_join.DDPJoinStrategy(weighting=case.weighting),
        "max_epochs": case.epochs,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": any(isinstance(c, lightning_callbacks.ProgressBar) for c in callbacks),
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    shuffle = "overfit_batches" in options
    model = kind(case, shuffle) if shuffle else kind(case)
    if options.get("precision") == "bf16-mixed":
        model.float()
    return pl.Trainer(callbacks=callbacks, **{**given, **options}), model


def check(
    workers: Workers,
    case: Fit,
    make: Callable[[str], Made],
    tmp_path: Path,
    kind: type[Model] = Model,
    tolerance: float = TOLERANCE,
    same_validation: bool = True,
) -> Any:
    results = workers.run(case.world_size, fit, case, make, str(tmp_path / "ranks"), kind)
    for other in results[1:]:
        compare({**other, "buffers": results[0]["buffers"]}, results[0], 0.0)  # rank 0's count, as under plain ddp
    outcome = workers.outcomes(1, fit, case, make, str(tmp_path / "one"), kind, store="")[0]
    assert not outcome.error, outcome.trace
    compared = {name: value for name, value in results[0].items() if same_validation or name != "validations"}
    compare(compared, {name: outcome.value[name] for name in compared}, tolerance)
    return results[0]


# ---------------------------------------------------------------- callbacks


def counting() -> list[Any]:
    """Return a `ThroughputMonitor`; an older one takes all batches for as large as the last."""
    if "self._samples[stage] +=" not in inspect.getsource(ThroughputMonitor):
        return []
    return [ThroughputMonitor(lambda batch: len(batch[0]) if isinstance(batch, list) else 1, window_size=3)]


# An older one pops from a stack of rich's that is empty by now.
Bar = RichProgressBar if "_RichRefreshThread" in vars(rich_progress) else TQDMProgressBar


def averaging_weights(name: str, **options: Any) -> list[Any]:
    """Return this callback, which older versions of Lightning do not have."""
    return [getattr(lightning_callbacks, name)(**options)] if hasattr(lightning_callbacks, name) else []


def watching(folder: str) -> Made:
    """All that watches, with a logger and a progress bar."""
    return [
        *averaging_weights("EMAWeightAveraging", decay=0.7, update_every_n_steps=2),
        LearningRateMonitor("step", log_momentum=True),
        Timer(timedelta(hours=1)),
        *counting(),
        DeviceStatsMonitor(),
        TQDMProgressBar(),
        EarlyStopping("loss", patience=20),
    ], {
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
        "val_check_interval": 2,
        "profiler": "simple",
    }


class OwnClock(ModelCheckpoint):
    """Its clock is another one on each rank."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._last_time_checked = time.monotonic() + 1e6 * trainer.global_rank


def saving(folder: str) -> Made:
    """Every trigger of ModelCheckpoint, and a rich progress bar."""
    return [
        ModelCheckpoint(folder, "n-{step}", every_n_train_steps=2, save_top_k=-1, save_last=True),
        ModelCheckpoint(folder, "e-{epoch}", every_n_epochs=2, save_top_k=-1),
        OwnClock(folder, "t-{step}", train_time_interval=timedelta(microseconds=1), save_top_k=-1),
        ModelCheckpoint(folder, "b-{epoch}", monitor="loss", save_top_k=2, save_on_train_epoch_end=False),
        ModelCheckpoint(folder, "s-{epoch}", monitor="loss", mode="max", save_top_k=1, save_on_train_epoch_end=True),
        Bar(),
        *averaging_weights("WeightAveraging"),
    ], {"reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 2, "inference_mode": False}


def scheduling(folder: str) -> Made:
    """The number of accumulated batches changes; values are clipped; the stop is not yet allowed."""
    return [
        GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}),
        *averaging_weights("WeightAveraging"),
        EarlyStopping("loss", stopping_threshold=1e9),
    ], {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "min_epochs": 3, "max_epochs": 5}


def averaging(folder: str) -> Made:
    return [StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2)], {"max_epochs": 4}


def unfreezing(folder: str) -> Made:
    return [BackboneFinetuning(1, lambda_func=lambda epoch: 1.5)], {"accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    ("case", "make", "kind"),
    [
        (Fit((2, 5), optimizer="adam"), watching, Model),
        (Fit((0, 4, 2), model="norm", weighting="samples", ragged=True), watching, Model),
        (Fit((2, 5), model="norm"), saving, Model),
        (Fit((2, 0, 4), weighting="active"), saving, Model),
        (Fit((5, 0, 3), optimizer="adam"), scheduling, Model),
        (Fit((2, 5)), averaging, Model),
        (Fit((0, 5, 3), model="norm", optimizer="sgd", ragged=True), averaging, Model),
        (Fit((2, 5)), unfreezing, Fine),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(map(str, getattr(value, "lengths", [value]))),
)
def test_callbacks(workers: Workers, case: Fit, make: Any, kind: type[Model], tmp_path: Path) -> None:
    check(workers, case, make, tmp_path, kind)


# ---------------------------------------------------------------- the trainer's options


def running_fast(folder: str) -> Made:
    return [], {"fast_dev_run": True, "profiler": "advanced"}


def overfitting(folder: str) -> Made:
    return [], {"overfit_batches": 2, "detect_anomaly": True}


class RollCall(pl.Callback):
    """After the sanity check all ranks still answer."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        if trainer.world_size > 1:
            assert len(trainer.strategy.channel.health().answers) == trainer.world_size


def limiting(folder: str) -> Made:
    limits = {"limit_train_batches": 3, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    return [RollCall()], {**limits, "max_steps": 7, "profiler": "pytorch"}


def stopping(folder: str) -> Made:
    return [EarlyStopping("loss", stopping_threshold=1e9)], {"min_steps": 12, "max_epochs": 5, "gradient_clip_val": 0.1}


class Clock(Timer):
    """Shows how many steps have been made; another rank's has long run out."""

    trainer: pl.Trainer | None = None

    def on_fit_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.trainer = trainer

    def time_elapsed(self, stage: str = "train") -> float:
        return 0.0 if self.trainer is None else self.trainer.global_step + 100.0 * self.trainer.global_rank


def timing(folder: str) -> Made:
    return [Clock(timedelta(seconds=8))], {"accumulate_grad_batches": 1}


def halving(folder: str) -> Made:
    return [], {"precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("lengths", "make", "steps"),
    [
        ((2, 5), running_fast, 1),
        ((0, 4), overfitting, 6),
        ((5, 0, 3), limiting, 7),
        ((2, 5), stopping, 12),
        ((2, 5), timing, 8),
        ((2, 5), halving, 15),
    ],
)
def test_options(workers: Workers, lengths: tuple[int, ...], make: Any, steps: int, tmp_path: Path) -> None:
    case = Fit(lengths, optimizer="plain")
    tolerance = 2e-2 if make is halving else TOLERANCE
    # Limits of a rank's validation batches are not those of one process.
    same_validation = make in (stopping, timing)
    result = check(workers, case, make, tmp_path, tolerance=tolerance, same_validation=same_validation)
    assert result["step"] == steps


# ---------------------------------------------------------------- the learning rate finder


def find(rank: int, case: Fit, folder: str, tuner: bool) -> Any:
    finder = LearningRateFinder(1e-4, 1.0, num_training_steps=24)
    trainer, model = build(case, lambda _: ([] if tuner else [finder], {}), folder, Model)
    found: Any = Tuner(trainer).lr_find(model, min_lr=1e-4, max_lr=1.0, num_training=24) if tuner else None
    trainer.fit(model)
    found = found or finder.optimal_lr
    return {**result_of(trainer, model), **found.results, "suggestion": found.suggestion()}


@pytest.mark.parametrize(
    ("case", "tuner"),
    [(Fit((2, 5), weighting="active"), True), (Fit((0, 3, 5), weighting="samples", ragged=True), False)],
)
def test_learning_rate_finder(workers: Workers, case: Fit, tuner: bool, tmp_path: Path) -> None:
    results = workers.run(case.world_size, find, case, str(tmp_path), tuner)
    expected = workers.outcomes(1, find, case, str(tmp_path), tuner, store="")[0]
    assert not expected.error, expected.trace
    for result in results:
        compare(result, results[0], 0.0)
        compare(result, expected.value, 1e-8)
    assert len(results[0]["loss"]) > 10
    assert not list(tmp_path.glob(".lr_find*"))


# ---------------------------------------------------------------- what is unfrozen elsewhere


class Unfreezing(Fine):
    ranks: tuple[int, ...] = ()
    hook = ""

    def setup(self, stage: str) -> None:
        self.backbone.requires_grad_(False)

    def unfreeze(self, hook: str) -> None:
        if (self.hook, self.trainer.current_epoch) == (hook, 1) and self.trainer.global_rank in self.ranks:
            self.backbone.requires_grad_(True)

    def on_train_epoch_start(self) -> None:
        self.unfreeze("start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.unfreeze("middle")


def fit_unfreezing(rank: int, hook: str, ranks: tuple[int, ...]) -> None:
    trainer, model = build(Fit((2, 3)), lambda _: ([], {}), "", Unfreezing)
    model.hook, model.ranks = hook, ranks  # type: ignore[attr-defined]
    trainer.fit(model)


@pytest.mark.parametrize(
    ("hook", "ranks", "message"),
    [
        ("start", (1,), "The ranks unfroze different parameters before this epoch ([0, 2] by rank)"),
        ("middle", (0, 1), "2 parameters (net.0.weight, ...) were unfrozen in the middle of an epoch"),
    ],
)
def test_what_is_unfrozen_otherwise_raises(workers: Workers, hook: str, ranks: tuple[int, ...], message: str) -> None:
    for outcome in workers.outcomes(2, fit_unfreezing, hook, ranks):
        assert outcome.error.startswith(("UnsupportedError", "PeerFailedError"))
        assert message in outcome.error


# ---------------------------------------------------------------- the rest


class Sees(pl.LightningModule):
    """Has one dataset for all ranks, and writes down what it sees of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[float] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(7.0)[:, None], shuffle=True)  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(float(batch))
        return self.layer(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit_overfitting(rank: int, batches: int) -> list[float]:
    trainer = build_trainer(Fit((0, 0), epochs=2), use_distributed_sampler=True, overfit_batches=batches)
    module = Sees()
    trainer.fit(module)
    return module.seen


def test_overfitting_with_an_injected_sampler(workers: Workers) -> None:
    assert workers.run(2, fit_overfitting, 4) == [[0, 2, 4, 6] * 2, [1, 3, 5] * 2]


def test_scaling_the_batch_size_raises() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_join", logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="batch size is currently not supported with distributed"):
        Tuner(trainer).scale_batch_size(Sees())
