"""All metrics of a module, in a loop that a framework drives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from torch_join._base import compat_metrics as _compat_metrics
from torch_join._base.errors import UnsupportedError
from torch_join.joinables._metrics.metric import MetricPart, _check
from torch_join.joinables.part import Part

if TYPE_CHECKING:
    from torch_join._tail.step_server import StepServer


class ModuleMetrics(MetricPart):
    """The metrics of torchmetrics that a module holds.

    Metrics that `MetricPart` refuses are left to torchmetrics, and raise only where they sync in a step that
    some rank does not have.

    Args:
        join: Serves the steps.
        index: This part's place among the others.
        module: What holds the metrics.
    """

    def __init__(self, join: "StepServer", index: int, module: nn.Module) -> None:
        Part.__init__(self, join, index)  # type: ignore[arg-type]
        self._module = module
        self._metrics: list[Any] = []
        self._refused: dict[int, str] = {}  # by the id of a metric that syncs: why it is left to torchmetrics
        self._forwards = 0
        self._hidden: list[Any] = []
        self._aside = False

    def enter(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Take in metrics made since, and let all compute anew; all ranks must be at the same place, in no step.

        A value that only some ranks have computed would keep these out of the next sync.
        """
        known = {id(metric) for metric in self._metrics}
        for metric in self._module.modules():
            if _compat_metrics.is_metric(metric) and id(metric) not in known:
                self._take_in(metric)
        for metric in self._metrics:
            _compat_metrics.forget_value(metric)

    def syncs(self, metric: Any) -> bool:
        """Whether `metric` syncs when it is computed."""
        parts: list[Any] = _compat_metrics.parts(metric) or [metric]
        return any(part.sync_on_compute for part in parts)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put around code that this rank runs with a batch that it has had before: metrics do not count it again.

        What it computes takes what was counted before; what it resets is reset.
        """
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def _take_in(self, metric: Any) -> None:
        position = len(self._metrics)
        self._metrics.append(metric)
        self._override(metric, "update", self._update)
        self._override(metric, "forward", self._forward)
        self._override(metric, "reset", partial(self._reset, position))
        parts = _compat_metrics.parts(metric)
        try:
            _check(metric, metric.process_group, self.join)
        except UnsupportedError as error:
            self._refused.update(dict.fromkeys(map(id, parts or [metric]), str(error)))
        if not parts:
            self._override(metric, "compute", self._compute)
            self._override(metric, _compat_metrics.SYNC_METHOD, partial(self._sync, position))

    # ------------------------------------------------------------ what replaces a metric's methods

    def _update(self, metric: Any, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not self._aside or self._forwards:
            update(*args, **kwargs)

    def _forward(self, metric: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._aside:
            return super()._forward(metric, forward, *args, **kwargs)
        self._hidden.append(metric)  # the others' batches count
        try:
            with _compat_metrics.unchanged(metric):
                return super()._forward(metric, forward, *args, **kwargs)
        finally:
            self._hidden.pop()

    def _sync(self, position: int, metric: Any, sync_dist: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        why = self._refused.get(id(metric))
        if why is not None and self.join.in_tail:
            raise UnsupportedError(
                f"{why} It was synced in a step that ranks {self.join.joined_ranks} do not have. At an epoch's end,"
                " where all ranks take part, it works as ever."
            )
        if why is not None and not _is_served(metric, self.join):
            sync_dist(*args, **kwargs)
        else:
            super()._sync(position, metric, sync_dist, *args, **kwargs)


def _is_served(metric: Any, join: Any) -> bool:
    """Whether `metric` itself could be served, whatever it is a part of."""
    try:
        _check(metric, metric.process_group, join)
    except UnsupportedError:
        return False
    return True
