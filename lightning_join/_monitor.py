"""`JoinMonitor`: measures how uneven the dataloaders are, and the cost of that."""

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
from lightning_join._checks import check_trainer
from lightning_join._strategy_protocol import rebalancing_of
from torch_join import JoinMonitor as CoreMonitor
from torch_join import JoinPerformanceWarning, JoinTypeError, JoinValueError
from torch_join.integration import Channel, EpochRecord, Stopwatch


class JoinMonitor(Callback):
    """Logs each rank's batches and shadow steps per epoch, and the share of time that ranks were idle.

    A rank is idle once it has run out of batches while other ranks have not. Waiting for a slower rank inside a step
    does not count as idle, and validation time is excluded.

    After each epoch, rank 0 prints one line and logs these values to the trainer's loggers: `join/idle_share` (of all
    ranks' seconds, from 0 to 1), `join/epoch_seconds`, and for each rank `join/batches_rank_0`,
    `join/shadow_steps_rank_0` and `join/active_seconds_rank_0` (until the rank finished). With more than 16 ranks, the
    last three become `join/batches_min`, `join/batches_mean`, `join/batches_max` and so on. It also logs
    `join/idle_seconds`, the sum over all ranks; `join/skew`, the longest rank's batches over the mean; and what
    rebalancing would save, `join/steps_to_save` and `join/seconds_to_save` (an estimate from the mean step). If batches
    are rebalanced, it also logs `join/donated`, `join/donated_bytes` and `join/steps_saved` of all ranks.

    The monitor warns once per fit if even shards would save more than `reshard_above` of an epoch's steps. For n
    batches in total, W ranks with even shards need ceil(n / W) steps; with uneven shards and no rebalancing, they need
    as many steps as the longest rank has batches. Rewriting the data costs about one epoch at most, so if even shards
    save a tenth of each epoch, resharding has paid off after ten epochs.

    Args:
        report: The path of a report page, written after each epoch: see `torch_join.JoinMonitor`.
        plot: The path of a PNG file, also written after each epoch, with a bar per rank that shows when the rank was
            active and when it had finished. Requires matplotlib (`pip install 'torch-join[plot]'`).
        reshard_above: The fraction of an epoch's steps, from 0 to 1, above which the monitor warns.

    Raises:
        JoinValueError: `reshard_above` is not from 0 to 1, or `plot` is given and matplotlib is missing.
        JoinTypeError: `plot` or `report` is not a path. At the start of a run: the strategy does not support joining,
            or the trainer is from the other Lightning package.

    Attributes:
        epochs: The records of all ranks in each epoch of the fit, equal on every rank.

    Limits:
        A resumed epoch counts from the batch where it resumes.
    """

    def __init__(
        self,
        plot: str | PathLike[str] | None = None,
        *,
        report: str | PathLike[str] | None = None,
        reshard_above: float = 0.1,
    ) -> None:
        if not 0 <= reshard_above <= 1:
            raise JoinValueError(f"reshard_above must be a fraction between 0 and 1, not {reshard_above!r}.")
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
                f"JoinMonitor shows when ranks finish, but {type(strategy).__name__}{disabled} does not support"
                " joining. Use Trainer(strategy='ddp_join'), add a lightning_join.JoinCallback to strategy='ddp', or"
                " remove JoinMonitor."
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
            join: Any = getattr(trainer.strategy, "join", None)
            self._stopwatch.take()
            self._stopwatch.ask(None if join is None else join.batch_count)
        elif self._joined_at is None:
            self._joined_at = batch_idx

    def on_validation_start(self, *_: Any) -> None:
        self._validation_start = time.monotonic()

    def on_validation_end(self, *_: Any) -> None:
        self._stopwatch.pause(time.monotonic() - self._validation_start)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        rebalancing = rebalancing_of(trainer)
        exchanged = (*rebalancing.exchanged, rebalancing.nbytes) if rebalancing else (0, 0, 0)
        own = replace(self._stopwatch.stop(*exchanged), joined_at=self._joined_at, reading_seconds=None)
        channel = cast(Channel, getattr(trainer.strategy, "channel", None) or Channel())
        weighting = trainer.strategy.options.weighting if isinstance(trainer.strategy, Joining) else "world"
        record = self._monitor.add_loop(own, channel, True, rebalancing is not None, weighting, trainer.current_epoch)
        if record is None:
            return
        rank_zero_info(f"JoinMonitor: {record}")
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(record.metrics(), step=_compat.epoch_end_step(trainer))
        if record.saving > self._reshard_above and not self._warned:
            self._warned = True
            rank_zero_only(JoinPerformanceWarning.warn)(
                f"Even shards would save {record.saving:.0%} of the steps of epoch {record.epoch}, more than the"
                f" {self._reshard_above:.0%} of JoinMonitor(reshard_above=...). Redistribute the data, or give all"
                " ranks one dataset for Lightning to shard."
                + ("" if rebalancing else " rebalance=True saves as much without that, but with different steps.")
                + " Training is exact either way."
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._monitor.write_rest()

    on_exception = on_train_end
