"""What a channel keeps in a store, kept on every rank instead, and beats over a tree.

The interface is that of torch's stores as far as `StoreChannel` uses it. A key that is set somewhere comes to all
ranks; looking at it, or waiting for it, asks nobody. Only a sum of which the ranks need to know what it came to is
asked for, at rank 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch_join._base.errors import JoinValueError
from torch_join._control import codec as _codec
from torch_join._control._links.tree import Sayer, Tree
from torch_join._control.beats import MAX_COUNT


class TreeStore:
    """The keys of one channel, on this rank; any thread may use it.

    Args:
        tree: The ranks.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._sayer: Sayer = tree.open()
        self._values = self._sayer.stream.values

    @property
    def sayer(self) -> Sayer:
        """What says things over the tree."""
        return self._sayer

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value, on all ranks."""
        self._sayer.set(key, _bytes(value))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Give a key another value where it has the one that is expected."""
        self.tree.links.read()
        if self._values.get(key, b"") == _bytes(expected):
            self._sayer.swap(key, _bytes(expected), _bytes(value))
        return self._values.get(key, b"")

    def has(self, key: str) -> bool:
        """Whether a key is there, of what has been read."""
        return key in self._values

    def check(self, keys: Sequence[str]) -> bool:
        """Whether these keys are there."""
        self.tree.links.read()
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return self._values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are there."""
        return [self._values[key] for key in keys]

    def add(self, key: str, number: int, look: Callable[[], None]) -> int:
        """Add to a number of rank 0's, and return the sum; `look` raises if it is not to be waited for any more."""
        asked = self._sayer.add(key, number)
        answers = self._sayer.stream.answers
        self.tree.wait(lambda: asked in answers, look)
        return int.from_bytes(answers.pop(asked), "little", signed=True)

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete keys, on all ranks."""
        self._sayer.delete(keys)

    def pass_log(self, number: int) -> None:
        """Forget the records of the log before this one, what came with them, and what is to come of that."""
        stream = self._sayer.stream
        with self.tree.links.lock:
            for before in range(stream.floor, number):
                for key in stream.until.pop(before, ()):
                    self._values.pop(key, None)
            stream.floor = max(stream.floor, number)

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return len(self._values) + len(self._sayer.stream.numbers)

    def close(self) -> None:
        """Forget all."""
        self.tree.links.flush()
        self._sayer.close()


class TreeBeats:
    """One rank's part in the beats, over a tree; see `Beats`."""

    def __init__(
        self, store: TreeStore, rank: int, world_size: int, wait: Callable[[Callable[[], bool]], None]
    ) -> None:
        self._sayer = store.sayer
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._wait = wait
        self.number = 0

    def say(self, count: int, notice: dict[str, Any] | None, ranks: Sequence[int], _: bool) -> None:
        """Come to a beat; see `Channel.say`."""
        if not 0 <= count <= MAX_COUNT // self._world_size:
            most = MAX_COUNT // self._world_size
            raise JoinValueError(f"A beat of {self._world_size} ranks adds from 0 to {most} on each, not {count}.")
        index, self.number = self.number, self.number + 1
        said = b"" if notice is None else _codec.encode((self._rank, notice)) + b"\n"
        them = 0 if len(ranks) == self._world_size else sum(1 << rank for rank in ranks)
        self._sayer.come(index, count, said, them)

    def catch_up(self) -> None:
        """Read what has come, if that was put off; a rank that passes messages on, or is asked, is ready for more."""
        tree = self._store.tree
        if tree.links.is_put_off:
            tree.links.read()
            if tree.layout.children:
                tree.links.resume()

    def hear(self) -> tuple[int, bytes]:
        """Wait until all have come; return the sum, and the notices as they were sent."""
        index, beats, links = self.number - 1, self._sayer.stream.beats, self._store.tree.links
        if links.is_put_off and index not in beats:
            self.catch_up()
        if index not in beats:
            self._wait(lambda: index in beats)
        else:
            links.resume()
        return beats.pop(index)

    @property
    def position(self) -> Any:
        """See `Channel.position`."""
        return self.number, []

    def skip_to(self, position: Any) -> None:
        """Take up the beats again; see `Channel.skip_to`."""
        self.number, _ = position

    def watch(self, gather: int) -> None:
        """Have whoever comes to the next beat say so to those who are in a gather."""
        self._sayer.watch(gather, self.number)

    def unwatch(self, gather: int) -> None:
        """Take that back."""
        self._sayer.unwatch(gather, self.number)

    def somebody_came(self) -> bool:
        """Whether a rank has come to the next beat, of those that were told to say so."""
        return self._store.check([f"came/{self.number}"])


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
