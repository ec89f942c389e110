"""Finds ranks that wait for each other in a circle, where none can continue, and reports an error that describes it.

Each rank answers a roll call with its place in the code, from which follows which ranks it waits for. In a channel's
meeting, it waits for ranks whose own count shows that they have not come, or that have not opened that channel. In a
collective or a backward, let k be the number of the group's last unfinished collective: it waits for members that have
issued fewer than k, or another one as their k-th. It waits for all of these, so a circle is a deadlock. A circle that
lasts for seconds is reported. A rank in user code, a loader or a compiler is not known to wait for any rank.

A rank that leaves with an error reports the collectives that it has issued: a rank in another one waits forever.
"""

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch_join._base.errors import name_ranks
from torch_join._base.synced_steps import explain_mixed
from torch_join._compat import whereabouts as _compat
from torch_join._compat.operators import groups_of_this_rank
from torch_join._control import codec as _codec
from torch_join._control._links.tree import Tree
from torch_join._control.peers import DEADLOCK, MOST_TEXT
from torch_join._control.reports import Status

LOOKS_EVERY = 3.0  # seconds between checks; a rank found in the same place three times starts a roll call
_AGAIN = 2.0  # seconds between two answers, which must be equal
_ANSWERS_WITHIN = 0.5
_MOST_PAUSE = 10.0
_TELLS_AFTER, _TELLS_EVERY = 30.0, 60.0
_MOST_PORTS = 512
LEFT_AT = "left/"  # the name under which a rank posts its last place
_LOG = logging.getLogger("torch_join")
_Connection = tuple[str, int, str, int]  # the address and port of this end, and of the other end
_MEETINGS = {
    "barrier": "a step's meeting, where ranks report whether they have a batch,",
    "gather": "a meeting of all ranks (the start or end of a loop or of the `with`, or a call that needs all ranks)",
    "some": "a meeting of the ranks that have batches left",
    "record": "the tail of a loop, in which it has finished and follows the others,",
    "ask": "a request to the other ranks, in its last step: whether they make the same call or stop",
}


_codec.closed("place")(_compat.Place)
_codec.closed("issued")(_compat.Issued)


@_codec.closed("where")
class Where(NamedTuple):
    """A rank's place in the code.

    Attributes:
        place: The place of its thread; of the kind "meeting" if it waits in a channel's meeting.
        awaits: The meeting it waits in: the channel's number, the kind, its number, the awaited ranks as bits (0: all).
        passed: By the number of each channel that is open in this thread, `Channel.passed`.
        opened: The number of channels that the rank has opened.
        numbers: By group, the most collectives that the rank can have issued.
        issued: The collectives that the rank has issued; empty unless it is stuck.
        status: Its `Status`, if it is in a loop.
        ports: Its connections, if they may have to be closed.
    """

    place: _compat.Place
    awaits: tuple[int, str, int, int] | None
    passed: dict[int, list[int]]
    opened: int
    numbers: dict[str, int]
    issued: _compat.Issued
    status: Status | None
    ports: list[tuple[str, int, str, int]]

    @property
    def state(self) -> tuple[Any, ...]:
        """The values that stay equal while the rank is stuck; a backward that still computes changes `place`."""
        return self.place, self.awaits, self.passed, self.opened, self.numbers


def waits_for(rank: int, places: Mapping[int, Where], names: Sequence[int]) -> set[int]:
    """Return the ranks for which a rank waits.

    Args:
        rank: The rank.
        places: The answers, by rank.
        names: By rank, its number in the whole job.
    """
    own = places[rank]
    if own.awaits is not None:
        channel, what, number, bits = own.awaits
        awaited = (each for each in places if each != rank and (not bits or bits >> each & 1))
        return {each for each in awaited if not _has_arrived(places[each], channel, what, number)}
    pending = own.issued.pending
    if own.place.kind == "elsewhere" or pending is None:
        return set()
    group, _, _ = pending[0].partition(":")
    if own.place.group not in ("", group):
        return set()
    members = {names.index(name) for name in groups_of_this_rank().get(group, ()) if name in names}
    return {each for each in members & places.keys() if each != rank and _is_behind(places[each], own, *pending)}


def _has_arrived(other: Where, channel: int, what: str, number: int) -> bool:
    if channel not in other.passed:  # that rank has left, or another of its threads may come
        return channel < other.opened
    barrier, gathers, records, *named = other.passed[channel]
    come = {"barrier": barrier >= number, "gather": gathers > number, "record": records > number}
    return come.get(what, what == "some" and number in named)


