"""The ranks form a tree, whose nodes pass messages on, merge barriers, and keep values sent to all ranks.

A message to all ranks goes over each connection once, even if many ranks send the same one at the same time. Otherwise
a health check by 1,024 ranks would make rank 0 pass on three million messages.

Messages from one rank arrive in the order in which it sent them, and after all messages that it had received: two paths
in a tree fork at one node, which passes messages on in order.
"""

import hashlib
import math
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch_join._control import codec as _codec
from torch_join._control._links.layout import Layout
from torch_join._control._links.links import Links
from torch_join._control.peers import BROKEN, GONE, Peers

POST, FAIL, ADD, ASK, ANSWER, UP, DOWN, CALL, PLACE = range(9)  # kinds of messages
_POST = struct.Struct("<QI")  # the last record, and the size of the name; the name and the value follow
# The barrier's number, the number of ranks that have come, and the sizes of the sum and the set of ranks that follow.
_BARRIER = struct.Struct("<QIHH")
_BEAT_BYTES = _BARRIER.size
# Barrier numbers from `SUMS` on are sums, whose result only the lowest rank gets; from `GATHERS` on, gathers.
SUMS, GATHERS = 1 << 62, 1 << 63
_KEPT, _SUMS_KEPT = 4096, 16  # the most values that a rank keeps for others, and sums that rank 0 keeps
VALUE = struct.Struct("<II")  # the rank, and the number of bytes that follow
# A question or an answer has the rank that it is for, the sending rank, the question's number, and an operand or sum.
QUESTION = struct.Struct("<IIIq")
_CALL, _PLACE = struct.Struct("<I"), struct.Struct("<II")  # a health check's number; the same and the answering rank
_SAME_CALL_SECONDS = 0.1  # ranks that notice the same problem within this time share one health check
_NEVER = 1 << 32  # the number of a call without answers
_BROKEN_SECONDS = 0.3  # if the process still exists after this time, only the connection has ended
_NOTICES_WITHIN = 1.0  # seconds for the other end to notice; it would report this process as killed if that had ended


