"""Measures a loop over `join.batches` on one rank: it reads the clock twice in a step, and sends nothing."""

import time

from torch_join._monitor.records import RankRecord


class Stopwatch:
    """Measures one rank's time in one loop; made where the ranks meet at the loop's start.

    It reads the host's clock, and does not wait for pending GPU work.

    Args:
        first: The number of the loop's first step.
        given_bytes: The number of bytes that this rank has sent to others, in batches, before the loop.
    """

    def __init__(self, first: int = 0, given_bytes: int = 0) -> None:
        self._first, self._given_bytes = first, given_bytes
        self._batches = 0
        self._reading = 0.0
        self._left = False
        self._begin = self._asked = time.monotonic()

    def take(self) -> None:
        """Record that this rank gets a batch."""
        self._reading += time.monotonic() - self._asked
        self._batches += 1

    def ask(self) -> None:
        """Record that this rank asks for its next batch, if there is one."""
        self._asked = time.monotonic()

    def pause(self, seconds: float) -> None:
        """Leave out the last `seconds`, in which this rank did not train."""
        self._begin += seconds
        self._asked += seconds

    def leave(self) -> None:
        """Record that this rank leaves the loop by `break`."""
        self._left = True
        self.ask()

    def stop(self, given: int, received: int, given_bytes: int) -> RankRecord:
        """Return the measurements of a loop that has ended; nothing about other ranks is known yet.

        Args:
            given: The number of batches that this rank has sent to others in the loop.
            received: The number of batches that it has received.
            given_bytes: The number of bytes that it has sent, in batches, until now.
        """
        return RankRecord(
            batches=self._batches,
            shadow_steps=0,
            joined_at=self._first + self._batches,
            active_seconds=self._asked - self._begin if self._batches else 0.0,
            seconds=time.monotonic() - self._begin,
            given=given,
            received=received,
            given_bytes=given_bytes - self._given_bytes,
            reading_seconds=self._reading,
            left=self._left,
        )
