"""What a channel says over a tree of ranks, and waits for."""

import hashlib
import os
import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from socket import socket

from torch_join._base.errors import JoinError
from torch_join._control._links import node as _node
from torch_join._control._links.links import Links
from torch_join._control._links.node import Node
from torch_join._control._links.stream import Stream

_READ_SECONDS = 0.05  # for which a wait reads at a time
# A core that is asleep takes 0.1 to 0.4 ms to hear of a message, and keeps the sender as long, which adds up where many
# are waited for in a step. More than these milliseconds gain nothing: what is awake slows down what shares a core. Any
# other wait is of a meeting, to which ranks come together as a rule: a beat of two ranks takes 23 us so, and 74 asleep,
# and less processor time.
_AWAKE_SECONDS, _BRIEFLY = 0.002, 0.0001
_LOOKS_EVERY = 16  # reads, where something comes within each


def _number_of(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


class Tree:
    """This rank's node.

    Args:
        connections: To the neighbours.
        node: What handles their messages.
    """

    def __init__(self, connections: Mapping[int, socket], node: Node) -> None:
        self.processes = node.processes
        self.layout = node.layout
        self._has_cores = len(node.processes) < (os.cpu_count() or 1)
        self._node = node
        node.links = self.links = Links(connections, node.handle, node.look_after)
        self.close = weakref.finalize(self, self.links.close)

    def wait(
        self,
        ready: Callable[[], bool],
        look: Callable[[], None],
        keys: Container[str] | None = None,
        is_awake: bool = False,
    ) -> None:
        """Read until something is so; call `look` again and again, which may take its time.

        Args:
            ready: Whether it is so.
            look: Raises if it is not to be waited for any more.
            keys: `look` is called where a failure is among these, or when nothing has come for 50 ms or much has;
                if there are none, at once and after each read.
            is_awake: Whether the core is kept awake for milliseconds and not only briefly, if every rank of this host
                has one.
        """
        links, is_reading, seen, reads = self.links, False, -1, 1
        awake_until = time.monotonic() + (_AWAKE_SECONDS if is_awake else _BRIEFLY) if self._has_cores else 0.0
        try:
            while True:
                is_quiet, seen = links.messages[1] == seen, links.messages[1]
                if ready():
                    return
                if keys is None or is_quiet or "failure" in keys or reads % _LOOKS_EVERY == 0:
                    if is_reading:
                        is_reading = links.end_reading()
                    try:
                        look()
                    except JoinError:
                        if ready():  # it came before the failure that `look` has read of
                            return
                        raise
                if not is_reading:
                    is_reading = links.begin_reading()
                if links.messages[1] == seen:  # none that another thread has read since
                    links.read(_READ_SECONDS, awake_until)
                reads += 1
        finally:
            if is_reading:
                links.end_reading()
            else:
                links.resume()

    def part(self) -> None:
        """Wait until all is sent, and until the other end of a connection that broke has noticed, for seconds at most.

        It would take a rank that has left by then for one that was killed.
        """
        self.links.flush()
        time.sleep(max(0.0, self._node.stays_until - time.monotonic()))

    def open(self) -> "Sayer":
        """Begin the next stream, as all ranks do; its messages may have come before."""
        with self.links.lock:
            number, self._node.opened = self._node.opened, self._node.opened + 1
            self._node.streams.setdefault(number, Stream())
            self._node.tell_who_is_lost()
        return Sayer(self, self._node, number)


class Sayer:
    """What a channel says over its stream; see `Stream` for what it reads."""

    def __init__(self, tree: Tree, node: Node, number: int) -> None:
        self.tree = tree
        self.links = tree.links
        self._node = node
        self.number = number
        self.stream = node.streams[number]
        self._asked = 0
        self.close = weakref.finalize(self, node.end, self.number)

    def to_all(self, kind: int, key: str, value: bytes) -> None:
        """Do something with a key, here and on all other ranks."""
        data = key.encode()
        payload = len(data).to_bytes(2, "little") + data + value
        with self.links.lock:
            self._node.keep(self.number, kind, payload)
            self._node.pass_on(None, kind, self.number, payload)

    def set(self, key: str, value: bytes) -> None:
        """Give a key a value."""
        self.to_all(_node.SET, key, value)

    def swap(self, key: str, expected: bytes, value: bytes) -> None:
        """Give a key another value where it has the one that is expected, `b""` for none: ranks may differ then."""
        self.to_all(_node.SWAP, key, len(expected).to_bytes(4, "little") + expected + value)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys."""
        self.to_all(_node.DELETE, "", "\n".join(keys).encode())

    def add(self, key: str, number: int) -> int:
        """Add to a number of rank 0's; return the key of `Stream.answers` where the sum will be."""
        return self._ask(_node.ADD, 0, key, number)

    def ask(self, rank: int, key: str, waits: bool) -> int:
        """Ask a rank for what it keeps; return the key of `Stream.answers` where that will be, `b""` for nothing."""
        return self._ask(_node.ASK, rank, key, waits)

    def _ask(self, kind: int, rank: int, key: str, number: int) -> int:
        with self.links.lock:
            self._asked = asked = self._asked + 1
            payload = _node.QUESTION.pack(rank, self._node.rank, asked, number) + key.encode()
            self._node.ask(self.number, kind, payload)
        return asked

    def keep(self, key: str, value: bytes) -> None:
        """Keep a value on this rank, for others to ask for."""
        with self.links.lock:
            self._node.keep_here(self.number, key, value)

    def come(self, number: int, total: int, notices: bytes, ranks: int) -> None:
        """Come to a beat, of some ranks if `ranks` is not 0."""
        with self.links.lock:
            self._node.come(self.number, number)
            self._node.arrive(self.number, number, 1, total, ranks, notices)

    def watch(self, gather: int, beat: int) -> None:
        """Have whoever comes to a beat say so to the ranks of a gather; once that ends, call `unwatch`."""
        with self.links.lock:
            self._node.watch(self.number, gather, beat)

    def unwatch(self, gather: int, beat: int) -> None:
        """Take that back."""
        with self.links.lock:
            self._node.unwatch(self.number, gather, beat)

    def call_roll(self) -> tuple[int, float]:
        """Call the roll; see `Node.call_roll`."""
        with self.links.lock:
            return self._node.call_roll(self.number)

    def contribute(self, key: str, number: int, ranks: int) -> None:
        """Add to a sum of which the lowest of these ranks, the bits of a number, hears."""
        with self.links.lock:
            self._node.arrive(self.number, _node.SUMS | _number_of(key), 1, number, ranks, b"")

    def contributed(self, key: str) -> int | None:
        """Return that sum, once, if it has come."""
        total, _ = self.stream.beats.pop(_node.SUMS | _number_of(key), (None, b""))
        return total

    def give(self, key: str, value: bytes, ranks: int) -> Callable[[], dict[int, bytes] | None]:
        """Give a value to all, or to some ranks; return what returns every rank's, in order, once they are here."""
        number, beats = _node.GATHERS | _number_of(key), self.stream.beats
        with self.links.lock:
            self._node.arrive(self.number, number, 1, 0, ranks, _node.VALUE.pack(self._node.rank, len(value)) + value)

        def found() -> dict[int, bytes] | None:
            if number not in beats:
                return None
            _, data = beats.pop(number)
            values, begin = {}, 0
            while begin < len(data):
                rank, length = _node.VALUE.unpack_from(data, begin)
                begin += _node.VALUE.size + length
                values[rank] = data[begin - length : begin]
            return dict(sorted(values.items()))

        return found
