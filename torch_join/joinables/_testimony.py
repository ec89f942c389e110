"""What active ranks besides the leader have seen of an accumulation, in case the leader has seen nothing.

Each leaves a word where its backward begins, which nobody waits for. A joined rank looks for these words if it holds
gradients of which the leader cannot tell whether they count.
"""

import time
from typing import TYPE_CHECKING

from torch_join.joinables._gradients import UNKNOWN, common_verdict

if TYPE_CHECKING:
    from torch_join._join import Join

# How long to look: all active ranks come to the backward that averages.
_PATIENCE_SECONDS = 5.0


class Testimony:
    """The words of one model's part.

    Args:
        join: What the part belongs to.
        index: The part's.
    """

    def __init__(self, join: "Join", index: int) -> None:
        self._join = join
        self._index = index
        self._left: str | None = None

    def leave(self, verdict: str | None) -> None:
        """Leave a word, if there is one, on an active rank that is about to announce a backward."""
        self.forget()
        if verdict is not None and self._join.rank != self._join.leader:
            self._left = self._key(self._join.rank, self._join._channel.records)
            self._join._channel.post(self._left, verdict)

    def forget(self) -> None:
        """Delete it: through the backward's collectives all have come since."""
        if self._left is not None:
            self._join._channel.delete(self._left)
            self._left = None

    def ask(self) -> str:
        """Return the verdict of the active ranks besides the leader, on a joined rank that answers a backward."""
        channel, end = self._join._channel, time.monotonic() + _PATIENCE_SECONDS
        keys = [self._key(rank, channel.records - 1) for rank in self._join._active if rank != self._join.leader]
        while not all(map(channel.posted, keys)):
            if time.monotonic() > end:
                return UNKNOWN
            time.sleep(0.001)
        return common_verdict(channel.read(key, of=str) for key in keys)

    def _key(self, rank: int, record: int) -> str:
        return f"gradients/{self._index}/{record}/{rank}"
