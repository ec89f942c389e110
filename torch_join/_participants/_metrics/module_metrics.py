"""All metrics of a module, in a loop that a framework drives."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from torch_join._base.attributes import setting
from torch_join._base.errors import UnsupportedError
from torch_join._compat import metrics as _compat_metrics
from torch_join._participants._metrics.metric import MetricParticipant, check_metric
from torch_join._participants.participant import Driver


class ModuleMetrics(MetricParticipant):
    """The torchmetrics metrics in a module.

    torchmetrics itself syncs the metrics that `MetricParticipant` refuses; they raise only in a step of the tail.

    Args:
        module: The module with the metrics.
    """

    def __init__(self, driver: Driver, index: int, module: nn.Module) -> None:
        super().__init__(driver, index, nn.Module())  # the metrics are found later
        self._module = module
        self._refused: dict[int, str] = {}  # by the id of a metric that syncs: why torchmetrics itself syncs it
        self._aside = False

    def enter(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Add new metrics, and make all metrics compute again; all ranks call this at the same place, outside steps.

        Ranks that still held a computed value would skip the next sync.
        """
        known = {id(metric) for metric in self.metrics}
        for metric in self._module.modules():
            if _compat_metrics.is_metric(metric) and id(metric) not in known:
                self._take_in(metric)
        for metric in self.metrics:
            _compat_metrics.forget_value(metric)

    def syncs(self, metric: Any) -> bool:
        """Whether `metric` syncs when it is computed."""
        parts: list[Any] = _compat_metrics.parts(metric) or [metric]
        return any(part.sync_on_compute for part in parts)

    def aside(self) -> AbstractContextManager[None]:
        """Wrap code that runs again on an earlier batch of this rank, which metrics must not count again.

        Inside, `compute` returns the value without this batch, and `reset` works as usual.
        """
        return setting(self, _aside=True)

    def _take_in(self, metric: Any) -> None:
        _compat_metrics.link_collections()
        self.metrics.append(metric)
        self.override(metric, "update", self._update)
        parts = _compat_metrics.parts(metric)
        try:
            check_metric(metric, metric.process_group, self.driver)
        except UnsupportedError as error:
            self._refused.update(dict.fromkeys(map(id, parts or [metric]), str(error)))
        self.follow(len(self.metrics) - 1, metric)

    # ------------------------------------------------------------ replacements of a metric's methods

    def _update(self, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not self._aside or self.forwards:
            update(*args, **kwargs)

    def forward(self, metric: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._aside:
            return super().forward(metric, forward, *args, **kwargs)
        with setting(self, hidden=[*self.hidden, metric]), _compat_metrics.unchanged(metric):  # others' batches count
            return super().forward(metric, forward, *args, **kwargs)

    def sync(self, position: int, metric: Any, sync_dist: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        why = self._refused.get(id(metric))
        if why is not None and self.tail_log.meet():
            raise UnsupportedError(
                f"{why} The metric was synced in a step after ranks {self.members.joined_names} finished. Sync it at"
                " the end of an epoch, where all ranks take part."
            )
        if why is not None and not _is_served(metric, self.driver):
            sync_dist(*args, **kwargs)
        else:
            super().sync(position, metric, sync_dist, *args, **kwargs)


def _is_served(metric: Any, driver: Driver) -> bool:
    """Whether `metric` itself is supported, even if the metric around it is not."""
    try:
        check_metric(metric, metric.process_group, driver)
    except UnsupportedError:
        return False
    return True