def _is_behind(other: Where, own: Where, key: str, number: int, name: str) -> bool:
    if names := other.issued.last.get(key):
        return max(names) < number or names.get(number, name) != name
    # That rank has issued none, or its recorder has dropped them. With two backends, `numbers` counts one backend's.
    group, _, _ = key.partition(":")
    return bool(other.issued.last) and other.numbers.get(group, number) < number <= own.numbers.get(group, 0)


def deadlocked(places: Mapping[int, Where], names: Sequence[int]) -> dict[int, set[int]]:
    """Return the ranks in a circle of waits, and ranks that wait for these; each with the ranks that it waits for."""
    edges = {rank: found for rank in places if (found := waits_for(rank, places, names))}
    while free := {rank for rank, awaited in edges.items() if not awaited & edges.keys()}:
        edges = {rank: awaited for rank, awaited in edges.items() if rank not in free}
    return {rank: awaited & edges.keys() for rank, awaited in edges.items()}


# ---------------------------------------------------------------- texts


_FORWARD = (
    "a forward of a DDP model with buffers that only some ranks run, such as at their own last batch (call the inner"
    " model, `ddp.module(x)`, or move it after the loop, on all ranks); a batch that only some ranks skip with"
    " `continue` (filter inside: join.batches(good(loader)))"
)
_BACKWARD = (
    "a `break` or `return` at different steps (for `break`: Join(..., may_break=True)); a batch that only some ranks"
    " skip with `continue` (filter inside: join.batches(good(loader)), or give it a zero loss); an error that one rank"
    " caught"
)
_COLLECTIVE = (
    "a collective that only some ranks call, such as at a rank's own last batch, only on rank 0, or based on a rank's"
    " own counter (move it after the loop, or to the same steps on all ranks)"
)
_ORDER = (
    "ranks that skip collectives or call them in different orders, such as a rank that stops alone because of a time"
    " limit, a signal or a callback (have all ranks agree first)"
)
_MEETINGS_APART = (
    "a `return`, or a `break` out of the epochs, at a step that each rank counts itself (count epochs, or pass the"
    " counter to Join); a prefetcher around the loop (put it inside: join.batches(prefetcher(loader))); a plain"
    " `for`, which ranks leave at different steps, followed by a call that needs all ranks, such as a metric's"
    " compute() (use `for batch in join.batches(loader)`, or make the call after the `with`)"
)


def describe(stuck: Mapping[int, set[int]], places: Mapping[int, Where], names: Sequence[int]) -> str:
    """Return the error text: where each rank is, and the usual causes."""
    found = {rank: places[rank] for rank in stuck}
    kinds = {where.place.kind for where in found.values()}
    buffers = any(where.place.what.startswith("DDP's") for where in found.values())
    channels = {max(where.passed, default=0) for where in found.values()}  # several: the ranks are in different loops
    is_asking = any(where.awaits is not None and where.awaits[1] == "ask" for where in found.values())
    causes = {
        _FORWARD: buffers,
        _ORDER: is_asking or "meeting" not in kinds,
        _BACKWARD: "backward" in kinds,
        _COLLECTIVE: "collective" in kinds and not buffers,
        _MEETINGS_APART: kinds == {"meeting"} or len(channels) > 1,
    }
    synced = {rank: where.status.synced for rank, where in found.items() if len(channels) == 1 and where.status}
    usual = "; ".join(cause for cause, may_be in causes.items() if may_be)
    return f"{DEADLOCK}{_describe_places(found, stuck, names)}.{explain_mixed(synced, names)} Usual causes: {usual}."


def _describe_places(places: Mapping[int, Where], waits: Mapping[int, set[int]], names: Sequence[int]) -> str:
    """Return a text with the ranks' places, and the ranks that they wait for."""
    alike: dict[tuple[str, frozenset[int]], list[int]] = {}
    for rank, where in sorted(places.items()):
        place, status, pending = where.place, where.status, where.issued.pending
        what = f"in {place.what} " if place.what else ""
        step = "" if status is None or status.step is None else f", in step {status.step}"
        if place.kind == "backward" and pending is not None:
            what += f"({pending[-1]}) "
        key = f"{what}at {place.at or 'an unknown place'}{step}", frozenset(waits.get(rank, ()))
        alike.setdefault(key, []).append(rank)
    texts = []
    for (what, others), ranks in alike.items():
        verbs = ("is", "waits") if len(ranks) == 1 else ("are", "wait")
        awaited = f", and {verbs[1]} for {name_ranks(names[rank] for rank in others)}" if others else ""
        texts.append(f"{name_ranks(names[rank] for rank in ranks)} {verbs[0]} {what}{awaited}")
    return "; ".join(texts)


