"""`JoinMonitor`: how uneven the dataloaders are, and what that costs."""

import time
from dataclasses import replace
from os import PathLike
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lightning_join import _compat
from lightning_join._base_strategy import Joining
from lightning_join._callback import JOINING, JoinCallback
from lightning_join._packages import check_trainer
from lightning_join._strategy_protocol import rebalancing_of
from torch_join import JoinMonitor as CoreMonitor
from torch_join import JoinPerformanceWarning, JoinTypeError, JoinValueError
from torch_join.integration import Channel, EpochRecord, Stopwatch


class JoinMonitor(Callback):
    """Logs, per epoch, the batches and shadow steps of each rank, and the share of time that ranks were idle.

    A rank is idle while it has joined: it has run out of batches and others have not. (That a rank waits
    for a slower one inside a step is not counted, and time spent in validation is left out.)

    After each epoch rank 0 prints one line and logs to the trainer's loggers: `join/idle_share` (of all
    ranks' seconds, from 0 to 1), `join/epoch_seconds`, and for each rank `join/batches_rank_0`,
    `join/shadow_steps_rank_0` and `join/active_seconds_rank_0` (until it joined). With more than 16
    ranks the last three are `join/batches_min`, `join/batches_mean`, `join/batches_max` and so on.
    Of all ranks: `join/idle_seconds`, added up; `join/skew`, the longest rank's batches over the mean; and what
    rebalancing would save, `join/steps_to_save` and `join/seconds_to_save` (an estimate, by the mean step).
    Where batches are rebalanced also `join/donated`, `join/donated_bytes` and `join/steps_saved`, of all ranks.

    It warns, once a fit, when the skew is so large that resharding would pay more than joining. With
    n batches in all, W ranks with even shards need ceil(n / W) steps, and uneven ones as many as the
    longest rank has, unless batches are rebalanced; the difference is lost in every epoch. Rewriting the data
    costs one pass over it, which is about one epoch at most. So if even shards save a tenth of an epoch,
    resharding has paid after ten.

    Args:
        report: Where to write, after each epoch, a page that shows all of this: see `torch_join.JoinMonitor`.
        plot: Where to write, likewise, a PNG file with a bar per rank that shows when it was active and joined. It
            takes matplotlib (`pip install 'torch-join[plot]'`).
        reshard_above: The share of an epoch's steps that even shards must save for the warning, from 0 to 1.

    Raises:
        JoinValueError: `reshard_above` is not from 0 to 1, or `plot` is given and matplotlib is missing.
        JoinTypeError: `plot` or `report` is no path. When a run begins: the strategy does not join, or the trainer is
            not Lightning's.

    Attributes:
        epochs: What all ranks did in each epoch of the fit, the same on every rank.

    Limits:
        An epoch that is resumed in its middle counts from there.
    """

    def __init__(
        self,
        plot: str | PathLike[str] | None = None,
        *,
        report: str | PathLike[str] | None = None,
        reshard_above: float = 0.1,
    ) -> None:
        if not 0 <= reshard_above <= 1:
            raise JoinValueError(f"reshard_above is a share of steps, from 0 to 1, got {reshard_above!r}.")
        self._monitor = CoreMonitor(report, plot=plot)
        self._reshard_above = reshard_above
        self._warned = False
        self.epochs: list[EpochRecord] = self._monitor.epochs
        self._stopwatch = Stopwatch()
        self._joined_at: int | None = None
        self._validation_start = 0.0

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        check_trainer(trainer, self)
        strategy: Any = trainer.strategy
        joins = isinstance(strategy, Joining) and strategy.options.enable
        upgraded = type(strategy) in JOINING and any(
            isinstance(each, JoinCallback)
            for each in trainer.callbacks  # type: ignore[attr-defined]
        )
        if not (joins or upgraded or isinstance(strategy, SingleDeviceStrategy)):
            disabled = " with enable=False" if isinstance(strategy, Joining) else ""
            raise JoinTypeError(
                f"JoinMonitor shows how ranks join, and a {type(strategy).__name__}{disabled} does not join. Use"
                " Trainer(strategy='ddp_join'), add a lightning_join.JoinCallback to strategy='ddp', or leave"
                " JoinMonitor out."
            )
        strategy.monitored = stage == "fit"

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        strategy: Any = trainer.strategy
        strategy.monitored = False

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.epochs.clear()
        self._warned = False

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        rebalancing = rebalancing_of(trainer)
        self._stopwatch, self._joined_at = Stopwatch(given_bytes=rebalancing.nbytes if rebalancing else 0), None

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not getattr(trainer.strategy, "joined", False):
            self._stopwatch.take()
            self._stopwatch.ask()
        elif self._joined_at is None:
            self._joined_at = batch_idx

    def on_validation_start(self, *_: Any) -> None:
        self._validation_start = time.monotonic()

    def on_validation_end(self, *_: Any) -> None:
        self._stopwatch.pause(time.monotonic() - self._validation_start)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        rebalancing = rebalancing_of(trainer)
        exchanged = (*rebalancing.exchanged, rebalancing.nbytes) if rebalancing else (0, 0, 0)
        mine = replace(self._stopwatch.stop(*exchanged), joined_at=self._joined_at, reading_seconds=None)
        channel = cast(Channel, getattr(trainer.strategy, "channel", None) or Channel())
        record = self._monitor.add_loop(mine, channel, True, rebalancing is not None, trainer.current_epoch)
        if record is None:
            return
        rank_zero_info(f"JoinMonitor: {record}")
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(record.metrics(), step=_compat.epoch_end_step(trainer))
        if record.saving > self._reshard_above and not self._warned:
            self._warned = True
            rank_zero_only(JoinPerformanceWarning.warn)(
                f"Even shards would save {record.saving:.0%} of the steps of epoch {record.epoch}, more than the"
                f" {self._reshard_above:.0%} of JoinMonitor(reshard_above=...): over several epochs it pays to deal the"
                " data out anew, or to give all ranks one dataset, which Lightning then shards."
                + ("" if rebalancing else " With rebalance=True the strategy saves as much at once, by other steps.")
                + " Training is exact either way."
            )

    def on_train_end(self, *_: Any) -> None:
        self._monitor.write_rest()

    def on_exception(self, *_: Any) -> None:
        self._monitor.write_rest()
