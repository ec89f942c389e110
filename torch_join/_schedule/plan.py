"""Which rank trains on which batch at which step: a function of numbers that all ranks know.

Contract: all ranks make the same calls of their `Plan`, and so plan the same rows. A row depends only on the batches
left (and on limits that do not change), so that a resumed or corrected run plans like any other.

Known lengths. With S batches left on W ranks, L of them on a rank that may give up to g in a step, no schedule has
fewer steps than T = max(ceil(S / W), ceil(L / (1 + g)) of each rank), and in one of T steps some step takes at least
ceil(L / T) batches of that rank. Each row takes floor(L / T) or ceil(L / T) of each rank, together as many as there are
ranks to train on them, so both bounds are met: the rest fits into T - 1 steps, in which no rank's share is larger than
before. Among ranks whose share is not a whole number, those that are furthest behind give one more: so gifts are spread
over the epoch, and a rank that receives one puts its own batch off.

Unknown lengths. As long as some rank's length is unknown, ranks with batches train on their own, and idle ranks get the
gifts. Without limits every such row is full, and there are no more steps than with known lengths. With limits there are
at most ceil(S / W) + max(ceil(L / (1 + g))), twice the minimum: a row that is not full takes 1 + g batches of each rank
that has as many, so there are no more of these than the second term says.

Either way, a rank without a batch has none until the epoch's end: its own loop may be over. This needs care only if a
length proves wrong.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """A batch that a rank trains on in a step: its owner, and its index among the owner's batches in the epoch."""

    owner: int
    batch_idx: int


Row = tuple[Share | None, ...]  # by rank; `None`: it has no batch in this step


class Plan:
    """The steps of one epoch: the planned ones, and the batches left for others.

    Args:
        left: By rank, its number of batches from here on; `None` if not known yet.
        max_sent_per_step: By rank, how many batches it may give away in one step.
        taken: By rank, how many of its batches were trained on before, in an epoch that is resumed in its middle.

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
        """By rank, how many batches it must have read, unless it reaches its end, before the next row is planned."""
        steps = self.steps_left
        if steps is not None:
            return [-(-left // steps) if left else 0 for left in self.left]
        ends = [*zip(self.left, self._most, strict=True)]
        wanted = self.left.count(0) - len(self._gone) - sum(min(left, most) - 1 for left, most in ends if left)
        unknown = [most for left, most in ends if left is None]
        each = 1
        while each < max(unknown) and sum(min(each, most) - 1 for most in unknown) < wanted:
            each += 1
        return [min(most, each if left is None else left) for left, most in ends]

    def announce(self, left: Mapping[int, int]) -> None:
        """Note the numbers of batches left on ranks that have reached their end, or know better than before."""
        for rank, number in left.items():
            self.left[rank] = number

    def leave(self, ranks: Iterable[int]) -> None:
        """Continue to plan without ranks that leave the epoch: from now on they neither train nor give."""
        self._gone |= {*ranks}
        for rank in self._gone:
            self.left[rank] = 0

    def plan(self) -> Row:
        """Plan the next row; without any batch if all ranks have reached their end."""
        steps = self.steps_left
        counts = self._as_read() if steps is None else self._as_known(steps)
        owners = [rank if count else None for rank, count in enumerate(counts)]
        idle = (rank for rank, count in enumerate(counts) if not count and rank not in self._gone)
        donated = (rank for rank, count in enumerate(counts) for _ in range(count - 1))
        for receiver, sender in zip(idle, donated, strict=False):
            owners[receiver] = sender
        row: list[Share | None] = [None] * len(counts)
        for rank in sorted(range(len(counts)), key=lambda rank: owners[rank] != rank):  # its own comes first
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
        # An earlier deadline goes first; among equal ones, a batch that its owner trains on.
        behind.sort(key=lambda rank: (-lengths[rank] / (counts[rank] + 1), counts[rank], rank))
        for rank in behind[: len(lengths) - len(self._gone) - sum(counts)]:
            counts[rank] += 1
        return counts

    def _as_read(self) -> list[int]:
        """Return the same if some lengths are unknown: these ranks give at most the batches that they have read."""
        has = [min(ahead, most) for ahead, most in zip(self.ahead, self._most, strict=True)]
        counts = [min(1, number) for number in has]
        for _ in range(counts.count(0) - len(self._gone)):
            senders = [rank for rank, count in enumerate(counts) if 0 < count < has[rank]]
            if not senders:
                break
            order = [(self.left[rank] is not None, counts[rank], -(self.left[rank] or 0), rank) for rank in senders]
            counts[min(order)[-1]] += 1
        return counts


def steps_of(lengths: Sequence[int]) -> int:
    """Return the number of steps of an epoch with these lengths, if ranks may give away any number of batches."""
    return Plan(lengths, [len(lengths)] * len(lengths)).steps_left or 0