# ---------------------------------------------------------------- the watch


class Watch:
    """A thread that checks every few seconds whether this rank is stuck, and whether it waits in a circle.

    Args:
        tree: This rank's node, which the watch does not keep alive. All ranks create watches before they open channels.
    """

    def __init__(self, tree: Tree) -> None:
        self._node, self._links, self._channels = tree.node, tree.links, tree.channels
        self._number, self._stream = tree.open()
        self._stream.place = weakref.WeakMethod(self._place)
        self._thread = threading.get_ident(), threading.get_native_id()
        self._seen = 0  # the last roll call whose answers this watch has judged
        self._reset(())
        self._ended = threading.Event()
        weakref.finalize(tree, self._ended.set)
        threading.Thread(target=self._run, name="torch_join watch", daemon=True).start()

    def _reset(self, state: tuple[Any, ...]) -> None:
        self._state = state
        self._issued = _compat.Issued({}, None)
        self._asks_from = 0.0  # the time from which its answers include what it has issued
        self._tells_at, self._reported, self._has_logged = 0.0, "", False
        self._pause = LOOKS_EVERY
        self._before: tuple[float, dict[int, Any]] = 0.0, {}  # when ranks were found stuck, and where

    def _run(self) -> None:
        pause = LOOKS_EVERY
        while not self._ended.wait(pause):
            try:
                pause = self._check()
            except Exception:  # for example from a group that another thread destroys
                pause = LOOKS_EVERY
                _LOG.debug("The deadlock check failed.", exc_info=True)

    # ------------------------------------------------------------ a rank's answer

    def _place(self) -> bytes:
        with suppress(Exception):  # another thread is changing a status
            return _codec.encode(self._where())
        return b""

    def _where(self) -> Where:
        channels = [*self._channels.items()]
        threads = [channel.thread for _, channel in channels]
        waiting = [channel.thread for _, channel in channels if channel.awaits is not None]
        self._thread = [self._thread, *threads, *waiting][-1]
        place, numbers = _compat.place_of(*self._thread), _compat.sequence_numbers()
        passed, awaits, status = {}, None, None
        for number, channel in channels:
            if channel.thread != self._thread:
                continue
            waits, status, passed[number] = channel.awaits, channel.status() or status, channel.passed
            if waits is not None and not waits[-1]():
                name, which, bits, _ = waits
                if name == "record":  # the leader writes the record; without a status the leader is unknown
                    bits = 1 << (self._node.rank if status is None else status.leader)
                awaits = number, name, which, bits
                what = _MEETINGS.get(name, "a wait for another rank's message")
                place = place._replace(kind="meeting", what=what, computed=0)
        issued = self._issued if self._state[-1:] == (numbers,) else _compat.Issued({}, None)
        has_failed = self._stream.failure is not None
        ports = self._ports() if has_failed else []
        return Where(place, awaits, passed, self._node.opened, numbers, issued, status, ports)

    def _ports(self) -> list[_Connection]:
        return [connection for _, connection in _connections(self._links.files)][:_MOST_PORTS]

    def last_place(self) -> Where:
        """Return this rank's place when it leaves with an error: what it has issued, and its connections."""
        place, issued = _compat.Place("elsewhere", "", "", "", 0), _compat.issued(0)
        return Where(place, None, {}, self._node.opened, _compat.sequence_numbers(), issued, None, self._ports())

    # ------------------------------------------------------------ acting on the answers

    def _check(self) -> float:
        """Check once; return the seconds until the next check."""
        own, now = self._where(), time.monotonic()
        if own.place.kind == "elsewhere" or own.state != self._state:
            self._reset(own.state)
            return LOOKS_EVERY
        if not self._asks_from:
            self._asks_from = now
            self._issued = _compat.issued(self._thread[0])
            return LOOKS_EVERY
        pause = _AGAIN / 2  # so that this watch judges one call's answers before the next call
        call, called_at = self._stream.calls, self._stream.called_at
        if call > self._seen and now >= called_at + _ANSWERS_WITHIN and called_at > self._asks_from:
            self._seen = call
            self._judge(own, now)
        elif (own.passed or self._has_logged) and now >= max(called_at, self._asks_from) + self._pause:
            with self._links.lock:
                self._node.call_roll(self._number)
            pause = _ANSWERS_WITHIN
        if own.place.kind != "meeting":
            self._end_futile_wait(own)
        return pause

    def _end_futile_wait(self, own: Where) -> None:
        """End a wait that a reported failure makes futile: a wait in a circle, or for a rank that has raised."""
        me, names = self._node.rank, self._node.peers.global_ranks
        streams = [stream for number, stream in [*self._node.streams.items()] if number in own.passed]
        failures = [_codec.decode(stream.failure, tuple[int, str]) for stream in streams if stream.failure is not None]
        circle = self._reported or next((text for _, text in failures if text.startswith(DEADLOCK)), "")
        if circle:
            self._end_wait(circle, self._places())
        elif failures:
            values = {name: value for stream in streams for name, value in [*stream.values.items()]}
            found = {rank: values[name] for rank in range(len(names)) if (name := f"{LEFT_AT}{rank}") in values}
            left = {rank: _codec.decode(value, Where) for rank, value in found.items() if rank != me}
            self._issued = _compat.issued(self._thread[0])
            if waits_for(me, {**left, me: own._replace(issued=self._issued)}, names):
                self._end_wait(f"{name_ranks([names[failures[0][0]]]).capitalize()} failed: {failures[0][1]}", left)

    def _judge(self, own: Where, now: float) -> None:
        """Judge the answers, and report a deadlock to all ranks."""
        me, names = self._node.rank, self._node.peers.global_ranks
        places = self._places()
        stuck = deadlocked(places, names)
        if me in stuck:
            states = {rank: places[rank].state for rank in stuck}
            # A rank outside a meeting reports first: it must log the error before other ranks end its wait.
            is_first = own.place.kind != "meeting" or all(places[rank].place.kind == "meeting" for rank in stuck)
            then, before = self._before
            self._pause = _AGAIN
            if states != before:
                self._before = now, states
            elif now >= then + (_AGAIN if is_first else 2 * _AGAIN):
                self._reported = describe(stuck, places, names)[:MOST_TEXT]
                failure = _codec.encode((me, self._reported))
                with self._links.lock:
                    for number in sorted({self._number, *(number for rank in stuck for number in places[rank].passed)}):
                        self._node.fail(number, failure)
            return
        self._before = 0.0, {}
        # Pause longer if all ranks have answered: a rank that gets stuck later starts its own roll calls.
        self._pause = _MOST_PAUSE if len(places) == len(names) else LOOKS_EVERY
        waiting = [rank for rank, where in places.items() if where.place.kind != "elsewhere"]
        if now - self._asks_from > _TELLS_AFTER and me == min(waiting, default=-1) and now > self._tells_at:
            self._tells_at = now + _TELLS_EVERY
            text = _describe_places(places, {rank: waits_for(rank, places, names) for rank in places}, names)
            seconds = f"{now - self._asks_from:.0f} s"
            _LOG.warning("Some ranks have waited for others for %s (not necessarily an error): %s.", seconds, text)

    def _end_wait(self, text: str, places: Mapping[int, Where]) -> None:
        """Shut down the connections between this process and other ranks' processes, which the collective uses."""
        if not self._has_logged:
            self._has_logged = True
            with suppress(Exception):  # raised by a log handler
                _LOG.error("%s", text)  # gloo's error does not have this text
        others = {(*port[2:], *port[:2]) for rank in places if rank != self._node.rank for port in places[rank].ports}
        for copy, connection in _connections(self._links.files):
            if connection in others:
                with suppress(OSError):
                    copy.shutdown(socket.SHUT_RDWR)

    def _places(self) -> dict[int, Where]:
        """Return, by rank, the answers to the last roll call so far."""
        last = self._stream.calls
        found = {rank: data for rank, (call, data) in [*self._stream.places.items()] if call == last and data}
        return {rank: _codec.decode(data, Where) for rank, data in found.items()}


def _connections(own: Container[int]) -> Iterator[tuple[socket.socket, _Connection]]:
    """Yield copies of this process's connections, except those of the channel and the job's store; Linux only."""
    store = _compat.store_port()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # another thread has closed it; or it is listening
                if int(name) in own or not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        addresses = (*copy.getsockname()[:2], *copy.getpeername()[:2])
                        if store not in addresses:
                            yield copy, addresses
