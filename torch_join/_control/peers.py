"""The other ranks as processes, the states of those on this host, and the texts of errors about a failed one."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch_join._base.errors import JoinError, JoinTimeoutError, PeerFailedError, name_ranks
from torch_join._compat.launchers import note_victim
from torch_join._control import codec as _codec

_EXITING = 4  # the system's PF_EXITING: the process has closed its files, or is closing them
_SUSPECT_SECONDS = 0.9
MOST_TEXT = 20_000  # characters of a reported failure
GONE = (
    "its process is gone: it was killed, or exited without an error. Check its log, and the system log for an OOM kill."
)
BROKEN = "the link between ranks"
DEADLOCK = "Deadlock: these ranks wait for each other: "
LEFT = "it destroyed the process group or exited before the others."


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
        return _read_stat(self.pid, self.began)[0]

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
    began = _read_stat(os.getpid(), None)[1]
    return Process(os.getpid() if began else 0, began)


def this_host() -> str:
    """Return a string that identifies this host and its namespace of process ids."""
    if not Path("/proc/self/ns").exists():
        return os.uname().nodename
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} {boot} {os.stat('/proc/self/ns/pid').st_ino} {os.stat('/proc/self/ns/net').st_ino}"


def _read_stat(pid: int, began: int | None) -> tuple[str, int]:
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


@dataclass
class Peers:
    """The ranks of a channel, as seen by one of them.

    Args:
        rank: This rank.
        global_ranks: By rank, its number in the whole job, for errors.
        processes: The processes of other ranks on this rank's host.
        hosts: The host names of ranks on other hosts.
    """

    rank: int
    global_ranks: Sequence[int]
    processes: Mapping[int, Process]
    hosts: Mapping[int, str] = field(default_factory=dict)
    # Ranks that may block others at the last check: since when.
    _suspects: dict[int, float] = field(default_factory=dict, init=False)

    def error(self, rank: int, reason: str) -> PeerFailedError:
        """Return the error to raise on this rank when another one has failed."""
        me, other = self.global_ranks[self.rank], rank
        if rank < len(self.global_ranks):
            other = self.global_ranks[rank]
        where = f" (on {self.hosts[rank]})" if rank in self.hosts else ""
        text = f"Rank {other}{where} failed, so rank {me} cannot continue. Rank {other}: {reason}"
        if reason.startswith(BROKEN):
            text = f"Rank {me} cannot continue: {reason}"
        note_victim(text)
        return PeerFailedError(text, other, reason)

    def read_failure(self, data: bytes, cause: str | None) -> JoinError | None:
        """Return the error of a failure that a rank has reported; `cause` is what this rank has reported itself."""
        me = self.global_ranks[self.rank]
        try:
            rank, reason = _codec.decode(data, tuple[int, str])
        except _codec.Malformed as problem:
            error = _codec.foreign("a failure", problem)
            return PeerFailedError(f"Rank {me} cannot continue, because another rank may have failed. {error}")
        if reason.startswith(DEADLOCK):
            return JoinError(reason)
        if rank == self.rank:
            if cause is not None:
                return None
            return PeerFailedError(f"The other ranks continued or exited without rank {me}: {reason}")
        return self.error(rank, reason)

    def silent(self, what: str, ranks: Sequence[int]) -> PeerFailedError:
        """Return the error of a problem on this rank, described by `what`, where these ranks do not answer."""
        hosts = sorted({self.hosts[rank] for rank in ranks if rank in self.hosts})
        gone = f", or the host ({', '.join(hosts)}) or the network to it is gone" if hosts else ""
        why = f"killed, or stopped{gone}. Read its log."
        text = f"{what}, and {self.name(ranks)} did not answer: {why}"
        return PeerFailedError(text, self.global_ranks[ranks[0]], f"it does not answer: {why}")

    def late(self, waited: str, busy: Sequence[int]) -> JoinTimeoutError:
        """Return the error of a rank that has `waited` for longer than its timeout, while these do something else."""
        late = f"{self.name(busy)} did not reach it" if busy else "all wait"
        return JoinTimeoutError(
            f"{waited} to report whether they have a next batch: {late}. Usual causes: a loader that takes longer than"
            " `timeout`; a `break` at different steps (use may_break=True); a batch that one rank skips with `continue`"
            " (use join.batches(good(loader))); a call that needs all ranks, at a step that each rank counts itself"
            " (pass the counter to Join). Run `py-spy dump` to see where the ranks are."
        )

    def name(self, ranks: Iterable[int]) -> str:
        """Return the ranks' global numbers in words."""
        return name_ranks(self.global_ranks[rank] for rank in ranks)

    def begin_to_watch(self) -> None:
        """Start a wait: forget the suspects of earlier waits."""
        self._suspects = {}

    def find_failed(self, suspects: Mapping[int, str]) -> tuple[int, str] | None:
        """Return a rank that has failed, and why: its process has ended, or was stopped or suspect for a second.

        Args:
            suspects: Further ranks that block others, and why.
        """
        gone = [rank for rank, process in self.processes.items() if not process.is_there]
        found = dict.fromkeys(gone, GONE) or self._in_the_way(suspects)
        return self.first_of(found) if found else None

    def first_of(self, found: Mapping[int, str]) -> tuple[int, str]:
        """Return one of the failed ranks, and why it failed; some ranks may have left because another failed first."""
        rank, why = min(found.items())
        if others := found.keys() - {rank}:
            why += f" The same goes for {self.name(others)}, and any of them may have failed first."
        return rank, why

    def _in_the_way(self, suspects: Mapping[int, str]) -> dict[int, str]:
        now = time.monotonic()
        stopped = [rank for rank, process in self.processes.items() if process.is_stopped]
        suspects = {**suspects, **dict.fromkeys(stopped, "its process was stopped by a signal.")}
        self._suspects = {rank: self._suspects.get(rank, now) for rank in suspects}
        return {rank: why for rank, why in suspects.items() if now - self._suspects[rank] > _SUSPECT_SECONDS}
