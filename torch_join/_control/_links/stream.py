"""The state of a channel on one rank, from the messages that have come."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field


def no_place() -> None:
    """Give no answer to a health check."""


@dataclass
class ChannelState:
    """The state of a channel on this rank, from the messages that have come."""

    values: dict[str, bytes] = field(default_factory=dict)  # posted values
    until: dict[int, list[str]] = field(default_factory=dict)  # by log record: values to drop when this rank passes it
    floor: int = 0  # the first record that this rank has not passed
    failure: bytes | None = None  # the first reported failure: the rank and the reason
    numbers: dict[str, int] = field(default_factory=dict)  # on rank 0: the sums
    kept: dict[str, bytes] = field(default_factory=dict)  # this rank's values that other ranks may ask for
    asked: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # questions for values not kept yet
    answers: dict[int, bytes] = field(default_factory=dict)  # to this rank's questions
    # By barrier (or gather, or sum) and its ranks: how many ranks at or below this one have come, and their sum and
    # notices (or values).
    arrivals: dict[tuple[int, int], tuple[int, int, bytes]] = field(default_factory=dict)
    barriers: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)  # complete ones: sum and notices
    place: Callable[[], Callable[[], bytes] | None] = no_place  # returns the function that answers health checks
    places: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by rank: the last answer, after its call
    calls: int = 0  # the number of health checks
    called_at: float = -math.inf  # when this rank received the last one

    def keep_until(self, record: int, key: str, value: bytes) -> None:
        """Keep a value until this rank passes a record of the log, unless it already has."""
        if record >= self.floor:
            self.values[key] = value
            self.until.setdefault(record, []).append(key)

    def pass_log(self, record: int) -> None:
        """Drop the values that this rank had to keep until an earlier record."""
        for before in range(self.floor, record):
            for key in self.until.pop(before, ()):
                self.values.pop(key, None)
        self.floor = max(self.floor, record)
