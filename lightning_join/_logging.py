"""Epoch values that every rank can reduce, also a rank that never logged them.

Each value logged with `sync_dist=True` does its own collectives when the epoch ends, in the order of
the rank's own dictionary. So before that, the ranks agree on one list of keys in one order, and a
rank that lacks a key takes a neutral value: 0 for a sum or a mean, the infinities for a minimum and
a maximum.
"""

from typing import TYPE_CHECKING, Any

import torch

from lightning_join._compat import Metadata, ResultCollection, ResultMetric, Sync, mark_updated

if TYPE_CHECKING:
    from lightning_join._strategy import DDPJoinStrategy


def share_schema(results: ResultCollection, strategy: "DDPJoinStrategy") -> None:
    """Give `results` the keys that other ranks have, in one order on all; all ranks meet."""
    everyone = strategy.channel.gather(_schema(results))
    if all(schema == everyone[0] for schema in everyone):
        return
    union: dict[str, tuple[dict[str, Any], torch.dtype]] = {}
    for schema in everyone:
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


def _schema(results: ResultCollection) -> list[tuple[str, tuple[dict[str, Any], torch.dtype]]]:
    # A value synced over a group of the user's own is the user's to keep in step.
    return [
        (key, (_fields(item.meta), item.value.dtype))
        for key, item in results.valid_items()
        if item.is_tensor and item.meta.on_epoch and _is_synced(item.meta.sync)
    ]


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


class Silence:
    """Makes `self.log` do nothing, in hooks that run for a batch which this rank has had already."""

    def __init__(self, results: ResultCollection) -> None:
        self._results = results

    def __enter__(self) -> None:
        self._results.log = _do_nothing

    def __exit__(self, *_: object) -> None:
        del self._results.log


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
