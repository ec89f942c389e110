"""A metric as a `Joinable` of its own, for torch's `Join` too."""

from typing import Any

from torch import nn

from torch_join._base import compat_metrics as _compat_metrics
from torch_join._base.errors import JoinTypeError
from torch_join.joinables._metrics.metric import MetricPart
from torch_join.joinables._torch.joinable import WrappingJoinable
from torch_join.joinables.kinds import holds_metrics
from torch_join.joinables.part import Driver, Part


class JoinableMetric(WrappingJoinable):
    """A metric of torchmetrics, or a `MetricCollection`, as a `Joinable`.

    `Join([JoinableMetric(metric)])` of this package is the same as `Join([metric])`. In torch's, too, what is
    synced in a step (`dist_sync_on_step=True`, or a `compute()`) comes from the active ranks, or from all
    that have updated it, and from no others; a `reset()` resets it on the joined ranks as well.

    Args:
        metric: The metric.

    Raises:
        JoinTypeError: It is not a metric of torchmetrics.

    Limits:
        In torch's `Join` a rank leaves its loop alone, so that there `compute()` belongs into a step or after
        the `with`, where torchmetrics syncs as ever; between the two it would wait for ranks that are not
        there. Without a model before it one of its metrics has `dist_sync_on_step=True`, and the first of
        these is called once per step. Joinables that are not of this package come before it.
    """

    def __init__(self, metric: nn.Module) -> None:
        if not holds_metrics(metric):
            raise JoinTypeError(f"JoinableMetric takes a metric of torchmetrics, not {type(metric).__name__}.")
        self._metrics: list[Any] = [module for module in metric.modules() if _compat_metrics.is_metric(module)]
        super().__init__(metric, self._metrics[0].process_group, self._metrics[0].device)

    def make_part(self, driver: Driver, index: int) -> Part:
        return MetricPart(driver, index, self.wrapped)

    def leads(self) -> bool:
        return any(metric.dist_sync_on_step for metric in self._metrics)

    def is_done(self, kind: str, payload: Any) -> bool:
        return False  # until the next step begins

    def is_replicated(self) -> bool:
        return False