def number_of(name: str) -> int:
    """Return a number for a name that is used once."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def values_of(data: bytes) -> dict[int, bytes]:
    """Return the values of a gather by rank; a `VALUE` precedes each value."""
    values, begin = {}, 0
    while begin < len(data):
        rank, length = VALUE.unpack_from(data, begin)
        begin += VALUE.size + length
        values[rank] = data[begin - length : begin]
    return values


def _pack(barrier: int, count: int, total: int, ranks: int, notices: bytes) -> bytes:
    added, bits = _bytes_of(total), _bytes_of(ranks)
    return _BARRIER.pack(barrier, count, len(added), len(bits)) + added + bits + notices


def _bytes_of(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8, "little") if number else b""


def _unpack(payload: bytes) -> tuple[int, int, int, int, bytes]:
    barrier, count, added, bits = _BARRIER.unpack_from(payload)
    middle, end = _BEAT_BYTES + added, _BEAT_BYTES + added + bits
    total = int.from_bytes(payload[_BEAT_BYTES:middle], "little") if added else 0
    return barrier, count, total, int.from_bytes(payload[middle:end], "little") if bits else 0, payload[end:]


@dataclass
class ChannelState:
    """The state of a channel on this rank, from the messages that have come."""

    values: dict[str, bytes] = field(default_factory=dict)  # posted values
    until: dict[int, list[str]] = field(default_factory=dict)  # by log record: values to drop when this rank passes it
    floor: int = 0  # the first record that this rank has not passed
    failure: bytes | None = None  # the first reported failure: the rank and the reason
    numbers: dict[bytes, int] = field(default_factory=dict)  # on rank 0: the sums
    kept: dict[str, bytes] = field(default_factory=dict)  # this rank's values that other ranks may ask for
    asked: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # questions for values not kept yet
    answers: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # to this rank's questions: the sum, or value
    # By barrier (or gather, or sum) and its ranks: how many ranks at or below this one have come, and their sum and
    # notices (or values).
    arrivals: dict[tuple[int, int], tuple[int, int, bytes]] = field(default_factory=dict)
    barriers: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)  # complete ones: sum and notices
    # Returns the function that answers health checks, if any does.
    place: Callable[[], Callable[[], bytes] | None] = lambda: None
    places: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by rank: the last answer, after its call
    calls: int = 0  # the number of health checks
    called_at: float = -math.inf  # when this rank received the last one

    def pass_log(self, record: int) -> None:
        """Drop the values that this rank had to keep until an earlier record."""
        for before in range(self.floor, record):
            for key in self.until.pop(before, ()):
                self.values.pop(key, None)
        self.floor = max(self.floor, record)


class Node:
    """This rank's node of a tree. It handles messages, and the links' thread keeps it alive.

    Args:
        layout: The tree.
        peers: The other ranks.
        is_gone: Returns whether the process of a rank on another host has ended, or `None` if that is unknown.

    Attributes:
        stays_until: The earliest time, by `time.monotonic`, at which this process may leave.
    """

    links: Links

    def __init__(self, layout: Layout, peers: Peers, is_gone: Callable[[int], bool | None]) -> None:
        self.layout, self.peers, self.rank = layout, peers, peers.rank
        self._is_gone = is_gone
        self._neighbours = [*layout.children, *([] if layout.parent is None else [layout.parent])]
        self.streams: dict[int, ChannelState] = {}
        self._lost: dict[int, str] = {}  # the cause, by neighbour
        self.stays_until = 0.0
        self.opened = 0  # the number of streams opened; messages for a forgotten one are only passed on

    def handle(self, peer: int, kind: int, number: int, payload: bytes) -> None:
        """Handle a message from a neighbour."""
        if kind == UP:
            self.arrive(number, *_unpack(payload))
        elif kind == DOWN:
            self._receive_result(number, payload)
        elif kind in (ADD, ASK, ANSWER):
            self.ask(number, kind, payload)
        elif kind == CALL:
            self._answer_call(peer, number, payload)
        elif kind == PLACE:
            self._note_place(peer, number, payload)
        else:
            self._spread(number, kind, payload, peer)

    def end(self, number: int) -> None:
        """Forget a stream; other ranks' messages in it are still passed on."""
        with self.links.lock:
            self.streams.pop(number, None)

    def pass_on(self, source: int | None, kind: int, number: int, payload: bytes) -> None:
        """Send a message to all neighbours except `source`."""
        self.links.send((each for each in self._neighbours if each != source), kind, number, payload)

    def _stream(self, number: int) -> ChannelState | None:
        if number >= self.opened:  # not open here yet
            return self.streams.setdefault(number, ChannelState())
        return self.streams.get(number)

    # ------------------------------------------------------------ messages to all ranks

    def post(self, number: int, until: int, key: str, value: bytes) -> None:
        """Set a key to a value, on all ranks, until they pass this record of the log."""
        name = key.encode()
        self._spread(number, POST, _POST.pack(until, len(name)) + name + value)

    def fail(self, number: int, payload: bytes) -> None:
        """Report a failure to all ranks, unless this rank knows one; different ranks may know different failures."""
        if (stream := self._stream(number)) is not None and stream.failure is None:
            self._spread(number, FAIL, payload)

    def _spread(self, number: int, kind: int, payload: bytes, source: int | None = None) -> None:
        """Note a message to all ranks, and pass it on."""
        stream = self._stream(number)
        if stream is not None and kind == FAIL:
            stream.failure = stream.failure or payload
        elif stream is not None:
            until, length = _POST.unpack_from(payload)
            end = _POST.size + length
            if until >= stream.floor:  # else this rank has passed that record
                key = payload[_POST.size : end].decode()
                stream.values[key] = payload[end:]
                stream.until.setdefault(until, []).append(key)
        self.pass_on(source, kind, number, payload)

    # ------------------------------------------------------------ messages that many ranks send to all, once

    def call_roll(self, number: int) -> tuple[int, float]:
        """Make all ranks answer, unless they were called just now; return the call's number in `ChannelState.places`.

        Also return until when to wait at least, since messages that ranks sent before may still be on their way.
        """
        if (stream := self._stream(number)) is None:
            return _NEVER, 0.0
        if time.monotonic() <= (until := stream.called_at + _SAME_CALL_SECONDS):
            return stream.calls, until
        self._answer_call(None, number, _CALL.pack(stream.calls + 1))
        return stream.calls, 0.0

    def _answer_call(self, source: int | None, number: int, payload: bytes) -> None:
        (call,) = _CALL.unpack(payload)
        if (stream := self._stream(number)) is not None:
            if call <= stream.calls:  # another rank has called at the same time
                return
            stream.calls, stream.called_at = call, time.monotonic()
        self.pass_on(source, CALL, number, payload)
        if stream is not None:
            answer = place() if (place := stream.place()) is not None else b""
            self._note_place(None, number, _PLACE.pack(call, self.rank) + answer)

    def _note_place(self, source: int | None, number: int, payload: bytes) -> None:
        call, rank = _PLACE.unpack_from(payload)
        if (stream := self._stream(number)) is not None:
            stream.places[rank] = call, payload[_PLACE.size :]
        self.pass_on(source, PLACE, number, payload)

    # ------------------------------------------------------------ messages to one rank

    def ask(self, number: int, kind: int, payload: bytes) -> None:
        """Pass a question or an answer on; or note the answer; or add a number and send the sum, or a kept value."""
        rank, asker, asked, value = QUESTION.unpack_from(payload)
        if rank != self.rank:
            self.links.send([self.layout.next_to(rank)], kind, number, payload)
            return
        rest = payload[QUESTION.size :]
        if (stream := self._stream(number)) is None:
            return
        if kind == ANSWER:
            stream.answers[asked] = value, rest
        elif kind == ADD:
            stream.numbers[rest] = value = stream.numbers.get(rest, 0) + value
            if len(stream.numbers) > _SUMS_KEPT:
                del stream.numbers[next(iter(stream.numbers))]
            self._answer(number, asker, asked, value)
        elif (key := rest.decode()) in stream.kept:
            self._answer(number, asker, asked, 0, stream.kept[key])
        else:
            stream.asked.setdefault(key, []).append((asker, asked))

    def keep(self, number: int, key: str, value: bytes) -> None:
        """Keep a value, and answer the ranks that wait for it."""
        if (stream := self._stream(number)) is not None:
            stream.kept[key] = value
            if len(stream.kept) > _KEPT:
                del stream.kept[next(iter(stream.kept))]
            for asker, asked in stream.asked.pop(key, ()):
                self._answer(number, asker, asked, 0, value)

    def _answer(self, number: int, asker: int, asked: int, total: int, value: bytes = b"") -> None:
        self.ask(number, ANSWER, QUESTION.pack(asker, self.rank, asked, total) + value)

    # ------------------------------------------------------------ barriers

    def arrive(self, number: int, barrier: int, count: int, total: int, ranks: int, notices: bytes) -> None:
        """Add the ranks that have come; pass the barrier on when all participating ranks below this one have come."""
        if (stream := self._stream(number)) is None:
            return
        if (before := stream.arrivals.pop((barrier, ranks), None)) is not None:
            count, total, notices = before[0] + count, before[1] + total, before[2] + notices
        below = self.layout.subtree & ranks if ranks else self.layout.subtree
        if count < below.bit_count():
            stream.arrivals[barrier, ranks] = count, total, notices
            return
        receivers = ranks & -ranks if self.layout.parent is None and SUMS <= barrier < GATHERS else ranks
        payload = _pack(barrier, count, total, receivers, notices)
        if self.layout.parent is None:
            self._receive_result(number, payload)
        else:
            self.links.send([self.layout.parent], UP, number, payload)

    def _receive_result(self, number: int, payload: bytes) -> None:
        barrier, _, total, ranks, notices = _unpack(payload)
        if below := self.layout.below:
            receivers = [child for child in below if ranks & below[child]] if ranks else below
            self.links.send(receivers, DOWN, number, payload)
        if (not ranks or ranks >> self.rank & 1) and (stream := self._stream(number)) is not None:
            stream.barriers[barrier, ranks] = total, notices

    # ------------------------------------------------------------ connections that end

    def explain_ended(self, ended: Mapping[int, float]) -> None:
        """Find out why connections have ended, and report the cause: the end of a connection alone proves nothing."""
        for peer, seconds in ended.items():
            if peer in self._lost:
                continue
            process = self.peers.processes.get(peer)
            gone = self._is_gone(peer) if process is None else not process.is_there
            if gone is None:
                text = "its process, its host or the network to it is gone. Read its log."
            elif gone:
                text = GONE
            elif seconds < _BROKEN_SECONDS:
                continue
            else:
                self.stays_until = time.monotonic() + _NOTICES_WITHIN
                global_ranks = self.peers.global_ranks
                names = sorted((global_ranks[self.rank], global_ranks[peer]))
                # Forked children, such as a DataLoader's workers, keep a process's connections open for some seconds.
                maybe = f"either the network failed, or rank {global_ranks[peer]}'s process is gone. Read its log."
                text = f"{BROKEN} {names[0]} and {names[1]} broke: {'both processes are there.' if process else maybe}"
            with self.links.lock:
                self._lost[peer] = text
                self.report_lost()

    def report_lost(self) -> None:
        """Report in all streams without a known failure that a neighbour has failed."""
        for peer, text in self._lost.items():
            for number, stream in [*self.streams.items()]:
                if stream.failure is None:
                    stream.failure = _codec.encode((peer, text))
                    self.pass_on(peer, FAIL, number, stream.failure)
