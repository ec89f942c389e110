"""What the ranks did in one epoch, in numbers and in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from torch_join._control.codec import closed

# With more ranks, values are logged and written as minimum, mean and maximum.
MOST_RANKS = 16


@closed("rank's epoch")
@dataclass(frozen=True)
class RankRecord:
    """One rank's epoch.

    Attributes:
        batches: Number of batches that it trained on.
        shadow_steps: Number of steps that it made without a batch.
        joined_at: The index of the first of those, `None` if there was none.
        active_seconds: Seconds from the epoch's start until then, or until its end.
        seconds: Seconds from the epoch's start to its end, validation left out.
        given: Number of batches that it gave to other ranks to train on.
        received: Number of batches of other ranks that it trained on.
        given_bytes: The bytes of those that it gave.
    """

    batches: int
    shadow_steps: int
    joined_at: int | None
    active_seconds: float
    seconds: float
    given: int = 0
    received: int = 0
    given_bytes: int = 0

    @property
    def owned(self) -> int:
        """Number of its own batches that were trained on, wherever."""
        return self.batches - self.received + self.given


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of all ranks.

    Attributes:
        epoch: Its number.
        ranks: What each rank did, by rank.
    """

    epoch: int
    ranks: tuple[RankRecord, ...]

    @property
    def seconds(self) -> float:
        """How long the epoch took."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def idle_share(self) -> float:
        """The share of all ranks' seconds in which a rank had no batch, from 0 to 1."""
        total = sum(rank.seconds for rank in self.ranks)
        return 1 - sum(rank.active_seconds for rank in self.ranks) / total if total else 0.0

    @property
    def steps_saved(self) -> int:
        """How many steps fewer there were than the longest rank has batches, since others trained on some of these."""
        return max(rank.owned for rank in self.ranks) - max(rank.batches for rank in self.ranks)

    @property
    def saving(self) -> float:
        """The share of the epoch's steps that even shards, or rebalancing, would save, from 0 to 1."""
        batches = [rank.batches for rank in self.ranks]
        return 1 - ceil(sum(batches) / len(batches)) / max(batches) if any(batches) else 0.0

    def metrics(self) -> dict[str, float]:
        """Return what is logged, by key."""
        values: dict[str, float] = {"join/idle_share": self.idle_share, "join/epoch_seconds": self.seconds}
        for name in ("batches", "shadow_steps", "active_seconds"):
            by_rank = [getattr(rank, name) for rank in self.ranks]
            if len(by_rank) <= MOST_RANKS:
                values.update({f"join/{name}_rank_{rank}": value for rank, value in enumerate(by_rank)})
            else:
                values.update({f"join/{name}_{of}": summary(by_rank) for of, summary in _SUMMARIES.items()})
        if self._donated:
            values["join/donated"] = self._donated
            values["join/donated_bytes"] = sum(rank.given_bytes for rank in self.ranks)
            values["join/steps_saved"] = self.steps_saved
        return values

    @property
    def _donated(self) -> int:
        return sum(rank.given for rank in self.ranks)

    def __str__(self) -> str:
        batches = [rank.batches for rank in self.ranks]
        few = len(batches) <= MOST_RANKS
        numbers = ", ".join(map(str, batches)) if few else f"{min(batches)} to {max(batches)}"
        text = f"Epoch {self.epoch}: {sum(batches)} batches ({numbers} on {len(batches)} rank{'s'[: len(batches) - 1]})"
        if self._donated:
            size = sum(rank.given_bytes for rank in self.ranks) / 1e6
            text += f", {self._donated} of them given away ({size:.1f} MB), which saved {self.steps_saved} steps,"
        joined = [(rank.active_seconds, number) for number, rank in enumerate(self.ranks) if rank.joined_at is not None]
        if not joined:
            return f"{text} in {self.seconds:.1f} s, no rank joined."
        first_to_last = [self._when(number) for _, number in sorted(joined)]
        if not few and len(first_to_last) > 2:
            first_to_last = [first_to_last[0], f"{len(first_to_last) - 2} more", first_to_last[-1]]
        idle = f"{self.idle_share:.0%} of rank-seconds idle"
        return f"{text} in {self.seconds:.1f} s, {idle}. Joined: {', '.join(first_to_last)}."

    def _when(self, number: int) -> str:
        rank = self.ranks[number]
        return f"rank {number} at batch {rank.joined_at} after {rank.active_seconds:.1f} s"


_SUMMARIES: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "mean": fmean, "max": max}
