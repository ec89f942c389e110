"""Values logged with `on_step=True, sync_dist=True` in a step in the tail.

The active ranks announce each value and reduce it among themselves. A joined rank takes part with a neutral value and
keeps the result as its own step value. So rank 0's loggers and progress bar continue after it has joined, and callbacks
monitor equal values on all ranks.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_join._compat import Metadata, ResultCollection, ResultMetric, Sync, default_dtype, mark_updated
from lightning_join._strategy_protocol import JoiningStrategy
from torch_join import UnsupportedError
from torch_join.integration import Driver, Lockstep, Participant, closed, setting


def is_synced(sync: Sync) -> bool:
    """Whether a value is reduced over all ranks, and not over a user's group."""
    return sync.should and not sync.rank_zero_only and sync.group is None


def syncs_in_forward(metric: Any) -> bool:
    """Whether the step value of a torchmetrics metric covers all active ranks."""
    return bool(getattr(metric, "dist_sync_on_step", False))


@closed("logged")
@dataclass(frozen=True)
class Logged:
    """A logged value's description for other ranks, without the value itself.

    Attributes:
        key: Its key in the collection.
        fields: Its metadata.
        sync: Whether it was logged with `sync_dist=True`, and with `rank_zero_only=True`.
        dtype: Its dtype; `None` for a torchmetrics metric.
        on_cpu: Whether it is on the CPU instead of the rank's device.
    """

    key: str
    fields: dict[str, Any]
    sync: tuple[bool, bool]
    dtype: torch.dtype | None
    on_cpu: bool

    @classmethod
    def of(cls, key: str, item: ResultMetric, value: Tensor | None) -> "Logged":
        """Describe `value`, an item's current or next value; `None` for a torchmetrics metric."""
        fields = {name: value for name, value in vars(item.meta).items() if name != "_sync"}
        fields["reduce_fx"] = item.meta.reduce_fx.__name__  # the function itself cannot be pickled
        sync = item.meta.sync.should, item.meta.sync.rank_zero_only
        if value is None:
            return cls(key, fields, sync, None, on_cpu=False)
        dtype = value.dtype if value.dtype in (torch.float32, torch.float64) else default_dtype()
        return cls(key, fields, sync, dtype, value.device.type == "cpu")

    def __str__(self) -> str:
        return f"`self.log({self.fields['name']!r}, on_step=True, sync_dist=True)` in `{self.fields['fx']}`"

    def item_in(self, results: ResultCollection, strategy: JoiningStrategy) -> ResultMetric:
        """Return this rank's item; if it has none in this epoch, one that adds nothing to the other ranks' values."""
        item = results.get(self.key)
        if item is None or item.has_reset:
            meta = Metadata(**self.fields)
            meta.sync = Sync(_should=self.sync[0], fn=strategy.reduce, rank_zero_only=self.sync[1])
            device = "cpu" if self.on_cpu else strategy.root_device
            item = results[self.key] = ResultMetric(meta, is_tensor=self.dtype is not None).to(device)
            is_metric = self.dtype is None
            item.value = _find_metric(meta, strategy.lightning_module) if is_metric else item.value.to(self.dtype)
            mark_updated(item)
        return cast(ResultMetric, item)

    def neutral(self, strategy: JoiningStrategy) -> Tensor:
        """Return the neutral value of the reduction."""
        value = {"min": torch.inf, "max": -torch.inf}.get(self.fields["reduce_fx"], 0.0)
        return torch.tensor(value, dtype=self.dtype, device="cpu" if self.on_cpu else strategy.root_device)


def _find_metric(meta: Metadata, module: Any) -> Any:
    """Return this rank's object for a metric that other ranks have logged and this rank has not."""
    try:
        return module.get_submodule(meta.metric_attribute)
    except AttributeError:
        raise UnsupportedError(
            f"Other ranks logged a metric as {meta.name!r}, from their attribute {meta.metric_attribute!r}. This rank"
            " did not (usually because it had no batch) and lacks this attribute, so it cannot contribute. Create the"
            " metric in the LightningModule's __init__, on every rank."
        ) from None


