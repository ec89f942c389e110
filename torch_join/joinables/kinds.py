"""Of which kind something is that was given to `Join`."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from torch_join._base import compat_metrics as _compat_metrics
from torch_join._handover.state import has_state


def holds_metrics(thing: Any) -> bool:
    """Whether `thing` is a metric of torchmetrics, or computes something with some (a `MetricCollection`)."""
    if not isinstance(thing, nn.Module) or not callable(getattr(thing, "compute", None)):
        return False
    return any(_compat_metrics.is_metric(module) for module in thing.modules())


def stateful(objects: Sequence[Any]) -> list[Any]:
    """Return what is handed over of `objects`; a metric's state is each rank's own share."""
    return [thing for thing in objects if has_state(thing) and not holds_metrics(thing)]
