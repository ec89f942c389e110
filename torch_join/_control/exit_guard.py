"""Before the interpreter ends, let gloo's threads let go of the tensors of the last collectives.

A worker of gloo still drops these after `wait()` has returned, and needs the interpreter's lock for it. Whoever waits
for that when the interpreter begins to finalize is ended by it, up to Python 3.13, in the midst of a destructor: the
process aborts ("terminate called without an active exception"), once in 15 runs or so, after everything has gone right.
(torch 2.13: `ProcessGroupGloo::runLoop`, which drops an `AsyncWork`; issue 190489. Destroying the group does not help
while something holds it.)

So before its end the interpreter gives the lock away until no such thread runs, as a finalizer of `weakref`. These run
where `atexit` calls the first of them that was ever made, which torch's import does: after the handlers that were
registered since, whatever collectives these still issue. A handler that was registered before torch was imported
comes later, and finds the threads idle.
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
    """Have the interpreter wait for gloo's threads at its end, at most a second; doing it again does nothing."""
    weakref.finalize(drain_gloo_at_exit, _drain_gloo)  # of what lives as long as the interpreter


def _drain_gloo() -> None:
    if not os.path.isdir(_TASKS):  # no Linux
        time.sleep(_ELSEWHERE)
        return
    end = time.monotonic() + _AT_MOST
    while time.monotonic() < end:
        time.sleep(0.001)  # whoever waits for the lock gets it
        if not _is_busy():
            return


def _is_busy() -> bool:
    for task in os.listdir(_TASKS):
        with suppress(OSError), open(f"{_TASKS}/{task}/stat") as file:
            name, _, rest = file.read().rpartition(")")
            if name.endswith("(pt_gloo_runloop") and rest.split()[0] != "S":
                return True
    return False
