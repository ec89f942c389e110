"""Ranks that wait for each other in a circle: a proof that none can go on, and what to say of it.

Each rank answers a roll call with where its code is, and whom it cannot go on without. In a meeting of this channel it
waits for those whose own count says that they have not come. In a collective, or a backward, of which the last one of a
group is not done and has the number k, it waits for each member that has issued fewer than k, or another one as its
k-th. Each is a wait for all of these, so a circle is a deadlock. The user's code, a loader, a compiler wait for nobody,
as far as anybody knows: nothing is said of a rank that is there. A circle that stays for seconds is told.
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
from torch_join._control.codec import closed

LOOKS_EVERY = 3.0  # seconds: a rank that is in one place at three looks asks where the others are
_AGAIN = 2.0  # seconds between two answers that must be the same
_ANSWERS_WITHIN = 0.5
_MOST_PAUSE = 10.0
_TELLS_AFTER, _TELLS_EVERY = 30.0, 60.0
_MOST_PORTS = 512
NOTHING = _compat.Issued({}, None)
DEADLOCK = "These ranks wait for each other for ever: "
_LOG = logging.getLogger("torch_join")
_Connection = tuple[str, int, str, int]  # this end, and the other one


@closed("where")
class Where(NamedTuple):
    """Where a rank is.

    Attributes:
        kind: "meeting", "collective" (one that it waits for), "backward" or "elsewhere".
        what: In words.
        at: File and line of the user's code.
        step: The step of the loop, if it is in one.
        awaits: What it waits for on the channel, the number of that, and of whom, by bit; 0 is all.
        passed: The last barrier that it has come to, how many gathers, how many records of the log, and the last
            gathers of some ranks.
        group: The name of the collective's group.
        numbers: By group, how many collectives it has issued at most.
        issued: See `Issued.last`; nothing as long as it is not stuck.
        pending: See `Issued.pending`.
        ports: Its connections, once they may have to be ended.
        synced: See `Status`.
        computed: For how long its code has computed, unless it is in a meeting.
    """

    kind: str
    what: str
    at: str
    step: int | None
    awaits: tuple[str, int, int] | None
    passed: list[int]
    group: str
    numbers: dict[str, int]
    issued: dict[str, tuple[int, dict[str, str]]]
    pending: tuple[str, int, str] | None
    ports: list[tuple[str, int, str, int]] | None
    synced: tuple[list[tuple[int, bool]], int]
    computed: int = 0

    @property
    def state(self) -> tuple[Any, ...]:
        """What is the same as long as it is stuck: a backward that computes is not, whatever else is not done yet."""
        return self.kind, self.what, self.at, self.awaits, self.passed, self.computed, self.numbers


def waits_for(rank: int, places: Mapping[int, Where], names: Sequence[int]) -> set[int]:
    """Return whom a rank cannot go on without.

    Args:
        rank: The rank.
        places: By rank, of those that have answered.
        names: By rank, its number in the whole job.
    """
    mine = places[rank]
    if mine.kind == "meeting" and mine.awaits is not None:
        what, number, them = mine.awaits
        awaited = (each for each in places if each != rank and (not them or them >> each & 1))
        return {each for each in awaited if not _has_come(places[each], what, number)}
    if mine.kind not in ("collective", "backward") or mine.pending is None:
        return set()
    group, _, _ = mine.pending[0].partition(":")
    if mine.group not in ("", group):
        return set()
    members = {names.index(name) for name in groups_of_this_rank().get(group, ()) if name in names}
    return {each for each in members & places.keys() if each != rank and _is_behind(places[each], mine, *mine.pending)}


def _has_come(theirs: Where, what: str, number: int) -> bool:
    barrier, gathers, records, *named = theirs.passed
    if what == "barrier":
        return barrier >= number
    if what == "gather":
        return gathers > number
    return records > number if what == "record" else what == "some" and number in named


def _is_behind(theirs: Where, mine: Where, whose: str, number: int, name: str) -> bool:
    if whose in theirs.issued:
        issued, names = theirs.issued[whose]
        return issued < number or names.get(str(number), name) != name
    # It has issued none, or the recorder has forgotten them. A group of two backends has the number of one of them.
    group, _, _ = whose.partition(":")
    return bool(theirs.issued) and theirs.numbers.get(group, number) < number <= mine.numbers.get(group, 0)


def deadlocked(places: Mapping[int, Where], names: Sequence[int]) -> dict[int, set[int]]:
    """Return the ranks that wait in a circle, and those that wait for one of these; and each one's such ranks."""
    edges = {rank: found for rank in places if (found := waits_for(rank, places, names))}
    while ends := {rank for rank, whom in edges.items() if not whom & edges.keys()}:
        edges = {rank: whom for rank, whom in edges.items() if rank not in ends}
    return {rank: whom & edges.keys() for rank, whom in edges.items()}


