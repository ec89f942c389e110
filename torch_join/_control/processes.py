"""The states of processes on this host."""

import os
from pathlib import Path
from typing import NamedTuple

_EXITING = 4  # the system's PF_EXITING: the process has closed its files, or is closing them


class Process(NamedTuple):
    """A process on this host; its id alone may be reused by another process.

    Attributes:
        pid: The process id.
        began: The start time, in the system's clock ticks.
    """

    pid: int
    began: int

    @property
    def state(self) -> str:
        """The letter that ps shows; `X` if the process has ended, and `?` if this process cannot find out."""
        return _look(self.pid, self.began)[0]

    @property
    def is_there(self) -> bool:
        """Whether the process has not ended."""
        return self.state not in ("X", "Z")

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process; a process held by a debugger does not count."""
        return self.state == "T"


def this_process() -> Process:
    """Return this process; its id is 0 if the system does not show other processes."""
    began = _look(os.getpid(), None)[1]
    return Process(os.getpid() if began else 0, began)


def this_host() -> str:
    """Return a string that identifies this host and its namespace of process ids."""
    if not Path("/proc/self/ns").exists():
        return os.uname().nodename
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} {boot} {os.stat('/proc/self/ns/pid').st_ino} {os.stat('/proc/self/ns/net').st_ino}"


def _look(pid: int, began: int | None) -> tuple[str, int]:
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    except OSError:  # no free file descriptor, for example: says nothing about the other process
        return "?", 0
    if began is not None and (int(fields[19]) != began or int(fields[6]) & _EXITING):
        return "X", 0
    return fields[0], int(fields[19])
