"""How uneven the dataloaders are, and what that costs, in a trainer's logs."""

import time
from collections.abc import Callable
from os import PathLike
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from torch_join import JoinMonitor as CoreMonitor
from torch_join import JoinTypeError
from torch_join.integration import Channel, EpochRecord, RankRecord, Rebalancing

_logger = logging.get_logger(__name__)
# Of a run; the second logs values as its trainer does.
_Watched = tuple[Channel, Callable[[dict[str, float]], None], Rebalancing]


class JoinMonitor(TrainerCallback):
    """Logs, per epoch, the batches of each rank, its steps without one, and the share of time that ranks were idle.

    The values are those of `lightning_join.JoinMonitor`: `join/idle_share`, `join/epoch_seconds`,
    `join/batches_rank_0`, `join/shadow_steps_rank_0`, `join/active_seconds_rank_0`, and so on. Evaluations are left out
    of seconds.

    Args:
        report: Where to write, after each epoch, a page that shows all of this: see `torch_join.JoinMonitor`.
        plot: Where to write a PNG file with a bar per rank then, by matplotlib.

    Attributes:
        epochs: What all ranks did in each epoch, the same on every rank.

    Raises:
        JoinTypeError: `report` or `plot` is no path. When an epoch ends: the trainer of several ranks is none with
            `JoinTrainerMixin`.
        JoinValueError: `plot` is given and matplotlib is missing.
    """

    _joined_at: int | None
    _watched: _Watched | None

    def __init__(self, report: str | PathLike[str] | None = None, *, plot: str | PathLike[str] | None = None) -> None:
        self._monitor = CoreMonitor(report, plot=plot)
        self.epochs: list[EpochRecord] = self._monitor.epochs
        self.watch(None)
        self._begin()

    def watch(self, watched: _Watched | None) -> None:
        """A run begins, or ends."""
        self._watched = watched
        self._given_bytes = 0

    def note_step(self, joined: bool) -> None:
        """A step of training begins."""
        if not joined:
            self._batches += 1
            return
        if self._joined_at is None:
            self._joined_at, self._joined_time = self._batches, self._now()
        self._shadow_steps += 1

    def note_pause(self, seconds: float) -> None:
        """An evaluation has ended, which took so long."""
        self._paused += seconds

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._begin()

    def on_epoch_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if self._watched is None:
            if args.world_size > 1:
                raise JoinTypeError(
                    "JoinMonitor shows how ranks join, and in this trainer none does. Use"
                    " JoinTrainer, put JoinTrainerMixin before the trainer's class, or leave JoinMonitor out."
                )
            return
        seconds = active = self._now() - self._start
        if self._joined_at is not None:
            active = self._joined_time - self._start if self._batches else 0.0
        channel, log, rebalancing = self._watched
        given_bytes, self._given_bytes = rebalancing.nbytes - self._given_bytes, rebalancing.nbytes
        mine = RankRecord(
            self._batches,
            self._shadow_steps,
            self._joined_at,
            active,
            seconds,
            *rebalancing.exchanged,
            given_bytes,
        )
        record = EpochRecord(len(self.epochs), tuple(channel.gather(mine, of=RankRecord)))
        self._monitor.add(record, rebalancing.enabled)
        if state.is_world_process_zero:
            self._monitor.write_in_time()
            _logger.warning(f"JoinMonitor: {record}")
        log(record.metrics())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._monitor.write_rest()

    def _begin(self) -> None:
        self._batches = self._shadow_steps = 0
        self._joined_at = None
        self._paused = 0.0
        self._start = self._joined_time = time.monotonic()

    def _now(self) -> float:
        """Return seconds on a clock that stands still in evaluations."""
        return time.monotonic() - self._paused
