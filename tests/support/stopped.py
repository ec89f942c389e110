"""A process that is stopped by a signal for a while."""

import os
import signal
import time
from pathlib import Path

TIMEOUT = 2.0  # of the process group and of `Join`, in seconds
GRACE = 5.0  # "a few seconds"


def resume(process: int, after: float) -> None:
    """Let a process go on some time after it has been stopped."""
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.05)
    time.sleep(after)
    os.kill(process, signal.SIGCONT)
