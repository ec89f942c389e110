"""Logged values that every rank can reduce, even a rank that never logged them.

A value logged with `sync_dist=True` is reduced after the epoch, when it is first read. In Lightning, each rank does
this in the order of its own dictionary, and a rank-zero-only callback (a progress bar) may do it before other ranks.
Here the ranks first agree on each reduction. A rank that lacks the key uses a neutral value: 0 for a sum or a mean, the
infinities for a minimum and a maximum. For a torchmetrics metric it uses its own object and its state, if any.
"""

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl

from lightning_join._compat import ResultCollection, ResultMetric
from lightning_join._logging.step_values import Logged, is_synced
from lightning_join._strategy_protocol import JoiningStrategy
from torch_join import UnsupportedError
from torch_join.integration import Channel, name_ranks


class JoinResultCollection(ResultCollection):
    """Lightning's collection of logged values; all ranks reduce its epoch values in the same order."""

    strategy: JoiningStrategy

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        values = self.strategy.step_values
        with nullcontext() if values is None else values.around_update(key, self[key], value):
            super().update_metrics(key, value, batch_size)

    def metrics(self, on_step: bool) -> Any:
        if not on_step:
            self._reduce_together(until_all=False)
        return super().metrics(on_step)

    def reduce_all(self) -> None:
        """Reduce all values that any rank has logged; all ranks call this."""
        self._reduce_together(until_all=True)

    def _reduce_together(self, until_all: bool) -> None:
        while True:
            own = self._next_unreduced()
            if own is None and not until_all:
                return
            # A rank that reads early waits here for the others, which arrive in `reduce_all` at the latest.
            answers = self.strategy.channel.gather(own, of=Logged | None)
            agreed = next((description for description in answers if description is not None), None)
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
    """Check that all ranks have the values that callbacks monitor; all ranks call this.

    A callback that lacks its value on one rank would not take part there in the joint decision of all ranks.

    Raises:
        UnsupportedError: On all ranks, if only some ranks have a value.
    """
    monitored = {getattr(callback, "monitor", None) for callback in trainer.callbacks}  # type: ignore[attr-defined]
    if monitored != {None} and monitored:
        by_rank = channel.gather(
            sorted(str(name) for name in monitored if name in trainer.callback_metrics), of=list[str]
        )
        for name in sorted({name for names in by_rank for name in names}):
            lacking = [rank for rank, names in enumerate(by_rank) if name not in names]
            if lacking:
                raise UnsupportedError(
                    f"The monitored value {name!r} is missing on {name_ranks(lacking)}, which did not log it (usually"
                    " because it had no batch) while other ranks did. Log it with on_epoch=True, sync_dist=True."
                )
