"""Epoch values that every rank can reduce, also a rank that never logged them.

Each value logged with `sync_dist=True` does its own collectives when the epoch ends, in the order of
the rank's own dictionary. So before that, the ranks agree on one list of keys in one order, and a
rank that lacks a key takes a neutral value: 0 for a sum or a mean, the infinities for a minimum and
a maximum.
"""

from typing import TYPE_CHECKING, Any

import torch

from lightning_join._compat import Metadata, ResultCollection, ResultMetric, Sync, mark_updated
from torch_join import Channel, UnsupportedError, name_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_join._strategy import DDPJoinStrategy


def share_schema(results: ResultCollection, strategy: "DDPJoinStrategy") -> None:
    """Give `results` the keys that other ranks have, in one order on all; all ranks meet.

    Raises:
        UnsupportedError: On all ranks, if some have logged a metric object and others have not.
    """
    everyone = strategy.channel.gather((_schema(results), _metric_objects(results)))
    schemas = [schema for schema, _ in everyone]
    _compare("The metric object", [objects for _, objects in everyone], "Log its compute() as a value")
    if all(schema == schemas[0] for schema in schemas):
        return
    union: dict[str, tuple[dict[str, Any], torch.dtype]] = {}
    for schema in schemas:
        for key, description in schema:
            union.setdefault(key, description)
    own = {key for key, _ in _schema(results)}
    for key, (fields, dtype) in union.items():
        if key not in own:
            results[key] = _neutral(fields, dtype, strategy)
    rest = {key: item for key, item in results.items() if key not in union}
    agreed = {key: results[key] for key in union}
    results.clear()
    results.update(agreed)
    results.update(rest)


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


def _schema(results: ResultCollection) -> list[tuple[str, tuple[dict[str, Any], torch.dtype]]]:
    # A value synced over a group of the user's own is the user's to keep in step.
    return [
        (key, (_fields(item.meta), item.value.dtype))
        for key, item in results.valid_items()
        if item.is_tensor and item.meta.on_epoch and _is_synced(item.meta.sync)
    ]


def _metric_objects(results: ResultCollection) -> list[str]:
    return [key for key, item in results.valid_items() if not item.is_tensor and item.meta.on_epoch]


def _is_synced(sync: Sync) -> bool:
    return sync.should and not sync.rank_zero_only and sync.group is None


def _fields(meta: Metadata) -> dict[str, Any]:
    fields = {name: value for name, value in vars(meta).items() if name != "_sync"}
    return {**fields, "reduce_fx": meta.reduce_fx.__name__}  # the function itself cannot be pickled


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
