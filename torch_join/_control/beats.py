"""Meetings of ranks over a key-value store, at the cost of one addition each.

The last rank to come to a beat knows it from the number that its addition comes to. In a beat of all ranks it sets a
key, which the others wait for. In one of some ranks, where the others have joined, a rank need not know at once who
has come: it looks at the number again when it has to, and most often finds that all have. Only if not does it add that
it waits, and the last one, which sees that, sets the key.

The ranks add to two numbers in turns, since one of them may come to the next beat before another looks at the last.
Each remembers what a number had come to, so that none is ever reset.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_join._base.errors import JoinValueError
from torch_join._control import codec as _codec
from torch_join._control.channel import Beat

# One addition carries everything: arrivals; ranks that have a notice or wait; and a sum.
_ATTENTION = 15  # the bit at which the second field begins: up to three times as many as there are ranks
_COUNT = 32
MAX_RANKS = (1 << _ATTENTION) - 1
MAX_COUNT = 1 << 30  # of all ranks together
_FULL = 1 << 29  # a number to which counts of this sum have been added is replaced by a new one


@dataclass
class _Number:
    key: int
    base: int = 0  # what this rank has last seen it come to
    counts: int = 0  # of this, the sum of all counts

    def arrivals(self, value: int) -> int:
        return value - self.base & MAX_RANKS

    def attention(self, value: int) -> int:
        return value - self.base >> _ATTENTION & (1 << (_COUNT - _ATTENTION)) - 1


class Beats:
    """One rank's part in the beats.

    Args:
        store: A connection to the store.
        rank, world_size: This rank, and the number of ranks.
        wait: Waits for a key and returns its value; raises if a rank has failed.
        delete: Deletes a key in its own time.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, wait: Callable[[str], bytes], delete: Callable[[str], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._wait = wait
        self._delete = delete
        self.number = 0  # of beats this rank has come to
        self._numbers = [_Number(0), _Number(1)]
        self._came = world_size  # how many to the last beat
        self._own = Beat(0)  # what this rank said there
        self._waits = True
        self._value = 0  # what its addition came to
        # What beats leave, mostly to the last one to come: which beat, how many came, keys that some may read yet.
        self._owned: list[tuple[int, int, list[str]]] = []

    def say(self, count: int, notice: dict[str, Any] | None, ranks: Sequence[int], waits: bool) -> None:
        """Come to a beat; see `Channel.say`."""
        if not 0 <= count <= MAX_COUNT // self._world_size:
            most = MAX_COUNT // self._world_size
            raise JoinValueError(f"A beat of {self._world_size} ranks adds from 0 to {most} on each, not {count}.")
        index, self.number = self.number, self.number + 1
        before, self._came = self._came, (participants := len(ranks))
        self._own = Beat(count, {} if notice is None else {self._rank: notice})
        if participants == 1:
            return
        # Whoever came to the last beat has read the one before; who left between them may not have.
        self._delete_keys(lambda beat, came: beat < index - 1 and came == before)
        self._waits = waits or participants == self._world_size
        attention = (notice is not None) + (self._waits and participants < self._world_size)
        number = self._numbers[index % 2]
        if notice is not None:
            self._store.append(f"notices/{index}", _codec.encode((self._rank, notice)).decode() + "\n")
        self._value = self._store.add(f"sum/{number.key}", 1 + (attention << _ATTENTION) + (count << _COUNT))
        if not 0 < number.arrivals(self._value) <= participants or self._value < number.base:
            raise _codec.Malformed(f"{number.arrivals(self._value)} of {participants} ranks have come")
        if number.arrivals(self._value) == participants:
            keys = [f"notices/{index}"] if number.attention(self._value) else []
            if participants == self._world_size or number.attention(self._value) > attention:
                self._store.set(f"go/{index}", str(self._value))
                keys.append(f"go/{index}")
            if keys:
                self._owned.append((index, participants, keys))

    def hear(self) -> Beat:
        """Wait until all have come; see `Channel.hear`."""
        if self._came == 1:
            return self._own
        index = self.number - 1
        number = self._numbers[index % 2]
        key, value = f"sum/{number.key}", self._value
        if number.arrivals(value) < self._came and not self._waits:
            value = self._store.add(key, 0)
            if number.arrivals(value) < self._came:
                value = self._store.add(key, 1 << _ATTENTION)
        if number.arrivals(value) < self._came:
            value = _codec.decode(self._wait(f"go/{index}"), int)
        if number.arrivals(value) != self._came or not 0 <= (total := value - number.base >> _COUNT) <= MAX_COUNT:
            raise _codec.Malformed(f"{number.arrivals(value)} of {self._came} ranks have come")
        notices = {}
        # There may be none: in place of a notice a rank may have waited, here or, too late, in this number's last beat.
        if number.attention(value) and self._store.check([f"notices/{index}"]):
            notices = read_notices(self._store.get(f"notices/{index}"), self._world_size)
        number.base, number.counts = value, number.counts + total
        if number.counts >= _FULL:
            self._owned.append((index, self._came, [key]))
            self._numbers[index % 2] = _Number(number.key + 2)
        return Beat(total, notices)

    @property
    def position(self) -> Any:
        """See `Channel.position`."""
        return self.number, [(number.key, number.base, number.counts) for number in self._numbers]

    def skip_to(self, position: Any) -> None:
        """Take up the beats again; see `Channel.skip_to`."""
        self.number, numbers = position
        self._numbers = [_Number(*number) for number in numbers]
        self._came = 0  # nobody knows what who came to the last one has read

    def use(self, store: Any) -> None:
        """Go on over another connection."""
        self._store = store

    def somebody_came(self) -> bool:
        """Whether a rank has come to the next beat."""
        number = self._numbers[self.number % 2]
        return number.arrivals(self._store.add(f"sum/{number.key}", 0)) > 0

    def all_have_met(self) -> None:
        """Delete what beats have left; all ranks have come to something after them."""
        self._delete_keys(lambda *_: True)

    def close(self) -> None:
        """Delete everything; all ranks must be done."""
        self.all_have_met()
        for number in self._numbers if self._rank == 0 else ():
            self._delete(f"sum/{number.key}")

    def _delete_keys(self, have_read: Callable[[int, int], bool]) -> None:
        for owned in [owned for owned in self._owned if have_read(*owned[:2])]:
            self._owned.remove(owned)
            for key in owned[2]:
                self._delete(key)


def read_notices(data: bytes, world_size: int) -> dict[int, dict[str, Any]]:
    """Return what ranks have to say, a line of each, by rank."""
    found = [_codec.decode(line, tuple[int, dict[str, Any]]) for line in data.splitlines()]
    if not all(0 <= rank < world_size for rank, _ in found):
        raise _codec.Malformed(f"notices of ranks {_codec.brief([rank for rank, _ in found])}")
    return dict(sorted(found, key=lambda notice: notice[0]))
