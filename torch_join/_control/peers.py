"""The other ranks as processes, and the texts of errors about a failed one."""

import time
from collections.abc import Iterable, Mapping, Sequence

from torch_join._base.errors import PeerFailedError, name_ranks
from torch_join._compat.launchers import note_victim
from torch_join._control.processes import Process

_SUSPECT_SECONDS = 0.9
MOST_TEXT = 20_000  # characters of a reported failure
GONE = (
    "its process is gone: it was killed, or exited without an error. Check its log, and the system log for an OOM kill."
)
BROKEN = "the link between ranks"
LEFT = "it destroyed the process group or exited before the others."


class Peers:
    """The ranks of a channel, as seen by one of them.

    Args:
        rank: This rank.
        global_ranks: By rank, its number in the whole job, for errors.
        processes: The processes of other ranks on this rank's host.
        hosts: The host names of ranks on other hosts.
    """

    def __init__(
        self,
        rank: int,
        global_ranks: Sequence[int],
        processes: Mapping[int, Process],
        hosts: Mapping[int, str] | None = None,
    ) -> None:
        self.rank, self.hosts = rank, hosts or {}
        self.global_ranks = global_ranks
        self.processes = processes
        self._suspects: dict[int, float] = {}  # ranks that may block others at the last check: since when

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

    def why_silent(self, ranks: Iterable[int]) -> str:
        """Return a text with the possible reasons why ranks do not answer."""
        hosts = sorted({self.hosts[rank] for rank in ranks if rank in self.hosts})
        gone = f", or the host ({', '.join(hosts)}) or the network to it is gone" if hosts else ""
        return f"killed, or stopped{gone}. Read its log."

    def name(self, ranks: Iterable[int]) -> str:
        """Return the ranks' global numbers in words."""
        return name_ranks(self.global_ranks[rank] for rank in ranks)

    def gone(self) -> list[int]:
        """Return the ranks on this host whose processes have ended."""
        return [rank for rank, process in self.processes.items() if not process.is_there]

    def begin_to_watch(self) -> None:
        """Start a wait: forget the suspects of earlier waits."""
        self._suspects = {}

    def find_failed(self, suspects: Mapping[int, str]) -> tuple[int, str] | None:
        """Return a rank that has failed, and why: its process has ended, or was stopped or suspect for a second.

        Args:
            suspects: Further ranks that block others, and why.
        """
        if found := dict.fromkeys(self.gone(), GONE) or self._in_the_way(suspects):
            return self.first_of(found)
        return None

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
