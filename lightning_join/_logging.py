"""Logged values that every rank can reduce, also a rank that never logged them.

A value logged with `sync_dist=True` is reduced when the epoch has ended and somebody first reads it:
in Lightning each rank does so in the order of its own dictionary, and a rank-zero-only callback (a
progress bar) may do it earlier than the other ranks. Here each reduction is agreed on first. A rank
that lacks the key takes a neutral value: 0 for a sum or a mean, the infinities for a minimum and a
maximum. For a metric of torchmetrics it takes its own, which contributes what it has, if anything.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lightning_join._compat import ResultCollection, ResultMetric
from lightning_join._step_values import Logged, is_synced, syncs_in_forward
from torch_join import UnsupportedError
from torch_join.integration import Channel, name_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_join._strategy import DDPJoinStrategy


class JoinResultCollection(ResultCollection):
    """Lightning's collection of logged values, whose epoch values all ranks reduce in one order."""

    strategy: "DDPJoinStrategy"

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        item = self[key]
        at_once = item.is_tensor and item.meta.on_step and is_synced(item.meta.sync)
        parts = self.strategy.step_values
        with parts.reducing(key, item, value) if at_once and parts is not None else nullcontext():
            super().update_metrics(key, value, batch_size)
        if not item.is_tensor and item.meta.on_step and syncs_in_forward(value) and parts is not None:
            parts.share(key, item)

    def metrics(self, on_step: bool) -> Any:
        if not on_step:
            self._reduce_together(until_all=False)
        return super().metrics(on_step)

    def settle(self) -> None:
        """Reduce what has been logged on any rank; all ranks meet."""
        self._reduce_together(until_all=True)

    def _reduce_together(self, until_all: bool) -> None:
        while True:
            mine = self._next_unreduced()
            if mine is None and not until_all:
                return
            # A rank that reads early meets the others where they settle.
            everyone = self.strategy.channel.gather(mine, of=Logged | None)
            agreed = next((description for description in everyone if description is not None), None)
            if agreed is None:
                return
            agreed.item_in(self, self.strategy).compute()

    def _next_unreduced(self) -> Logged | None:
        for key, item in self.valid_items():
            if item.meta.on_epoch and item._computed is None and self._is_shared(item):
                return Logged.of(key, item, item.value if item.is_tensor else None)
        return None

    def _is_shared(self, item: ResultMetric) -> bool:
        if item.is_tensor:
            return is_synced(item.meta.sync)
        return self.strategy.metrics is not None and self.strategy.metrics.syncs(item.value)


def check_monitored(trainer: "pl.Trainer", channel: Channel) -> None:
    """Compare which of the values that callbacks monitor each rank has; all ranks meet.

    A callback that does not find its value on one rank stays away there from the decision that the
    others take together.

    Raises:
        UnsupportedError: On all ranks, if some have a value and others have not.
    """
    monitored = {getattr(callback, "monitor", None) for callback in trainer.callbacks}  # type: ignore[attr-defined]
    if monitored != {None} and monitored:
        everyone = channel.gather(
            sorted(str(name) for name in monitored if name in trainer.callback_metrics), of=list[str]
        )
        for name in sorted({name for names in everyone for name in names}):
            lacking = [rank for rank, names in enumerate(everyone) if name not in names]
            if lacking:
                raise UnsupportedError(
                    f"The monitored value {name!r} is missing on {name_ranks(lacking)}, which logged none (had no"
                    " batch, as a rule), while other ranks have it. Log it with on_epoch=True, sync_dist=True."
                )