# ---------------------------------------------------------------- what is said


_FORWARD = (
    "a forward of a DDP model with buffers that only some ranks run, at their own last batch or every so many steps of"
    " their own (call the inner model, `ddp.module(x)`, or do it after the loop, on all ranks); a batch that only some"
    " ranks skip, by `continue` (leave it out within: join.batches(good(loader)))"
)
_BACKWARD = (
    "a `break` or `return` at different steps (Join(..., may_break=True) for a `break`); a batch that only some ranks"
    " skip, by `continue`, for a loss of NaN or an empty batch (leave it out within: join.batches(good(loader)); or"
    " give it a loss times zero); an error that was caught on one rank"
)
_COLLECTIVE = (
    "a collective that only some ranks come to: at a rank's own last batch, on rank 0 alone, by a counter of a rank's"
    " own (do it after the loop, or at steps that are the same on all ranks)"
)
_ORDER = (
    "ranks that run their collectives in another order, or not all of them: one that stops by itself (a time limit, a"
    " signal, a callback), where all have to agree on it first"
)
_MEETINGS = (
    "a `return`, or a `break` out of the epochs, at a step that each rank counts for itself, and that is lower where a"
    " rank has run out of batches (count epochs, or steps in an object with a state_dict that is given to Join); a loop"
    " that reads ahead of its step (put that inside: join.batches(prefetcher(loader))); a plain `for`, which ranks"
    " leave at different steps, before something that all do together, as a metric's compute() (use `for batch in"
    " join.batches(loader)`, which all leave together, or do it after the `with`)"
)


def describe(stuck: Mapping[int, set[int]], places: Mapping[int, Where], names: Sequence[int]) -> str:
    """Return the text of the error: which rank is where, and the usual causes."""
    kinds = {places[rank].kind for rank in stuck}
    buffers = any(places[rank].what.startswith("DDP's") for rank in stuck)
    causes = [_FORWARD] if buffers else []
    if "meeting" not in kinds or any((places[rank].awaits or ("",))[0] == "ask" for rank in stuck):
        causes.append(_ORDER)
    causes += [_BACKWARD] if "backward" in kinds else []
    causes += [_COLLECTIVE] if "collective" in kinds and not buffers else []
    causes += [_MEETINGS] if kinds == {"meeting"} else []
    alike: dict[tuple[str, frozenset[int]], list[int]] = {}
    for rank in sorted(stuck):
        alike.setdefault((_say(places[rank]), frozenset(stuck[rank])), []).append(rank)
    said = [
        f"{name_ranks(names[rank] for rank in ranks)} {'is' if len(ranks) == 1 else 'are'} in {what} and"
        f" {'waits' if len(ranks) == 1 else 'wait'} for {name_ranks(names[rank] for rank in whom)}"
        for (what, whom), ranks in alike.items()
    ]
    mixed = explain_mixed({rank: places[rank].synced for rank in stuck}, names)
    return f"{DEADLOCK}{'; '.join(said)}.{mixed} Usual causes: {'; '.join(causes)}."


def _say(where: Where) -> str:
    what = where.what
    if where.kind == "backward" and where.pending is not None:
        what += f" ({where.pending[-1]})"
    step = "" if where.step is None else f", in step {where.step}"
    return f"{what} at {where.at or 'an unknown place'}{step},"


# ---------------------------------------------------------------- who looks


class Watch:
    """A thread that looks, every few seconds, whether this rank is stuck, and whether it waits in a circle.

    Args:
        tree: Whose channels it watches, weakly.
    """

    def __init__(self, tree: Any) -> None:
        self._ended = ended = threading.Event()
        self._tree = weakref.ref(tree, lambda _: ended.set())
        threading.Thread(target=self._run, name="torch_join watch", daemon=True).start()

    def _run(self) -> None:
        pause = LOOKS_EVERY
        while not self._ended.wait(pause):
            pauses = [LOOKS_EVERY]
            if (tree := self._tree()) is not None:
                for reference in [*tree.channels.values()]:
                    if (channel := reference()) is not None:
                        try:
                            pauses.append(channel.lookout.look(channel))
                        except Exception:  # e.g. a group that goes meanwhile
                            _LOG.debug("Looking for a deadlock failed.", exc_info=True)
                    del channel
            del tree
            pause = min(pauses)


