"""The state that a channel's messages have left on a rank."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field


def no_place() -> None:
    """Give no answer to a health check."""


@dataclass
class ChannelState:
    """The state that a channel's messages have left on this rank."""

    values: dict[str, bytes] = field(default_factory=dict)  # posted values
    until: dict[int, list[str]] = field(default_factory=dict)  # by record of the log: values to drop once it is passed
    floor: int = 0  # the first record that is not passed
    failure: bytes | None = None  # the first one reported: who, and why
    numbers: dict[str, int] = field(default_factory=dict)  # on rank 0: the sums
    kept: dict[str, bytes] = field(default_factory=dict)  # this rank's values that others may ask for
    asked: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # who waits for a value not kept yet
    answers: dict[int, bytes] = field(default_factory=dict)  # to this rank's questions
    # By barrier (or gather, or sum) and its ranks: how many ranks at or below this one have come, their sum, and their
    # notices or values.
    arrivals: dict[tuple[int, int], tuple[int, int, bytes]] = field(default_factory=dict)
    barriers: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)  # complete: sum and notices
    place: Callable[[], Callable[[], bytes] | None] = no_place  # returns the function that answers health checks
    places: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # the last answers with their calls, by rank
    calls: int = 0  # the number of health checks
    called_at: float = -math.inf  # when this rank received the last one

    def keep_until(self, record: int, key: str, value: bytes) -> None:
        """Keep a value until this rank passes a record of the log, unless it already has."""
        if record >= self.floor:
            self.values[key] = value
            self.until.setdefault(record, []).append(key)

    def pass_log(self, record: int) -> None:
        """Drop the values to be kept until a record before this one."""
        for before in range(self.floor, record):
            for key in self.until.pop(before, ()):
                self.values.pop(key, None)
        self.floor = max(self.floor, record)
