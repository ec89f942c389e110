"""Which ranks have a batch at which step of an epoch.

A rank is active from the epoch's first step until its own end. Ranks announce their end one step
ahead: whoever asks at step t knows who is active at t and at t + 1, so that the last step of the
epoch is known when it begins.
"""

from collections.abc import Mapping

from torch_join._base.errors import EarlyTerminationError


class Attendance:
    """The ends announced so far; `None` while a rank has not come to its end."""

    def __init__(self, world_size: int, first_step: int = 0) -> None:
        self.step = first_step
        self._ends: list[int | None] = [None] * world_size

    def announce(self, ends: Mapping[int, int]) -> None:
        """Note the number of batches, counted from the epoch's start, of ranks that know theirs."""
        for rank, end in ends.items():
            self._ends[rank] = end

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that have a batch at the current step."""
        return tuple(rank for rank, end in enumerate(self._ends) if end is None or end > self.step)

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last in which any rank has a batch."""
        return all(end is not None and end <= self.step + 1 for end in self._ends) and bool(self.active_ranks)

    def joined(self, rank: int) -> bool:
        """Whether `rank` has no batch at the current step."""
        end = self._ends[rank]
        return end is not None and end <= self.step

    def ended_last(self, rank: int) -> bool:
        """Whether no other rank has, or may still have, more batches than `rank`."""
        ends = [float("inf") if end is None else end for end in self._ends]
        return ends[rank] == max(ends)

    def check_termination(self, rank: int, throws: bool) -> None:
        """Raise on every rank, if `throws`, where some rank has a batch at the current step and another has none.

        Raises:
            EarlyTerminationError: So it is.
        """
        if throws and 0 < len(self.active_ranks) < len(self._ends):
            raise early_termination(rank, self.joined(rank))


def early_termination(rank: int, joined: bool) -> EarlyTerminationError:
    """Return the error of a rank that throws where the first one joins; in the words of torch's own `Join`."""
    if joined:
        return EarlyTerminationError(f"Rank {rank} exhausted all inputs.")
    return EarlyTerminationError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