class Lookout:
    """What is known, from one look to the next, of a rank's place in one channel."""

    def __init__(self) -> None:
        self._seen = 0  # the last call of the roll whose answers it has looked at
        self._reset()

    def known(self, numbers: Mapping[str, int]) -> tuple[_compat.Issued, list[_Connection] | None]:
        """Return what is known of the collectives that this rank has issued, if these are all, and its connections."""
        return (self.issued, self.ports) if self._state[-1:] == (numbers,) else (NOTHING, None)

    def _reset(self) -> None:
        self.issued = NOTHING
        self.ports: list[_Connection] | None = None
        self._state: tuple[Any, ...] = ()
        self._asks_from = 0.0  # since when it says what it has issued, too
        self._tells_at, self._has_cut = 0.0, False
        self._pause = LOOKS_EVERY
        self._before: tuple[float, dict[int, Any]] = 0.0, {}  # when ranks were stuck, and where

    def look(self, channel: Any) -> float:
        """Look once; return after how many seconds to look again."""
        here = channel.where()
        if here.kind == "elsewhere" or here.state != self._state:
            self._reset()
            self._state = here.state
            return LOOKS_EVERY
        if channel.deadlock:
            if here.kind != "meeting":
                self._end_wait(channel)
            return LOOKS_EVERY
        now = time.monotonic()
        if not self._asks_from:
            self._asks_from = now
            self.issued = _compat.issued(channel.thread)
            return LOOKS_EVERY
        call, called_at = channel.last_call
        if call > self._seen and now >= called_at + _ANSWERS_WITHIN and called_at > self._asks_from:
            self._seen = call
            self._judge(channel, now)
        elif now >= max(called_at, self._asks_from) + self._pause:
            channel.call_roll()
            return _ANSWERS_WITHIN
        return _AGAIN / 2  # so that it has looked at one call's answers before the next call

    def _judge(self, channel: Any, now: float) -> None:
        places = channel.places()
        stuck = deadlocked(places, channel.global_ranks)
        if channel.rank in stuck:
            self._note_ports(channel)
            states = {rank: places[rank].state for rank in stuck}
            then, before = self._before
            if states != before:
                self._before = now, states
            elif now >= then + (_AGAIN if all(places[rank].ports is not None for rank in stuck) else 3 * LOOKS_EVERY):
                channel.fail(describe(stuck, places, channel.global_ranks))
            self._pause = _AGAIN
            return
        self._before = 0.0, {}
        self._pause = min(_MOST_PAUSE, 2 * max(self._pause, LOOKS_EVERY))
        waiting = [rank for rank, place in places.items() if place.kind != "elsewhere"]
        if now - self._asks_from > _TELLS_AFTER and channel.rank == min(waiting, default=-1) and now > self._tells_at:
            self._tells_at = now + _TELLS_EVERY
            _LOG.warning("%s", _still_waiting(places, channel.global_ranks, now - self._asks_from))

    def _end_wait(self, channel: Any) -> None:
        is_first, self._has_cut = not self._has_cut, True
        if is_first:
            with suppress(Exception):  # raised by a log handler
                _LOG.error("%s", channel.deadlock)  # gloo's error will not say it
        self._cut(channel)
        if is_first:
            self._note_ports(channel)
            channel.call_roll()  # a rank may not have sent its connections yet

    def _note_ports(self, channel: Any) -> None:
        self.ports = [connection for _, connection in _connections(channel.files)][:_MOST_PORTS]

    def _cut(self, channel: Any) -> None:
        """End the connections between this process and those of other ranks: the collective's."""
        places = channel.places()
        others = {
            (*port[2:], *port[:2]) for rank in places if rank != channel.rank for port in places[rank].ports or ()
        }
        for copy, connection in _connections(channel.files):
            if connection in others:
                with suppress(OSError):
                    copy.shutdown(socket.SHUT_RDWR)


def _connections(own: Container[int]) -> Iterator[tuple[socket.socket, _Connection]]:
    """Yield copies of this process's connections, but those of the channel and of the job's store; Linux alone."""
    store = _compat.store_port()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # another thread has closed it; or it listens
                if int(name) in own or not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        ends = (*copy.getsockname()[:2], *copy.getpeername()[:2])
                        if store not in ends:
                            yield copy, ends


def _still_waiting(places: Mapping[int, Where], names: Sequence[int], seconds: float) -> str:
    alike: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        alike.setdefault(f"in {_say(place)}" if place.what else f"at {place.at or 'work'}", []).append(names[rank])
    said = "; ".join(f"{name_ranks(ranks)} {what.rstrip(',')}" for what, ranks in alike.items())
    return f"Some ranks have waited for others for {seconds:.0f} s, which need not be wrong: {said}."
