"""Small messages between the ranks of a process group."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch_join._base.errors import JoinError, JoinTimeoutError, PeerFailedError
from torch_join._control.codec import closed

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


@closed("status")
class Status(NamedTuple):
    """What a rank says of itself when a failure is looked into.

    Attributes:
        models: Its forwards and synced backwards, by model.
        word: What it has announced in the tail, as all active ranks must: a checksum, how much, the last.
        loader: Where its loader is in a collective: at which step, and of which ranks.
    """

    models: list[list[int]]
    word: tuple[int, int, str] | None = None
    loader: tuple[int, list[int]] | None = None


class Channel:
    """The messages of one rank; a world of one needs no store."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.names: Sequence[int] = range(world_size)  # by rank: its number in the whole job, which errors say
        # What this rank adds to its answer to a roll call, and what the answers (by name) tell of a failure.
        self.status: Callable[[], Status | None] = lambda: None
        self.explain: Callable[[dict[int, Any]], JoinError | None] = lambda _: None
        # Called about once a second in a wait for others, which ends with what it raises.
        self.suspect: Callable[[], object] = lambda: None
        # Called before all ranks meet: to hear what they have said where they met before, if that was put off.
        self.before_meeting: Callable[[], object] = lambda: None

    def beat(self, count: int = 0, notice: dict[str, Any] | None = None) -> Beat:
        """Meet all ranks: add up a number and share what some of them have to say; `say` and `hear` in one."""
        self.say(count, notice)
        return self.hear()

    def say(
        self,
        count: int = 0,
        notice: dict[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
        waits: bool = True,
    ) -> None:
        """Come to a beat, and say this rank's part.

        Args:
            count: What this rank adds to the sum, from 0 to 2**30 divided by the number of ranks.
            notice: What this rank has to say, if anything: a JSON object.
            ranks: Who meets, by default all; the others call `skip_to` before they take part again.
            waits: Whether this rank goes on to `hear` at once. If not, and some of all ranks meet, it most
                often need not wait then.

        Raises:
            JoinValueError: `count` is out of range.
        """
        self._said = Beat(count, {} if notice is None else {self.rank: notice})

    def hear(self) -> Beat:
        """Wait until all participants have come to the beat that this rank has come to with `say`.

        Returns:
            The sum and the notices of all ranks, the same on each.

        Raises:
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: Another rank did not come within the channel's timeout.

        """
        return self._said

    def put_off(self) -> None:
        """Note that this rank calls `catch_up` in a moment, or waits: what comes need not be read before.

        Without it, another thread reads at once what comes, and takes the interpreter's lock for that.
        """

    def catch_up(self) -> None:
        """Read what has come since `put_off`, and pass it on; waits for nobody."""

    def gather(self, value: T, unless_beat: bool = False, of: Any = Any) -> list[T]:
        """Meet all ranks and return every rank's value, by rank.

        Args:
            value: What this rank has to say: numbers, strings, lists, tuples, dictionaries and the like.
            unless_beat: Whether to raise, within a second, where another rank comes to the next beat instead.
            of: The type that all values must be of.

        Raises:
            JoinError: See `unless_beat`. Or what was read is no message of a rank, or not of that type.
            JoinTypeError: `value` is of no kind that goes over the store.
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: Another rank did not come within the channel's timeout.

        """
        return [value]

    def announce(self, record: Any, leads: bool) -> None:
        """Add a record to the log that some ranks keep and others follow; waits for nobody.

        Args:
            record: What `gather` takes.
            leads: Whether this rank writes it. The ranks that keep the log all call this in the same
                order, and one of them writes.
        """

    @property
    def records(self) -> int:
        """How many records of the log this rank has written, or would have, or followed."""
        return 0

    def follow(self, meanwhile: Callable[[], None] | None = None, of: Any = Any) -> Any:
        """Wait for the log's next record.

        Args:
            meanwhile: Called again and again while there is none; the wait is then not as quick.
            of: The type that it must be of.

        Raises:
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: No record came within the channel's timeout.
        """
        raise JoinTimeoutError("A world of one has nobody to follow.")

    def post(self, key: str, value: Any, until_met: bool = False) -> None:
        """Give a value (what `gather` takes) a name of its own; waits for nobody.

        Args:
            key: The name.
            value: The value.
            until_met: Whether it goes when all ranks have met in a `gather`, and not when they pass the log's next
                record.
        """

    def posted(self, key: str) -> bool:
        """Whether there is a value of this name."""
        return False

    def read(
        self, key: str, meanwhile: Callable[[], None] | None = None, of: Any = Any, is_polled: bool = False
    ) -> Any:
        """Wait for the value of this name, as `follow` does for a record.

        Args:
            key: The name.
            meanwhile: See `follow`.
            of: The type that the value must be of.
            is_polled: Whether ranks ask with `posted` for it: a wait is then not cut short when a rank fails.
        """
        return self.follow(meanwhile)

    def add(self, key: str, number: int) -> int:
        """Add to the number of this name, which begins at 0, and return the sum; waits for nobody."""
        return number

    def keep(self, key: str, value: Any) -> None:
        """Give a value (what `gather` takes) a name of this rank's, by which others may `ask` it; waits for nobody.

        Of all that a rank keeps, the last few thousand are there.
        """

    def ask(self, key: str, ranks: Sequence[int], of: Any = Any) -> dict[int, Any]:
        """Return what ranks keep by a name, by rank.

        Args:
            key: The name.
            ranks: Who is asked.
            of: The type that the values must be of.

        Raises:
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: Another rank does not keep it within the channel's timeout.
        """
        return {}

    def exchange(self, key: str, value: T, ranks: Sequence[int], of: Any = Any) -> dict[int, T]:
        """Meet some ranks, of which this is one, and return what each of these has to say, by rank; see `gather`.

        Args:
            key: A name that is used once.
            value: What this rank has to say.
            ranks: Those that call this.
            of: The type that all values must be of.
        """
        return {self.rank: value}

    def contribute(self, key: str, number: int, ranks: Sequence[int]) -> None:
        """Add a number below 2**32 to a sum of one of each of these ranks, all of which call this; waits for nobody."""

    def contributed(self, key: str, ranks: Sequence[int]) -> int | None:
        """Return that sum, once, on the first of the ranks; `None` while it is not complete. Waits for nobody."""
        return None

    def delete(self, key: str) -> None:
        """Delete the value of this name."""

    @property
    def beats(self) -> int:
        """How many beats this rank has taken part in."""
        return 0

    @property
    def position(self) -> Any:
        """Where this rank is in the beats, for those that have met without."""

    def skip_to(self, position: Any) -> None:
        """Take up the beats again, after others have met without this rank: at the `position` of one of them."""

    def fail(self, reason: str, rank: int | None = None) -> None:
        """Tell the other ranks that this one (or `rank`, which cannot) is unable to go on; waits for nobody."""

    def tell(self, error: BaseException) -> None:
        """Tell them what has ended this rank: an error of its own, or a failure of which another channel knows."""

    def failure(self) -> PeerFailedError | None:
        """Return the failure that another rank has told of, if any; waits for nobody."""
        return None

    def vigil(self) -> Callable[[], None]:
        """Return what a wait for another rank, by other means than this channel, has to call again and again.

        It raises as a wait on the channel does: `PeerFailedError` if a rank has failed or its process is gone,
        `JoinTimeoutError` when the channel's timeout is over.
        """
        return lambda: None

    def roll_call(self) -> dict[int, Any]:
        """Return who is there: by rank, whether it waits on this channel, and what its `status` says.

        Ranks answer from a thread of their own, wherever they are. Whoever does not within three
        seconds has ended or is stopped. Ends early once a failure has been told of.
        """
        return {self.rank: [False, self.status()]}

    def silent(self, answers: Container[int]) -> list[int]:
        """Return which ranks have given no answer to a roll call, less those that are asked through such a one."""
        return [rank for rank in range(self.world_size) if rank not in answers]

    def leave(self) -> None:
        """Answer no more roll calls."""

    def close(self) -> None:
        """Leave, and delete what the last messages left in the store: rank 0, which goes last, what all others gave."""

    def finish(self) -> None:
        """Close, when all ranks have come here; rank 0, whose process may host the store, when all others have left.

        Not by a barrier of the process group: on an accelerator that needs to be told of a device, or takes the first.

        Raises:
            PeerFailedError: A rank has ended before.
        """
        self.close()
