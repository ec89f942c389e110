"""Small messages between the ranks of a process group."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch_join._errors import JoinTimeoutError, PeerFailedError

T = TypeVar("T")


@dataclass(frozen=True)
class Beat:
    """What all ranks together said in one beat.

    Attributes:
        total: The sum of every rank's `count`.
        notices: What the ranks that had something to say sent, by rank.

    """

    total: int
    notices: dict[int, dict[str, Any]] = field(default_factory=dict)


class Channel:
    """The messages of one rank; a world of one needs no store."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size

    def beat(self, count: int = 0, notice: dict[str, Any] | None = None, participants: int | None = None) -> Beat:
        """Meet all ranks: add up a number and share what some of them have to say.

        Args:
            count: What this rank adds to the sum, from 0 to 2**31 - 1.
            notice: What this rank has to say, if anything: a JSON object.
            participants: How many ranks meet, by default all; the others call `skip_to` before they
                take part again.

        Returns:
            The sum and the notices of all ranks, the same on each.

        Raises:
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: Another rank did not come within the channel's timeout.

        """
        return Beat(count, {} if notice is None else {self.rank: notice})

    def gather(self, value: T) -> list[T]:
        """Meet all ranks and return every rank's value, by rank (values are pickled).

        Raises:
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: Another rank did not come within the channel's timeout.

        """
        return [value]

    def announce(self, record: Any, leads: bool) -> None:
        """Add a record to the log that some ranks keep and others follow; waits for nobody.

        Args:
            record: Anything that can be pickled.
            leads: Whether this rank writes it. The ranks that keep the log all call this in the same
                order, and one of them writes.
        """

    def follow(self) -> Any:
        """Wait for the log's next record.

        Raises:
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: No record came within the channel's timeout.
        """
        raise JoinTimeoutError("A world of one has nobody to follow.")

    def forget(self) -> None:
        """Delete the records that this rank has followed, and that all others who follow have too."""

    def correct(self, length: int) -> None:
        """Tell the others of a number of batches that differs from the one that was exchanged."""

    def corrections(self) -> dict[int, int]:
        """Return what others have told with `correct`; waits for nobody."""
        return {}

    @property
    def beats(self) -> int:
        """How many beats this rank has taken part in."""
        return 0

    def skip_to(self, beats: int) -> None:
        """Take up the beats again, after others have met without this rank."""

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on; waits for nobody."""

    def failure(self) -> PeerFailedError | None:
        """Return the failure that another rank has told of, if any; waits for nobody."""
        return None

    def roll_call(self) -> list[int]:
        """Return the ranks that do not answer within a moment; all that can should call this together."""
        return []

    def close(self) -> None:
        """Delete what the last messages left in the store; all ranks must have read them."""
