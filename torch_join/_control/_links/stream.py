"""What a channel's messages have left on a rank."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field


def no_place() -> None:
    """Answer no roll call."""


@dataclass
class Stream:
    """What a channel's messages have left on this rank."""

    values: dict[str, bytes] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # on rank 0: what is added to
    kept: dict[str, bytes] = field(default_factory=dict)  # on this rank, for others to ask for
    asked: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # who waits for what is not kept yet
    answers: dict[int, bytes] = field(default_factory=dict)  # to what this rank has asked
    # By beat, of the ranks below this one: how many have come, their sum, and their notices or values.
    arrivals: dict[int, tuple[int, int, bytes]] = field(default_factory=dict)
    beats: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # the sum, and the notices or values
    place: Callable[[], Callable[[], bytes] | None] = no_place  # returns what answers roll calls, if anything does
    places: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # the last answers, and to which calls, by rank
    calls: int = 0  # how many roll calls there were
    called_at: float = -math.inf  # when this rank heard of the last
    begun: int = 0  # how many beats this rank has come to
    watched: dict[int, int] = field(default_factory=dict)  # by beat: in which gather ranks want to hear of who comes
    floor: int = 0  # records of the log before this one are done with
    until: dict[int, list[str]] = field(default_factory=dict)  # by record: the keys that go when it is done with
