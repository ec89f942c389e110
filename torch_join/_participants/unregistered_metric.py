"""Warns about a torchmetrics metric that was not passed to `Join` and syncs in a tail.

Joined ranks contribute zeros to the collectives of its sync, and the metric counts them: the minimum becomes 0, a mean
is over too many values. Metrics passed to `Join` sync in their own way, so this check does not see them. It runs only
when the active ranks gather while some rank has joined.
"""

import sys
from typing import Any
from weakref import ReferenceType, ref

from torch_join._base.errors import JoinDriftWarning
from torch_join._compat import metrics as _compat_metrics

_warned: dict[int, "ReferenceType[Any]"] = {}  # a metric's hash changes with its state


def notice_metric(operation: str) -> None:
    """Warn, once per metric, if a metric in this thread gathers.

    Args:
        operation: The name of the collective that the active ranks are about to issue.
    """
    if not operation.startswith("all_gather"):
        return
    metric = _compat_metrics.syncing(sys._getframe(1))
    if metric is None or ((known := _warned.get(id(metric))) is not None and known() is metric):
        return
    _warned[id(metric)] = ref(metric)
    JoinDriftWarning.warn(
        f"{type(metric).__name__} synced after some ranks finished and was not passed to Join. Zeros replace the"
        " state of the finished ranks, so its value is wrong. Pass it to Join ([model, optimizer, metric]), in"
        " Lightning make it an attribute of the module, or compute it only after the loop."
    )
