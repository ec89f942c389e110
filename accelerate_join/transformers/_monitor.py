"""`JoinMonitor`: logs how uneven a trainer's dataloaders are, and the cost of that."""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from torch_join import JoinMonitor as CoreMonitor
from torch_join import JoinTypeError, Weighting
from torch_join.integration import Channel, EpochRecord, Rebalancing, Stopwatch

_logger = logging.get_logger(__name__)
# The channel, the log function and the rebalancing of a run; the function logs values as the trainer does.
_Watched = tuple[Channel, Callable[[dict[str, float]], None], Rebalancing, Weighting]


class JoinMonitor(TrainerCallback):
    """Logs, per epoch, the batches and shadow steps of each rank, and the share of time that ranks were idle.

    The values are those of `lightning_join.JoinMonitor`: `join/idle_share`, `join/epoch_seconds`,
    `join/batches_rank_0`, `join/shadow_steps_rank_0`, `join/active_seconds_rank_0`, and so on. Seconds exclude
    evaluations.

    Args:
        report: The path of a report page, written after each epoch: see `torch_join.JoinMonitor`.
        plot: The path of a PNG file with a bar per rank, also written after each epoch, with matplotlib.

    Attributes:
        epochs: The records of all ranks in each epoch, equal on every rank.
        stopwatch: Measures this rank's current epoch.
        watched: The channel, log function, rebalancing and weighting of the current run.

    Raises:
        JoinTypeError: `report` or `plot` is not a path. At the end of an epoch: a trainer with several ranks has no
            `JoinTrainerMixin`.
        JoinValueError: `plot` is given and matplotlib is missing.
    """

    def __init__(self, report: str | PathLike[str] | None = None, *, plot: str | PathLike[str] | None = None) -> None:
        self._monitor = CoreMonitor(report, plot=plot)
        self.epochs: list[EpochRecord] = self._monitor.epochs
        self.stopwatch = Stopwatch()
        self._joined = False
        self._count: float | None = None
        self.watched: _Watched | None = None

    def note_step(self, joined: bool, count: float | None) -> None:
        """Note the start of a training step; `count` is that of this rank's batch, if batches are counted."""
        self._joined, self._count = joined, count
        if not joined:
            self.stopwatch.take()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.stopwatch = Stopwatch(given_bytes=0 if self.watched is None else self.watched[2].nbytes)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if not self._joined:
            self.stopwatch.ask(self._count)

    on_substep_end = on_step_end

    def on_epoch_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if self.watched is None:
            if args.world_size > 1:
                raise JoinTypeError(
                    "JoinMonitor shows when ranks finish, but this trainer does not support joining. Use JoinTrainer,"
                    " put JoinTrainerMixin before the trainer class, or remove JoinMonitor."
                )
            return
        channel, log, rebalancing, weighting = self.watched
        own = replace(self.stopwatch.stop(*rebalancing.exchanged, rebalancing.nbytes), reading_seconds=None)
        record = self._monitor.add_loop(own, channel, True, rebalancing.enabled, weighting)
        if record is None:
            return
        if state.is_world_process_zero:
            _logger.warning(f"JoinMonitor: {record}")
        log(record.metrics())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._monitor.write_rest()
