"""What has launched this process: private names of Ray Train (seen in ray 2.60.0, Train V2), and torchrun's reports."""

import json
import os
import sys
import time
from contextlib import suppress
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
_LATER = 60  # seconds; torchrun takes up to 30 to end the other ranks


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


def note_victim(text: str) -> None:
    """Tell torchrun, which reports the earliest failure as the root cause, that this rank failed later.

    Without this file, a failure counts from the time when torchrun sees the rank end. torch's `record` writes one, too.
    """
    with suppress(OSError, KeyError):
        path = os.environ["TORCHELASTIC_ERROR_FILE"]
        more = {"timestamp": str(int(time.time()) + _LATER), "py_callstack": text}
        whole = f"{path}.{os.getpid()}"  # torchrun raises if it reads a partial file
        try:
            with open(whole, "w") as file:
                json.dump({"message": {"message": text, "extraInfo": more}}, file)
            os.link(whole, path)  # unless there is one
        finally:
            os.unlink(whole)


def forget_victim() -> None:
    """Remove the report of `note_victim`, since this rank continues."""
    with suppress(OSError, KeyError):
        os.unlink(os.environ["TORCHELASTIC_ERROR_FILE"])