class StepValues(Participant):
    """Reduces step values over the active ranks, and sends the results to joined ones.

    Args:
        strategy: The strategy that reduces.
    """

    kinds: ClassVar[dict[str, Any]] = {"log": Logged, "metric": tuple[Logged, Any]}

    def __init__(self, driver: Driver, index: int, strategy: JoiningStrategy) -> None:
        super().__init__(driver, index)
        self._strategy = strategy

    @contextmanager
    def around_update(self, key: str, item: ResultMetric, value: Any) -> Iterator[None]:
        """Wrap the update of `item` with `value` on an active rank."""
        if not item.meta.on_step or self.tail_log.is_quiet():
            yield
            return
        if item.is_tensor and is_synced(item.meta.sync):  # the update reduces it
            if self.tail_log.announces:
                self.announce("log", Logged.of(key, item, value))
            with self.tail_log.own_collectives():
                yield
            return
        yield
        # The metric has already reduced its value.
        if not item.is_tensor and syncs_in_forward(value) and self.tail_log.announces:
            step_value = move_data_to_device(item._forward_cache, torch.device("cpu"))
            self.announce_open("metric", (Logged.of(key, item, None), step_value))

    def mirror(self, kind: str, payload: Any) -> None:
        trainer: Any = cast(Any, self._strategy.lightning_module).trainer
        if kind == "metric":
            logged, value = payload
            item = logged.item_in(trainer._results, self._strategy)
            item._forward_cache = move_data_to_device(value, self._strategy.root_device)
            return
        item = payload.item_in(trainer._results, self._strategy)
        item._forward_cache = item.meta.sync(payload.neutral(self._strategy))


def drop_own_step_values(results: ResultCollection) -> None:
    """Drop this rank's unsynced step values, so that they are not written again after it has joined."""
    for item in results.result_metrics:
        if not (is_synced(item.meta.sync) if item.is_tensor else syncs_in_forward(item.value)):
            item._forward_cache = None


@contextmanager
def counting_nothing(strategy: JoiningStrategy) -> Iterator[None]:
    """Wrap a step that a joined rank runs on a placeholder: its logged values and updates of metrics do not count."""
    metrics, trainer = strategy.metrics, cast(Any, strategy.lightning_module).trainer
    assert metrics is not None
    metrics.renew()
    results = trainer._results  # a prediction has none
    with metrics.aside(), nullcontext() if results is None else _logging_nothing(results):
        yield


def _logging_nothing(results: ResultCollection) -> AbstractContextManager[None]:
    own = results.log

    def log(fx: str, name: str, value: Any, **options: Any) -> None:
        if isinstance(value, Tensor):
            reduction = getattr(options["reduce_fx"], "__name__", options["reduce_fx"])
            value = torch.full_like(value, {"min": torch.inf, "max": -torch.inf}.get(reduction, 0.0))
        own(fx, name, value, **{**options, "batch_size": 0})
        drop_own_step_values(results)

    return setting(results, log=log)


class HookLogging:
    """Wraps hooks of a step in the tail: all ranks run them, a joined rank for an earlier batch.

    On a joined rank, `self.log` does nothing. On an active rank, values that need an immediate reduction are deferred
    until the hooks have run, because a joined rank may be in any of them. Then it takes part in the reductions.

    Args:
        results: The collection to which `self.log` writes.
        strategy: The strategy; its join is not stored here, so pickles of `results` do not contain it.
    """

    def __init__(self, results: ResultCollection, strategy: JoiningStrategy) -> None:
        self._results = results
        self._strategy = strategy
        self._later: list[tuple[tuple[str, str, Any], dict[str, Any]]] = []

    @property
    def _join(self) -> Lockstep:
        assert self._strategy.join is not None
        return self._strategy.join

    def __enter__(self) -> None:
        self._log = self._results.log
        self._results.log = self._log_in_tail

    def __exit__(self, kind: object, *_: object) -> None:
        del self._results.log
        if kind is not None:
            return
        driver, active = self._join.driver, self._join.active_ranks
        if self._join.joined:
            driver.follow(active)
            return
        with driver.step(active, listens=False):
            for args, options in self._later:
                self._log(*args, **options)

    def _log_in_tail(self, fx: str, name: str, value: Any, **options: Any) -> None:
        if fx == "training_step":  # it may run inside hooks; joined ranks follow it as it runs
            self._log(fx, name, value, **options)
            return
        at_once = options["on_step"] and options["sync_dist"] and not options["rank_zero_only"]
        at_once = at_once and isinstance(value, Tensor)
        if at_once and options["sync_dist_group"] is not None:
            raise UnsupportedError(
                f"`{fx}` logs {name!r} with on_step=True and a sync_dist_group while some rank has finished, and"
                " ranks in that group cannot tell whether the others log it too. Log it with on_step=False,"
                " on_epoch=True, log it in the step, or remove sync_dist_group."
            )
        if self._join.joined:
            return
        if at_once:
            self._later.append(((fx, name, value), options))
        else:
            self._log(fx, name, value, **options)
