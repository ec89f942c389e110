"""Whether the active ranks do the same things in the tail, in the same order."""

from typing import Any
from zlib import crc32

from torch_join._channel import Channel
from torch_join._errors import JoinError


class Agreement:
    """One active rank's announcements of a tail, as a number that all active ranks must have in common.

    Joined ranks follow the lowest active rank alone. What another one does differently would be
    paired with something else by the backend, which hangs, or goes wrong in silence.

    Args:
        channel: The channel between the ranks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.begin()

    def begin(self) -> None:
        """Begin a tail."""
        self._name = f"said/{self._channel.records}"  # the same on all active ranks
        self._sum = self._count = self._steps = 0
        self.last = ""

    def note(self, index: int, kind: str, payload: Any) -> None:
        """Add an announcement."""
        # Other payloads hold what only the first rank needs to know.
        self.last = f"{kind} {payload}" if kind in ("forward", "collective") else kind
        self._sum = crc32(f"{index} {self.last}".encode(), self._sum)
        self._count += 1

    def compare(self, rank: int, active: tuple[int, ...]) -> None:
        """Compare what was announced before the last step, at the begin of a new one; waits for nobody.

        Raises:
            JoinError: The active ranks have announced different things.
        """
        if len(active) < 2:
            return
        step, self._steps = self._steps, self._steps + 1
        self._channel.post(f"{self._name}/{step}/{rank}", self.word)
        keys = [f"{self._name}/{step - 1}/{other}" for other in active]
        # The ranks after this one have come to the last step's begin if there was any sync in between.
        if rank != active[0] or step == 0 or not self._channel.posted(*keys):
            return
        words = {other: self._channel.read(key) for other, key in zip(active, keys, strict=True)}
        for key in keys:
            self._channel.delete(key)
        if len({sum_ for sum_, _, _ in words.values()}) > 1:
            raise JoinError(
                "The active ranks do different things in the tail of a loop, which pairs their collectives wrongly."
                f" Before step {step} of the tail, {_places(words)}. All ranks must run the same forwards, backwards"
                " and collectives in a step."
            )

    @property
    def word(self) -> tuple[int, int, str]:
        """What all active ranks must have in common: a checksum, the number of announcements, the last."""
        return self._sum, self._count, self.last


def explain_places(words: dict[int, tuple[int, int, str]]) -> str | None:
    """Say where the active ranks were when a collective failed, if in different places."""
    if len({tuple(word) for word in words.values()}) < 2:
        return None
    return (
        f"A collective failed, with the active ranks in different places of the tail: {_places(words)}. Usual causes: a"
        " collective that only some ranks issue, or a rank that takes longer than the process group's timeout."
    )


def _places(words: dict[int, tuple[int, int, str]]) -> str:
    return "; ".join(
        f"rank {rank} had announced {count}, the last: {last or 'nothing'}" for rank, (_, count, last) in words.items()
    )


def explain_counts(synced: dict[int, list[int]]) -> str:
    """Say that ranks sync at different steps, given their synced backwards by model."""
    counts = ", ".join(f"rank {rank}: {' and '.join(map(str, by_model))}" for rank, by_model in sorted(synced.items()))
    return (
        f"The ranks have run different numbers of synced backwards ({counts}), by model. A usual cause is to sync on a"
        " rank's own last batch (`if i + 1 == len(loader)`), which ranks reach at different steps: sync at steps that"
        " are the same on all ranks."
    )
