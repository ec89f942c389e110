"""Before the interpreter ends, let gloo's threads release the tensors of the last collectives.

A gloo worker still drops these after `wait()` has returned, and needs the interpreter's lock for that. Up to Python
3.13, a thread that waits for the lock when the interpreter starts to finalize is ended by it, in the middle of a
destructor: the process aborts ("terminate called without an active exception"), about once in 15 runs, after everything
has gone right. (torch 2.13: `ProcessGroupGloo::runLoop`, which drops an `AsyncWork`; issue 190489. Destroying the group
does not help while another object holds it.)

So a `weakref` finalizer gives the lock away, before the end, until no such thread runs. Finalizers run where `atexit`
calls the first one that was ever made, which importing torch does: after the handlers registered since then, with any
collectives that they issue. A handler that was registered before torch was imported runs later, and finds the threads
idle.
"""

import os
import time
import weakref
from contextlib import suppress
from functools import cache

_AT_MOST = 1.0  # seconds
_ELSEWHERE = 0.05
_TASKS = "/proc/self/task"


@cache
def drain_gloo_at_exit() -> None:
    """Make the interpreter wait for gloo's threads at its end, at most a second; doing it again does nothing."""
    weakref.finalize(drain_gloo_at_exit, _drain_gloo)  # of an object that lives as long as the interpreter


def _drain_gloo() -> None:
    if not os.path.isdir(_TASKS):  # not Linux
        time.sleep(_ELSEWHERE)
        return
    end = time.monotonic() + _AT_MOST
    while time.monotonic() < end:
        time.sleep(0.001)  # a thread that waits for the lock gets it
        if not _is_busy():
            return


def _is_busy() -> bool:
    for task in os.listdir(_TASKS):
        with suppress(OSError), open(f"{_TASKS}/{task}/stat") as file:
            name, _, rest = file.read().rpartition(")")
            if name.endswith("(pt_gloo_runloop") and rest.split()[0] != "S":
                return True
    return False
