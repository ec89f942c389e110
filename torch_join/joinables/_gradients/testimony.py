"""What active ranks besides the leader have seen of an accumulation, in case the leader has seen nothing.

Each leaves a word where a backward of its own begins, which nobody waits for. A joined rank looks for these words if it
holds gradients of which the leader cannot tell whether they count. To a backward that averages all active ranks come;
of one that does not it only notes that there was a doubt, since others may leave that out.
"""

from typing import TYPE_CHECKING

from torch_join.joinables._gradients.verdicts import CLEARED, KEPT, UNKNOWN, common_verdict

if TYPE_CHECKING:
    from torch_join.join import Join


class Testimony:
    """The words of one model's part.

    Args:
        join: What the part belongs to.
        index: The part's.
    """

    def __init__(self, join: "Join", index: int) -> None:
        self._join = join
        self._index = index
        self._left: list[str] = []
        self._read: list[str] = []  # by all, as the next backward begins
        self._doubts: list[int] = []  # on a joined rank, the records of them

    def leave(self, verdict: str, averages: bool) -> None:
        """Leave a word on an active rank that is about to announce a backward."""
        self._delete(self._read)
        if self._join.rank != self._join.leader:
            key = self._key(self._join.rank, self._join._channel.records)
            self._join._channel.post(key, verdict)
            self._left.append(key)
        if averages:
            # Nobody comes through its collectives before the joined ranks have answered it.
            self._read, self._left = self._left, []

    def forget(self) -> None:
        """Delete what is left: the tail is over."""
        self._delete(self._left)
        self._delete(self._read)
        self._doubts.clear()

    def doubt(self) -> str:
        """Note, on a joined rank, that the leader cannot tell at a backward that does not average; keep it for now."""
        self._doubts.append(self._join._channel.records - 1)
        return KEPT

    def ask(self) -> str:
        """Return the verdict of the active ranks besides the leader, at a backward that averages.

        Raises:
            PeerFailedError: One of them has failed.
            JoinTimeoutError: One of them has not come to this backward.
        """
        channel = self._join._channel
        keys = [self._key(rank, channel.records - 1) for rank in self._others]
        return common_verdict([channel.read(key, of=str) for key in keys])

    def settle(self) -> str:
        """Return their verdict on what was in doubt before, at a backward that averages; see `ask`."""
        if not self._doubts:
            return KEPT
        self.ask()  # who has come here has left all its words from before
        channel, verdicts = self._join._channel, []
        while self._doubts:
            record = self._doubts.pop()
            keys = [key for rank in self._others if channel.posted(key := self._key(rank, record))]
            verdicts.append(common_verdict([channel.read(key, of=str) for key in keys]))
        return UNKNOWN if UNKNOWN in verdicts else CLEARED if CLEARED in verdicts else KEPT

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self._join._active if rank != self._join.leader]

    def _delete(self, keys: list[str]) -> None:
        while keys:
            self._join._channel.delete(keys.pop())

    def _key(self, rank: int, record: int) -> str:
        return f"gradients/{self._index}/{record}/{rank}"
