"""The records of the ranks in one epoch, in numbers and in words; and how a rank measures its own."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean

from torch_join._control.codec import closed

# With more ranks, values are logged and written as minimum, mean and maximum.
MOST_RANKS = 16


@closed("rank's epoch")
@dataclass(frozen=True, slots=True)
class RankRecord:
    """The record of one rank in an epoch.

    Attributes:
        batches: Number of batches that the rank trained on.
        shadow_steps: Number of steps that it made without a batch.
        joined_at: The index of the first step without a batch; `None` if there was none.
        active_seconds: Seconds from the epoch's start until that step, or until the epoch's end.
        seconds: Seconds from the epoch's start to its end, without validation.
        given: Number of batches that it sent to other ranks to train on.
        received: Number of batches from other ranks that it trained on.
        given_bytes: The size in bytes of the batches that it sent.
        reading_seconds: Seconds between asking for its own batches and getting them: the time of the loader, of
            rebalancing, and of meetings at each batch. `None` if a framework asks for batches.
        left: Whether it left the epoch by `break`.
        counted: The sum of its batches' counts: samples, or what a weighting function returns. `None` if the weighting
            counts nothing.
    """

    batches: int
    shadow_steps: int
    joined_at: int | None
    active_seconds: float
    seconds: float
    given: int = 0
    received: int = 0
    given_bytes: int = 0
    reading_seconds: float | None = None
    left: bool = False
    counted: float | None = None

    @property
    def idle_seconds(self) -> float:
        """Seconds of the epoch after it ran out of batches, when it waited for other ranks or served them."""
        return self.seconds - self.active_seconds

    @property
    def owned(self) -> int:
        """Number of its own batches that were trained on, on any rank."""
        return self.batches - self.received + self.given


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """The record of all ranks in one epoch.

    Attributes:
        epoch: The epoch's number.
        ranks: The record of each rank, by rank.
    """

    epoch: int
    ranks: tuple[RankRecord, ...]

    @classmethod
    def of(cls, epoch: int, measured: Sequence[RankRecord]) -> "EpochRecord":
        """Return the record of a user loop, from each rank's measurements of its own batches.

        A rank has joined if another rank has trained on more batches. The epoch ends with the last rank's last batch:
        it does not include the handover after that.
        """
        steps = max(rank.batches for rank in measured)
        end = max(rank.active_seconds for rank in measured)
        ranks = []
        for rank in measured:
            shadow_steps = steps - rank.batches
            joined_at = rank.joined_at if shadow_steps else None
            ranks.append(replace(rank, shadow_steps=shadow_steps, joined_at=joined_at, seconds=end))
        return cls(epoch, tuple(ranks))

    @property
    def seconds(self) -> float:
        """The duration of the epoch in seconds."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def rank_seconds(self) -> float:
        """The sum of all ranks' seconds."""
        return sum(rank.seconds for rank in self.ranks)

    @property
    def idle_seconds(self) -> float:
        """The sum of all ranks' seconds without a batch."""
        return sum(rank.idle_seconds for rank in self.ranks)

    @property
    def idle_share(self) -> float:
        """The share of all ranks' seconds without a batch, from 0 to 1."""
        return self.idle_seconds / self.rank_seconds if self.rank_seconds else 0.0

    @property
    def batches(self) -> int:
        """The number of batches that all ranks trained on."""
        return sum(rank.batches for rank in self.ranks)

    @property
    def steps(self) -> int:
        """The number of steps in the epoch: the largest number of batches that a rank trained on."""
        return max(rank.batches for rank in self.ranks)

    @property
    def even_steps(self) -> int:
        """The number of steps with evenly distributed batches: (number of batches / number of ranks), rounded up."""
        return ceil(self.batches / len(self.ranks))

    @property
    def skew(self) -> float:
        """The number of batches that the longest rank read, over the mean of all ranks: 1 if all have the same."""
        return self.longest * len(self.ranks) / self.batches if self.batches else 1.0

    @property
    def longest(self) -> int:
        """The largest number of batches that a rank read, among the batches that were trained on."""
        return max(rank.owned for rank in self.ranks)

    @property
    def donated(self) -> int:
        """The number of batches that one rank read and another rank trained on."""
        return sum(rank.given for rank in self.ranks)

    @property
    def donated_bytes(self) -> int:
        """The size of these batches in bytes."""
        return sum(rank.given_bytes for rank in self.ranks)

    @property
    def steps_saved(self) -> int:
        """The number of steps saved because other ranks trained on some of the longest rank's batches."""
        return self.longest - self.steps

    @property
    def steps_to_save(self) -> int:
        """The number of steps that even shards, or rebalancing, would have saved."""
        return self.steps - self.even_steps

    @property
    def saving(self) -> float:
        """The share of the epoch's steps that even shards, or rebalancing, would have saved, from 0 to 1."""
        return self.steps_to_save / self.steps if self.steps else 0.0

    @property
    def seconds_to_save(self) -> float:
        """An estimate of the seconds that these steps took: each step counts as the epoch's mean step."""
        return self.seconds * self.saving

    def metrics(self) -> dict[str, float]:
        """Return the values to log, by key."""
        names = ["idle_share", "idle_seconds", "skew", "steps_to_save", "seconds_to_save"]
        names += ["donated", "donated_bytes", "steps_saved"] if self.donated else []
        values: dict[str, float] = {f"join/{name}": getattr(self, name) for name in names}
        values["join/epoch_seconds"] = self.seconds
        for name in ("batches", "shadow_steps", "active_seconds"):
            by_rank = [getattr(rank, name) for rank in self.ranks]
            if len(by_rank) <= MOST_RANKS:
                values.update({f"join/{name}_rank_{rank}": value for rank, value in enumerate(by_rank)})
            else:
                values.update({f"join/{name}_{of}": summary(by_rank) for of, summary in _SUMMARIES.items()})
        return values

    def __str__(self) -> str:
        batches = [rank.batches for rank in self.ranks]
        is_short = len(batches) <= MOST_RANKS
        numbers = ", ".join(map(str, batches)) if is_short else f"{min(batches)} to {max(batches)}"
        text = f"Epoch {self.epoch}: {sum(batches)} batches ({numbers} on {len(batches)} rank{'s'[: len(batches) - 1]})"
        if self.donated:
            size = self.donated_bytes / 1e6
            text += f", {self.donated} of them given away ({size:.1f} MB), which saved {self.steps_saved} steps,"
        joined = [(rank.active_seconds, number) for number, rank in enumerate(self.ranks) if rank.joined_at is not None]
        if not joined:
            return f"{text} in {self.seconds:.1f} s, no rank joined."
        first_to_last = [f"rank {n} at batch {self.ranks[n].joined_at} after {s:.1f} s" for s, n in sorted(joined)]
        if not is_short and len(first_to_last) > 2:
            first_to_last = [first_to_last[0], f"{len(first_to_last) - 2} more", first_to_last[-1]]
        idle = f"{self.idle_share:.0%} of rank-seconds idle"
        return f"{text} in {self.seconds:.1f} s, {idle}. Joined: {', '.join(first_to_last)}."


