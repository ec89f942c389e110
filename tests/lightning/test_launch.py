"""Strategies by name, processes that Lightning starts itself, and pickles of what takes part in a run."""

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_join import DDPJoinStrategy, JoinCallback, JoinMonitor
from tests.support.front_ends.lightning import Fit, Module, build_trainer
from tests.support.run import Batch, loss_of
from tests.support.workers import Workers
from torch_join import JoinTypeError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp_join_spawn", marks=pytest.mark.long),
        pytest.param("ddp_join_fork", marks=pytest.mark.long),
        pytest.param("ddp_join_notebook_find_unused_parameters_false", marks=pytest.mark.long),
        pytest.param("ddp_spawn", marks=pytest.mark.long),  # with a JoinCallback
        pytest.param("fsdp_join_spawn", marks=pytest.mark.long),  # and the weights come back whole
        "fsdp_join_fork",
    ],
)
def test_processes_that_lightning_starts_train_exactly(strategy: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.launched", strategy],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout.split("off by ")[1]) < 1e-10


def test_every_name_that_ddp_has() -> None:
    names = StrategyRegistry.available_strategies()
    plain = [name for name in names if name.startswith("ddp") and not name.startswith("ddp_join")]
    assert len(plain) == 12
    for name in plain:
        ours, its = StrategyRegistry.get(name.replace("ddp", "ddp_join", 1)), StrategyRegistry.get(name)
        assert isinstance(ours, DDPJoinStrategy)
        assert (ours._start_method, ours._ddp_kwargs) == (its._start_method, its._ddp_kwargs)


def test_a_timeout_in_seconds_is_refused() -> None:
    with pytest.raises(JoinTypeError, match=r"not 5\. Write timeout=timedelta\(seconds=5\)"):
        DDPJoinStrategy(timeout=5)
    assert DDPJoinStrategy(timeout=timedelta(seconds=5))._timeout == timedelta(seconds=5)


# ---------------------------------------------------------------- pickles


class Pickling(Module):
    """Has itself and its trainer pickled and copied, at the end of steps, validation steps and epochs."""

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.mean = MeanMetric()
        self.failed: list[str] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def val_dataloader(self) -> Any:
        self.pickle_all(self.trainer, "as dataloaders are made")
        return DataLoader([self.case.batch(0, 0, 0)] * (1 + 2 * self.trainer.global_rank), batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val", loss_of(self.net, batch), on_step=True, on_epoch=True, sync_dist=True)

    def pickle_all(self, trainer: pl.Trainer, where: str) -> None:
        bar: Any = trainer.progress_bar_callback
        attempts: dict[str, Callable[[], Any]] = {
            "torch.save of the module": lambda: torch.save(self, io.BytesIO()),
            "a copy of the trainer's model": lambda: copy.deepcopy(trainer.model),
            "torch.save of the trainer's model": lambda: torch.save(trainer.model, io.BytesIO()),
            "the progress bar": lambda: pickle.loads(pickle.dumps(bar)),
            "the trainer": lambda: pickle.loads(pickle.dumps(trainer)),
            "a copy of the strategy": lambda: copy.deepcopy(trainer.strategy),
            "the results": lambda: pickle.loads(pickle.dumps(trainer.fit_loop.epoch_loop._results)),
        }
        for name, attempt in attempts.items():
            try:
                attempt()
            except Exception as error:
                self.failed.append(f"{name} {where}: {type(error).__name__}: {error}")

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if batch_idx in (0, max(self.case.lengths) - 1):
            self.pickle_all(self.trainer, f"in step {batch_idx}")

    def on_validation_batch_end(self, outputs: Any, batch: Batch, batch_idx: int, *_: Any) -> None:
        self.pickle_all(self.trainer, f"in validation step {batch_idx}")

    def on_train_epoch_end(self) -> None:
        self.pickle_all(self.trainer, "at the epoch's end")


class PickleInCallback(pl.Callback):
    """Does the same before the module's own hook."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if batch_idx == max(module.case.lengths) - 1:
            module.pickle_all(trainer, "in a callback")


def fit_pickling(rank: int, case: Fit, strategy: str, with_callback: bool) -> list[str]:
    callbacks = [TQDMProgressBar(), JoinMonitor(), PickleInCallback(), *([JoinCallback()] if with_callback else [])]
    trainer = build_trainer(case, strategy=strategy, callbacks=callbacks, enable_progress_bar=True)
    module = Pickling(case)
    module.pickle_all(trainer, "before the fit")
    trainer.fit(module)
    module.pickle_all(trainer, "after the fit")
    return module.failed


@pytest.mark.parametrize("with_callback", [False, True], ids=["strategy", "callback"])
def test_what_leads_to_a_strategy_is_pickled_at_any_time(workers: Workers, with_callback: bool) -> None:
    strategy = "ddp" if with_callback else "ddp_join"
    for failed in workers.run(2, fit_pickling, Fit((2, 4), epochs=1, model="norm"), strategy, with_callback):
        assert failed == []
