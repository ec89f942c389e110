"""Measures a loop over `join.batches` on one rank: two looks at the clock in a step, and nothing is sent."""

import time

from torch_join._monitor.records import RankRecord


class Stopwatch:
    """One rank's time in one loop, from when it is made, which is where the ranks meet.

    The clock is the host's. Work that a GPU has yet to do is not waited for.

    Args:
        first: The number of the loop's first step.
        given_bytes: How many bytes this rank has given away before.
    """

    def __init__(self, first: int = 0, given_bytes: int = 0) -> None:
        self._first, self._given_bytes = first, given_bytes
        self._batches = 0
        self._reading = 0.0
        self._left = False
        self._begin = self._asked = time.monotonic()

    def take(self) -> None:
        """This rank gets a batch."""
        self._reading += time.monotonic() - self._asked
        self._batches += 1

    def ask(self) -> None:
        """This rank asks for its next batch, if there is one."""
        self._asked = time.monotonic()

    def pause(self, seconds: float) -> None:
        """Leave out the last seconds, which were no training."""
        self._begin += seconds
        self._asked += seconds

    def leave(self) -> None:
        """This rank leaves the loop by `break`."""
        self._left = True
        self.ask()

    def stop(self, given: int, received: int, given_bytes: int) -> RankRecord:
        """Return what was measured, in a loop that has ended; what the other ranks did is not known yet.

        Args:
            given: How many batches this rank has given to others in it.
            received: How many it got.
            given_bytes: How many bytes it has given away by now.
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
