"""What active ranks besides the leader have seen of an accumulation, in case the leader has seen nothing.

Each leaves a word where a backward of its own begins, which nobody waits for. A joined rank looks for these words if it
holds gradients of which the leader cannot tell whether they count. To a backward that averages all active ranks come;
of one that does not it only notes that there was a doubt, since others may leave that out.

Words are kept for a while: where the host does not wait for an average (on an accelerator, or where a communication
hook makes none), active ranks may be some backwards ahead of those that have joined.
"""

from collections import deque

from torch_join.joinables._gradients.verdicts import CLEARED, KEPT, UNKNOWN, common_verdict
from torch_join.joinables.part import Driver

_KEPT = 256  # backwards that average; an accelerator's queue holds fewer


class OtherVerdicts:
    """The words of one model's part.

    Args:
        driver: What the part belongs to.
        index: The part's.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver = driver
        self._index = index
        self._left: list[str] = []
        self._before: deque[list[str]] = deque()  # of the backwards that averaged, and what led to them
        self._doubts: list[int] = []  # on a joined rank, the records of them

    def leave(self, verdict: str, averages: bool) -> None:
        """Leave a word on an active rank that is about to announce a backward."""
        if self._driver.members.rank != self._driver.members.leader:
            key = self._key(self._driver.server.channel.records)
            self._driver.server.channel.keep(key, verdict)
            self._left.append(key)
        if averages:
            self._before.append(self._left)
            self._left = []
            if len(self._before) > _KEPT:
                self._delete(self._before.popleft())

    def forget(self) -> None:
        """Delete what is left: the tail is over."""
        self._delete(self._left)
        while self._before:
            self._delete(self._before.popleft())
        self._doubts.clear()

    def doubt(self) -> str:
        """Note, on a joined rank, that the leader cannot tell at a backward that does not average; keep it for now."""
        self._doubts.append(self._driver.server.channel.records - 1)
        return KEPT

    def ask(self) -> str:
        """Return the verdict of the active ranks besides the leader, at a backward that averages.

        Raises:
            PeerFailedError: One of them has failed.
            JoinTimeoutError: One of them has not come to this backward.
        """
        return common_verdict(self._words(self._driver.server.channel.records - 1))

    def settle(self) -> str:
        """Return their verdict on what was in doubt before, at a backward that averages; see `ask`."""
        if not self._doubts:
            return KEPT
        self.ask()  # who has come here has left all its words from before
        verdicts = [common_verdict(self._words(record, waits=False)) for record in self._doubts]
        self._doubts.clear()
        return UNKNOWN if UNKNOWN in verdicts else CLEARED if CLEARED in verdicts else KEPT

    def _words(self, record: int, waits: bool = True) -> list[str]:
        others = [rank for rank in self._driver.members.active if rank != self._driver.members.leader]
        return [*self._driver.server.channel.ask(self._key(record), others, str, waits).values()]

    def _delete(self, keys: list[str]) -> None:
        while keys:
            self._driver.server.channel.drop(keys.pop())

    def _key(self, record: int) -> str:
        return f"gradients/{self._index}/{record}"
