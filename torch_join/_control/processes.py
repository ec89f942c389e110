"""What a host tells of the processes on it."""

import os
from pathlib import Path
from typing import NamedTuple

_EXITING = 4  # the system's PF_EXITING: such a process has closed its files, or does so now


class Process(NamedTuple):
    """A process on this host; its number alone may come to mean another one.

    Attributes:
        pid: Its number.
        began: When it began, as the system counts.
    """

    pid: int
    began: int

    @property
    def state(self) -> str:
        """The letter that ps shows; `X` if it has ended, and `?` where this process cannot find out."""
        return _look(self.pid, self.began)[0]

    @property
    def is_there(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ("X", "Z")

    @property
    def is_stopped(self) -> bool:
        """Whether it has been told to stop; one that a debugger holds has not."""
        return self.state == "T"


def this_process() -> Process:
    """Return the process that calls this; 0 where the system does not tell of others."""
    began = _look(os.getpid(), None)[1]
    return Process(os.getpid() if began else 0, began)


def this_host() -> str:
    """Return what tells this host, and the numbers of processes on it, from others."""
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
    except OSError:  # no free file descriptor, say, which tells nothing about the other process
        return "?", 0
    if began is not None and (int(fields[19]) != began or int(fields[6]) & _EXITING):
        return "X", 0
    return fields[0], int(fields[19])
