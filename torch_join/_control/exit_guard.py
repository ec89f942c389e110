"""Before the interpreter ends, let gloo's threads release the tensors of the last collectives.

A gloo worker releases these tensors after `wait()` has returned, and needs the interpreter's lock to do so. Up to
Python 3.13, an interpreter that starts to finalize ends each thread that waits for the lock, here in the middle of a
destructor. The process then aborts ("terminate called without an active exception"), in about one of 15 runs, after
all work has succeeded. (torch 2.13: `ProcessGroupGloo::runLoop`, which drops an `AsyncWork`; issue 190489. Destroying
the group does not help while another object holds it.)

So before the end, a `weakref` finalizer releases the lock until no such thread runs. `atexit` runs all finalizers when
it comes to the first one that was ever created, which importing torch does: after all handlers registered since then,
and after any collectives in them. Handlers registered before torch was imported run later, when the threads are idle.
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
    """Make the interpreter wait for gloo's threads at exit, at most a second; calling this again does nothing."""
    weakref.finalize(drain_gloo_at_exit, _drain_gloo)  # this function lives as long as the interpreter


def _drain_gloo() -> None:
    if not os.path.isdir(_TASKS):  # not Linux
        time.sleep(_ELSEWHERE)
        return
    end = time.monotonic() + _AT_MOST
    while time.monotonic() < end:
        time.sleep(0.001)  # releases the lock to a thread that waits for it
        if not _is_busy():
            return


def _is_busy() -> bool:
    for task in os.listdir(_TASKS):
        with suppress(OSError), open(f"{_TASKS}/{task}/stat") as file:
            name, _, rest = file.read().rpartition(")")
            if name.endswith("(pt_gloo_runloop") and rest.split()[0] != "S":
                return True
    return False
