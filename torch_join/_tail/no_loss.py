"""Steps in which a rank has a batch and no loss, and among them those in which no rank has one.

Such a rank goes through backward as one without a batch, since the others need it there. If nobody has
a loss, and no gradient has been accumulated either, the average of nothing would be zero: a gradient that
momentum and weight decay act upon, where a single process has none. Ranks without a loss therefore count
themselves before their backward; those without a batch only where the lowest rank that has one has told them that it
has no loss. Nobody comes through its collectives before all have come to them, so after it the count is complete.
Ranks with a loss have nothing to do.
"""

from typing import NamedTuple

from torch_join._control.channel import Channel

_GRADIENTS = 1 << 32  # one addition carries both counts


class Totals(NamedTuple):
    """What all ranks together have at the end of a step's backward."""

    has_loss: bool
    has_gradients: bool


class NoLossCount:
    """Counts the ranks without a loss, over the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def add(self, holds_gradients: bool) -> None:
        """Count this rank, before its backward."""
        self._channel.add(self._key, 1 if holds_gradients else 1 + _GRADIENTS)

    def read(self) -> Totals:
        """Return what is left when all ranks that count themselves have done so: after the backward's collectives."""
        total = self._channel.add(self._key, 0)
        everyone = self._channel.world_size
        return Totals(total % _GRADIENTS < everyone, total // _GRADIENTS < everyone)

    @property
    def _key(self) -> str:
        return f"lossless/{self._channel.beats}"