_SUMMARIES: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "mean": fmean, "max": max}


class Stopwatch:
    """Measures one rank's time in one loop; made where the ranks meet at the loop's start.

    It reads the host's clock twice in a step, does not wait for pending GPU work, and sends nothing.

    Args:
        first: The number of the loop's first step.
        given_bytes: The number of bytes that this rank has sent to others, in batches, before the loop.
    """

    def __init__(self, first: int = 0, given_bytes: int = 0) -> None:
        self._first, self._given_bytes = first, given_bytes
        self._counted: float | None = 0.0
        self._batches = 0
        self._reading = 0.0
        self._left = False
        self._begin = self._asked = time.monotonic()

    def take(self) -> None:
        """Record that this rank gets a batch."""
        self._reading += time.monotonic() - self._asked
        self._batches += 1

    def ask(self, count: float | None = None) -> None:
        """Record that this rank asks for its next batch, if there is one.

        Args:
            count: The count of the batch that it has trained on, if batches are counted.
        """
        self._asked = time.monotonic()
        self._counted = None if count is None or self._counted is None else self._counted + count

    def pause(self, seconds: float) -> None:
        """Leave out the last `seconds`, in which this rank did not train."""
        self._begin += seconds
        self._asked += seconds

    def leave(self, count: float | None = None) -> None:
        """Record that this rank leaves the loop by `break`; see `ask`."""
        self._left = True
        self.ask(count)

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
            counted=self._counted,
        )
