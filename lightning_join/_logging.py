"""Epoch values that every rank can reduce, also a rank that never logged them.

A value logged with `sync_dist=True` is reduced when the epoch has ended and somebody first reads it:
in Lightning each rank does so in the order of its own dictionary, and a rank-zero-only callback (a
progress bar) may do it earlier than the other ranks. Here each reduction is agreed on first. A rank
that lacks the key takes a neutral value: 0 for a sum or a mean, the infinities for a minimum and a
maximum.
"""

from typing import TYPE_CHECKING, Any

import torch

from lightning_join._compat import Metadata, ResultCollection, ResultMetric, Sync, mark_updated
from torch_join import Channel, UnsupportedError, name_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_join._strategy import DDPJoinStrategy

Description = tuple[str, dict[str, Any], torch.dtype]


class JoinResultCollection(ResultCollection):
    """Lightning's collection of logged values, whose epoch values all ranks reduce in one order."""

    strategy: "DDPJoinStrategy"

    def metrics(self, on_step: bool) -> Any:
        if not on_step:
            self._reduce_together(until_all=False)
        return super().metrics(on_step)

    def settle(self) -> None:
        """Reduce what has been logged on any rank; all ranks meet.

        Raises:
            UnsupportedError: On all ranks, if some have logged a metric object and others have not.
        """
        self._reduce_together(until_all=True)

    def _reduce_together(self, until_all: bool) -> None:
        if self.strategy.world_size == 1:
            return
        while True:
            mine = self._next_unreduced()
            if mine is None and not until_all:
                return
            # A rank that reads early meets the others where they settle.
            everyone = self.strategy.channel.gather((mine, self._metric_objects()))
            agreed = next((description for description, _ in everyone if description is not None), None)
            if agreed is None:
                _compare("The metric object", [objects for _, objects in everyone], "Log its compute() as a value")
                return
            self._reduce(*agreed)

    def _next_unreduced(self) -> Description | None:
        for key, item in self.valid_items():
            if item.is_tensor and item.meta.on_epoch and item._computed is None and _is_synced(item.meta.sync):
                fields = {name: value for name, value in vars(item.meta).items() if name != "_sync"}
                # The function itself cannot be pickled.
                return key, {**fields, "reduce_fx": item.meta.reduce_fx.__name__}, item.value.dtype
        return None

    def _reduce(self, key: str, fields: dict[str, Any], dtype: torch.dtype) -> None:
        item = self.get(key)
        if item is None or item.has_reset:
            item = self[key] = _neutral(fields, dtype, self.strategy)
        item.compute()

    def _metric_objects(self) -> list[str]:
        return [key for key, item in self.valid_items() if not item.is_tensor and item.meta.on_epoch]


def _is_synced(sync: Sync) -> bool:
    # A value synced over a group of the user's own is the user's to keep in step.
    return sync.should and not sync.rank_zero_only and sync.group is None


def check_monitored(trainer: "pl.Trainer", channel: Channel) -> None:
    """Compare which of the values that callbacks monitor each rank has; all ranks meet.

    A callback that does not find its value on one rank stays away there from the decision that the
    others take together.

    Raises:
        UnsupportedError: On all ranks, if some have a value and others have not.
    """
    monitored = {getattr(callback, "monitor", None) for callback in trainer.callbacks}  # type: ignore[attr-defined]
    if monitored != {None} and monitored:
        everyone = channel.gather(sorted(str(name) for name in monitored if name in trainer.callback_metrics))
        _compare("The monitored value", everyone, "Log it with on_epoch=True, sync_dist=True")


def _compare(what: str, everyone: list[list[str]], remedy: str) -> None:
    for name in sorted({name for names in everyone for name in names}):
        lacking = [rank for rank, names in enumerate(everyone) if name not in names]
        if lacking:
            raise UnsupportedError(
                f"{what} {name!r} is missing on {name_ranks(lacking)}, which logged none (had no batch, as a rule),"
                f" while other ranks have it. {remedy}."
            )


def _neutral(fields: dict[str, Any], dtype: torch.dtype, strategy: "DDPJoinStrategy") -> ResultMetric:
    meta = Metadata(**fields)
    meta.sync = Sync(_should=True, fn=strategy.reduce)
    item = ResultMetric(meta, is_tensor=True).to(strategy.root_device)
    item.value = item.value.to(dtype)
    mark_updated(item)
    return item


def forget_step_values(results: ResultCollection) -> None:
    """Drop this rank's last step values, so that none is written again after it has joined."""
    for item in results.result_metrics:
        item._forward_cache = None


class HookLogging:
    """Keeps `self.log` in step in the batch hooks, which all ranks run, a joined one for a batch it has had.

    On a joined rank it does nothing. In the tail a value that is reduced at once would need a joined
    rank's part: it raises on all ranks.

    Args:
        results: What `self.log` writes to.
        joined: Whether this rank makes a shadow step.
    """

    def __init__(self, results: ResultCollection, joined: bool) -> None:
        self._results = results
        self._joined = joined

    def __enter__(self) -> None:
        self._log = self._results.log
        self._results.log = self._log_in_tail

    def __exit__(self, *_: object) -> None:
        del self._results.log

    def _log_in_tail(self, fx: str, name: str, value: Any, **options: Any) -> None:
        if options.get("on_step") and options.get("sync_dist") and not options.get("rank_zero_only"):
            raise UnsupportedError(
                f"`{fx}` logs {name!r} with on_step=True, sync_dist=True while some rank has run out of batches, which"
                " is not possible yet. Log it with on_step=False, on_epoch=True."
            )
        if not self._joined:
            self._log(fx, name, value, **options)
