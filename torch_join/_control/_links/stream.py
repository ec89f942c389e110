"""What a channel's messages have left on a rank."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field


def no_place() -> None:
    """Answer nobody who asks who is there."""


@dataclass
class ChannelState:
    """What a channel's messages have left on this rank."""

    values: dict[str, bytes] = field(default_factory=dict)  # what was posted
    until: dict[int, list[str]] = field(default_factory=dict)  # by record of the log: what goes when it is passed
    floor: int = 0  # the first record that is not passed
    failure: bytes | None = None  # the first that was told of: who, and why
    numbers: dict[str, int] = field(default_factory=dict)  # on rank 0: what is added to
    kept: dict[str, bytes] = field(default_factory=dict)  # on this rank, for others to ask for
    asked: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # who waits for what is not kept yet
    answers: dict[int, bytes] = field(default_factory=dict)  # to what this rank has asked
    # By barrier (or gather, or sum) and whose it is, of the ranks below this one: how many have come, their sum, and
    # their notices or values.
    arrivals: dict[tuple[int, int], tuple[int, int, bytes]] = field(default_factory=dict)
    barriers: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)  # of all: the sum, and the notices
    place: Callable[[], Callable[[], bytes] | None] = no_place  # returns what says that this rank is there
    places: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # the last answers, and to which calls, by rank
    calls: int = 0  # how often somebody has asked who is there
    called_at: float = -math.inf  # when this rank heard of the last

    def keep_until(self, record: int, key: str, value: bytes) -> None:
        """Keep a value until this rank passes a record of the log, unless it has."""
        if record >= self.floor:
            self.values[key] = value
            self.until.setdefault(record, []).append(key)

    def pass_log(self, record: int) -> None:
        """Forget what was to be kept until a record before this one."""
        for before in range(self.floor, record):
            for key in self.until.pop(before, ()):
                self.values.pop(key, None)
        self.floor = max(self.floor, record)
