"""Which rank trains on which batch at which step: a function of numbers that all ranks know.

Contract: All ranks call their `Plan` in the same way, and so plan the same rows. A row depends only on the batches left
and on constant limits, so a resumed or corrected run plans like any other.

Known lengths. Let S batches be left on W ranks, L of them on a rank that may send up to g in a step. No schedule has
fewer steps than T = max(ceil(S / W), ceil(L / (1 + g)) of each rank). In a schedule of T steps, some step takes at
least ceil(L / T) batches of that rank. Each row takes floor(L / T) or ceil(L / T) batches of each rank, in total one
for each rank that trains. This meets both bounds: the rest fits into T - 1 steps, in which no rank's share is larger
than before. Among ranks whose share is not a whole number, those furthest behind send one more. This spreads the
transfers over the epoch: a rank that receives a batch trains on its own later.

Unknown lengths. While some rank's length is unknown, ranks with batches train on their own, and idle ranks receive
batches. Without limits every such row is full, and there are no more steps than with known lengths. With limits there
are at most ceil(S / W) + max(ceil(L / (1 + g))) steps, at most twice the minimum: a row that is not full takes 1 + g
batches of each rank that has that many, so the second term bounds the number of such rows.

In both cases, a rank without a batch has none until the epoch's end, since its own loop may be over. This matters only
if a length proves wrong.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """A batch that a rank trains on in a step: its owner, and its index among the owner's batches in the epoch."""

    owner: int
    batch_idx: int


Row = tuple[Share | None, ...]  # by rank; `None` if the rank has no batch in this step


class Plan:
    """Plans the steps of one epoch, and knows the batches left for further steps.

    Args:
        left: By rank, its number of batches from here on; `None` if not known yet.
        max_sent_per_step: By rank, how many batches it may send in one step.
        taken: By rank, how many of its batches were trained on before, if the epoch is resumed in the middle.

    Attributes:
        left: By rank, how many of its batches are in no row yet; `None` while unknown.
    """

    def __init__(
        self, left: Sequence[int | None], max_sent_per_step: Sequence[int], taken: Sequence[int] | None = None
    ) -> None:
        self.left = list(left)
        self.max_sent_per_step = list(max_sent_per_step)
        self._most = [1 + donated for donated in max_sent_per_step]
        self._taken = [0] * len(self.left) if taken is None else list(taken)
        self._gone: set[int] = set()

    @property
    def steps_left(self) -> int | None:
        """The number of rows still to be planned; `None` while that is unknown."""
        known = [left for left in self.left if left is not None]
        if len(known) < len(self.left):
            return None
        by_rank = (-(-left // most) for left, most in zip(known, self._most, strict=True))
        return max(-(-sum(known) // max(1, len(known) - len(self._gone))), *by_rank)

    @property
    def ahead(self) -> list[int]:
        """By rank, how many batches it must have read before the next row is planned, unless it reaches its end."""
        steps = self.steps_left
        if steps is not None:
            return [-(-left // steps) if left else 0 for left in self.left]
        limits = [*zip(self.left, self._most, strict=True)]
        wanted = self.left.count(0) - len(self._gone) - sum(min(left, most) - 1 for left, most in limits if left)
        unknown = [most for left, most in limits if left is None]
        each = 1
        while each < max(unknown) and sum(min(each, most) - 1 for most in unknown) < wanted:
            each += 1
        return [min(most, each if left is None else left) for left, most in limits]

    def announce(self, left: Mapping[int, int]) -> None:
        """Note the numbers of batches left on ranks that have reached their end, or that correct an earlier number."""
        for rank, number in left.items():
            self.left[rank] = number

    def leave(self, ranks: Iterable[int]) -> None:
        """Continue to plan without ranks that leave the epoch: they neither train nor send batches from now on."""
        self._gone |= {*ranks}
        for rank in self._gone:
            self.left[rank] = 0

    def plan(self) -> Row:
        """Plan the next row, which has no batch if all ranks have reached their end."""
        steps = self.steps_left
        counts = self._as_read() if steps is None else self._as_known(steps)
        owners = [rank if count else None for rank, count in enumerate(counts)]
        idle = (rank for rank, count in enumerate(counts) if not count and rank not in self._gone)
        donated = (rank for rank, count in enumerate(counts) for _ in range(count - 1))
        for receiver, sender in zip(idle, donated, strict=False):
            owners[receiver] = sender
        row: list[Share | None] = [None] * len(counts)
        for rank in sorted(range(len(counts)), key=lambda rank: owners[rank] != rank):  # owners' batches come first
            if (owner := owners[rank]) is not None:
                row[rank] = Share(owner, self._taken[owner])
                self._taken[owner] += 1
        for rank, count in enumerate(counts):
            if (left := self.left[rank]) is not None:
                self.left[rank] = left - count
        self._gone |= {rank for rank, share in enumerate(row) if share is None}
        return tuple(row)

    def _as_known(self, steps: int) -> list[int]:
        """Return how many batches of each rank the next row takes, if all lengths are known."""
        lengths = [left or 0 for left in self.left]
        counts = [length // steps if steps else 0 for length in lengths]
        behind = [rank for rank, length in enumerate(lengths) if steps and length % steps]
        # The earliest deadline goes first; among equal ones, a batch that its owner trains on.
        behind.sort(key=lambda rank: (-lengths[rank] / (counts[rank] + 1), counts[rank], rank))
        for rank in behind[: len(lengths) - len(self._gone) - sum(counts)]:
            counts[rank] += 1
        return counts

    def _as_read(self) -> list[int]:
        """Return these counts if some lengths are unknown: ranks send at most the batches that they have read."""
        read = [min(ahead, most) for ahead, most in zip(self.ahead, self._most, strict=True)]
        counts = [min(1, number) for number in read]
        for _ in range(counts.count(0) - len(self._gone)):
            senders = [rank for rank, count in enumerate(counts) if 0 < count < read[rank]]
            if not senders:
                break
            order = [(self.left[rank] is not None, counts[rank], -(self.left[rank] or 0), rank) for rank in senders]
            counts[min(order)[-1]] += 1
        return counts


def steps_of(lengths: Sequence[int]) -> int:
    """Return the number of steps of an epoch with these lengths, if ranks may send any number of batches."""
    return Plan(lengths, [len(lengths)] * len(lengths)).steps_left or 0
