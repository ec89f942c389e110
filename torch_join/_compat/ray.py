"""Ray Train's private names: the object whose methods its functions call in a worker. Seen in ray 2.60.0 (Train V2)."""

import sys
from functools import cache
from typing import Any

from torch_join._base.names import check_names

_MODULE = "ray.train.v2._internal.execution.train_fn_utils"
# By method, the Ray function that calls it on all workers.
WAITS_FOR_ALL = {
    "report": "ray.train.report",
    "barrier": "ray.train.collective.barrier",
    "broadcast_from_rank_zero": "ray.train.collective.broadcast_from_rank_zero",
    "get_preemption_info": "ray.train.get_preemption_info",
}


def train_worker() -> Any:
    """Return the object whose methods Ray Train's functions call, if Ray Train runs this process; else `None`."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return None
    _check(module)
    return module._train_fn_utils


@cache
def _check(module: Any) -> None:
    names = {module: "_train_fn_utils", module.TrainFnUtils: " ".join(WAITS_FOR_ALL)}
    check_names("ray", "2.60.0", names)
