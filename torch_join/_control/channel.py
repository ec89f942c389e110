"""Small messages between the ranks of a process group, over a tree of connections.

A rank that needs a message reads it, or waits until it comes. A reported failure ends every wait at once. When a
process ends, its neighbours notice the end of its connections. Waiting ranks on the same host check every second
whether other ranks' processes have ended or are stopped.
"""

import copy
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch_join._base.errors import JoinError, JoinValueError, PeerFailedError, raise_any
from torch_join._control import codec as _codec
from torch_join._control._links import node as _node
from torch_join._control._links.tree import Tree
from torch_join._control.deadlock import LEFT_AT, Watch
from torch_join._control.peers import LEFT, MOST_TEXT
from torch_join._control.reports import BarrierResult, Health, Status

T = TypeVar("T")

_UNIT = 1 << 1074  # any float times this is an integer, so that sums do not depend on the order
_FOR_GOOD = (1 << 64) - 1  # a record that no rank passes, for values posted for good
_SOME = 1 << 28  # the most barriers of some ranks between two barriers of all ranks
_LOOKS_EVERY = 1.0  # seconds between two checks, in a wait, whether processes have ended or are stopped
_ANSWERS_WITHIN = 3.0  # seconds
TIMEOUT = timedelta(minutes=30)  # how long a rank waits for another, unless the user sets a timeout
_ANSWER = tuple[bool, Status | None]


class Channel:
    """The messages of one rank.

    Args:
        tree: The rank's connections; by default none, for a world of one.
        timeout: How long this rank waits for another one.

    Attributes:
        rank, world_size: This rank, and the number of ranks.
        global_ranks: By rank, its number in the whole job, for errors.
        barrier_number: The number of the last barrier at which this rank has arrived.
        records: The number of log records that this rank has written, counted as written, or followed.
        status: Returns this rank's `Status`, for its answer to a health check.
        explain: Returns the error that explains a failure, given all answers by global rank.
        suspect: Called every second while waiting for other ranks, after a check of their processes; may raise.
        thread: The thread that waits here, or may wait: its Python and its native id.
        awaits: The current wait: its kind, its number, the awaited ranks as bits (0: all), and its `ready`.
        before_meeting: Called before all ranks meet, to finish an earlier meeting that was deferred.
    """

    def __init__(self, tree: Tree | None = None, timeout: timedelta = TIMEOUT) -> None:
        self._tree = tree = tree or Tree.of_one()
        self._node, self._links = tree.node, tree.links
        self.thread = threading.get_ident(), threading.get_native_id()
        if len(tree.node.peers.global_ranks) > 1:
            tree.watch = tree.watch or Watch(tree)
        self._number, self._stream = tree.open()
        self._timeout = timeout
        self._peers = copy.copy(tree.node.peers)
        self.rank, self.global_ranks = self._peers.rank, self._peers.global_ranks
        self.world_size = len(self.global_ranks)
        self.status: Callable[[], Status | None] = lambda: None
        self.explain: Callable[[dict[int, Any]], JoinError | None] = lambda _: None
        self.suspect: Callable[[], object] = lambda: None
        self.before_meeting: Callable[[], object] = lambda: None
        self.barrier_number, self._mask = 0, 0  # `_mask`: the ranks of that barrier, as bits
        self._gathers = self.records = self._asked = 0
        self.awaits: tuple[str, int, int, Callable[[], bool]] | None = None
        self._some: tuple[int, ...] = ()  # the last gathers of some ranks in which this rank took part
        self._peer_failure: JoinError | None = None
        self._cause: str | None = None  # the first failure of this rank that it has reported
        # A weak reference, so that Python frees a dropped channel at once.
        self._stream.place = weakref.WeakMethod(self._place)
        self._end = weakref.finalize(self, tree.node.end, self._number)
        tree.channels[self._number] = self

    # ------------------------------------------------------------ meetings

    def barrier(self, count: float = 0, notice: dict[str, Any] | None = None) -> BarrierResult:
        """Meet all ranks, to sum a number and share notices: call `arrive`, then `wait`."""
        self.arrive(count, notice)
        return self.wait()

    def arrive(
        self, count: float = 0, notice: dict[str, Any] | None = None, ranks: Sequence[int] | None = None
    ) -> None:
        """Arrive at a barrier, and send this rank's count and notice.

        Args:
            count: This rank's summand: a finite number, 0 or more.
            notice: This rank's notice, if any: a JSON object.
            ranks: The ranks that meet, by default all. Between two barriers of all ranks, this set may only shrink.

        Raises:
            JoinValueError: `count` is negative or not finite.
        """
        self.before_meeting()
        if not 0 <= count < math.inf:
            raise JoinValueError(f"A barrier takes a finite number of at least 0 from each rank, not {count}.")
        some = ranks is not None and len(ranks) < self.world_size
        self._mask = _bits(ranks or ()) if some else 0
        # Count barriers of some ranks from the last barrier of all ranks, since other ranks take no part in them.
        self.barrier_number = self.barrier_number + 1 if some else (self.barrier_number // _SOME + 1) * _SOME
        message = b"" if notice is None else _codec.encode((self.rank, notice)) + b"\n"
        with self._links.lock:
            self._node.arrive(self._number, self.barrier_number, 1, _units(count) if count else 0, self._mask, message)

    def wait(self) -> BarrierResult:
        """Wait until all participants have arrived at this rank's last barrier.

        Returns:
            The sum and the notices of all ranks, equal on all of them.

        Raises:
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: Another rank did not come within the channel's timeout.
        """
        key, barriers = (self.barrier_number, self._mask), self._stream.barriers
        if self._links.reads_deferred and key not in barriers:
            self.poll()
        if key not in barriers:
            self._until(lambda: key in barriers, awaits=("barrier", *key))
        else:
            self._links.resume()
        total, notices = barriers.pop(key)
        lines = [self._decode("a notice", line, tuple[int, dict[str, Any]]) for line in notices.splitlines()]
        return BarrierResult(total / _UNIT, dict(sorted(lines, key=lambda notice: notice[0])))

    def defer_reads(self) -> None:
        """Note that this rank is about to call `poll` or to wait, so messages can stay unread until then.

        Otherwise another thread reads messages at once, and takes the interpreter's lock to do so.
        """
        self._links.defer_reads()

    def poll(self) -> None:
        """Read the messages that have come since `defer_reads`, and pass them on; does not wait for other ranks."""
        if self._links.reads_deferred:
            self._links.read()
            if self._node.layout.children:  # a rank that passes messages on must not defer further reads
                self._links.resume()

    def gather(self, value: T, *, of: Any = Any, among: tuple[str, Sequence[int]] | None = None) -> list[T]:
        """Meet all ranks, or some, and return every rank's value, by rank; equal values are one object.

        Args:
            value: This rank's value: numbers, strings, lists, tuples, dictionaries and the like.
            of: The type that all values must have.
            among: A name that is used only once, and the ranks that meet; by default all ranks meet.

        Raises:
            JoinError: A received value is malformed or has another type; or ranks wait for each other.
            JoinTypeError: `value` has a type that cannot be sent.
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: Another rank did not come within the channel's timeout.
        """
        return self.begin_gather(value, of=of, among=among)()

    def begin_gather(
        self, value: T, *, of: Any = Any, among: tuple[str, Sequence[int]] | None = None
    ) -> Callable[[], list[T]]:
        """Send this rank's value for a `gather`; return a function that waits for the other values and returns all."""
        data = _codec.encode(value)
        if among is not None:
            name, bits = _node.number_of(among[0]), _bits(among[1])
            self._some = (*self._some[-7:], name)
        else:
            self.before_meeting()
            name, bits = self._gathers, 0
            self._gathers += 1
        key, barriers = (_node.GATHERS | name, bits), self._stream.barriers
        with self._links.lock:
            self._node.arrive(self._number, key[0], 1, 0, bits, _node.VALUE.pack(self.rank, len(data)) + data)

        def end() -> list[T]:
            self._until(lambda: key in barriers, awaits=("some" if bits else "gather", name, bits))
            if not bits:
                self._pass_log()
            _, values_data = barriers.pop(key)
            values = _node.values_of(values_data)
            found: dict[bytes, T] = {}  # often all values are equal
            for rank, encoded in sorted(values.items()):
                if encoded not in found:
                    found[encoded] = self._decode(f"a gathered value of rank {rank}", encoded, of)
            return [found[encoded] for _, encoded in sorted(values.items())]

        return end

    # ------------------------------------------------------------ the log, and posted values

    def append(self, record: Any, leads: bool) -> None:
        """Add a record to the log that some ranks keep and others follow; does not wait for other ranks.

        Args:
            record: A value as for `gather`.
            leads: Whether this rank writes the record. All ranks that keep the log call this in the same order, and
                one of them writes.
        """
        if leads:
            self.post(f"log/{self.records}", record)
        self.records += 1
        self._pass_log()

    def follow(self, meanwhile: Callable[[], None] | None = None, of: Any = Any) -> Any:
        """Wait for the log's next record.

        Args:
            meanwhile: Called repeatedly during the wait, which is then slower.
            of: The type that the record must have.

        Raises:
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: No record came within the channel's timeout.
        """
        self._pass_log()  # values posted with this record can still be read after it has come
        record = self.read(f"log/{self.records}", meanwhile, of, ("record", self.records, 0))
        self.records += 1
        return record

    def _pass_log(self) -> None:
        with self._links.lock:
            self._stream.pass_log(self.records)

    def post(self, key: str, value: Any, lasts: bool = False) -> None:
        """Post a value (as for `gather`) under a unique name; does not wait for other ranks.

        Each rank keeps the value until it passes the next record that this rank writes, or for good if it `lasts`.
        """
        data = value if type(value) is _codec.Encoded else _codec.encode(value)
        with self._links.lock:
            self._node.post(self._number, _FOR_GOOD if lasts else self.records, key, data)

    def posted(self, key: str) -> bool:
        """Whether there is a posted value of this name."""
        self._links.read()
        return key in self._stream.values

    def read(
        self,
        key: str,
        meanwhile: Callable[[], None] | None = None,
        of: Any = Any,
        awaits: tuple[str, int, int] | None = None,
    ) -> Any:
        """Wait for the posted value of this name; for the arguments see `follow` and `_until`."""
        values = self._stream.values
        self._until(lambda: key in values, meanwhile, awaits=awaits)
        return self._decode(repr(key), values[key], of)

    # ------------------------------------------------------------ values kept, or summed, on one rank

    def keep(self, key: str, value: Any) -> None:
        """Keep a value (as for `gather`) under a name, for ranks that `ask` for it; does not wait for other ranks.

        A rank keeps its last few thousand values.
        """
        data = _codec.encode(value)
        with self._links.lock:
            self._node.keep(self._number, key, data)

    def ask(self, key: str, ranks: Sequence[int], of: Any = Any) -> dict[int, Any]:
        """Wait for the values that ranks keep under a name; return them by rank.

        Args:
            key: The name.
            ranks: The ranks to ask.
            of: The type that the values must have.

        Raises:
            PeerFailedError: Another rank has failed.
            JoinTimeoutError: A rank has not kept a value of this name within the channel's timeout.
        """
        asked = {rank: self._ask(_node.ASK, rank, key, 0) for rank in ranks}
        answers = self._stream.answers
        for rank, number in asked.items():
            self._until(lambda: number in answers, awaits=("ask", 0, 1 << rank))  # noqa: B023
        return {rank: self._decode(repr(key), answers.pop(number)[1], of) for rank, number in asked.items()}

    def add(self, key: str, number: int) -> int:
        """Add to the number of this name, which starts at 0; return the sum. Rank 0 keeps the last few sums."""
        asked, answers = self._ask(_node.ADD, 0, key, number), self._stream.answers
        self._until(lambda: asked in answers)
        return answers.pop(asked)[0]

    def _ask(self, kind: int, rank: int, key: str, number: int) -> int:
        with self._links.lock:
            self._asked += 1
            self._node.ask(self._number, kind, _node.QUESTION.pack(rank, self.rank, self._asked, number) + key.encode())
        return self._asked

    def contribute(self, key: str, number: int, ranks: Sequence[int]) -> None:
        """Add a number below 2**32 to a sum over these ranks, all of which call this; does not wait for other ranks."""
        with self._links.lock:
            self._node.arrive(self._number, _node.SUMS | _node.number_of(key), 1, number, _bits(ranks), b"")

    def contributed(self, key: str, ranks: Sequence[int]) -> int | None:
        """Return that sum, once, on the lowest of the ranks; `None` until it is complete. Does not wait."""
        self._links.read()
        name = _node.SUMS | _node.number_of(key), 1 << min(ranks)
        total, _ = self._stream.barriers.pop(name, (None, b""))
        return total

    # ------------------------------------------------------------ failures

    def fail(self, reason: str | BaseException, rank: int | None = None) -> None:
        """Report to the other ranks that this rank (or `rank`, which cannot report it) has failed; does not wait.

        Args:
            reason: The cause, or the error that ended this rank: its own error, or a failure from another channel.
            rank: The failed rank.
        """
        watch, name = cast(Any, self._tree.watch), f"{LEFT_AT}{self.rank}"
        if watch is not None and isinstance(reason, BaseException) and not self.posted(name):
            self.post(name, watch.last_place(), lasts=True)
        if isinstance(reason, PeerFailedError):
            if self._peer_failure is not None or reason.rank not in self.global_ranks:
                return
            rank, reason = self.global_ranks.index(reason.rank), reason.reason
        elif isinstance(reason, BaseException):
            reason = f"{type(reason).__name__}: {reason}"
        self._cause = reason if rank is None and self._cause is None else self._cause
        self._links.read()
        failure = _codec.encode((self.rank if rank is None else rank, reason[:MOST_TEXT]))
        with self._links.lock:
            self._node.fail(self._number, failure)

    def failure(self) -> JoinError | None:
        """Return the failure or deadlock that another rank has reported, or `None`. Does not wait for other ranks."""
        self._links.read()
        return self._known_failure()

    def _known_failure(self) -> JoinError | None:
        if self._peer_failure is None and (data := self._stream.failure) is not None:
            self._peer_failure = self._peers.read_failure(data, self._cause)
        # Return a copy: a raised error keeps the frames that it passed, and with them this channel, alive.
        return None if self._peer_failure is None else copy.copy(self._peer_failure)

    def failure_check(self) -> Callable[[], None]:
        """Return a function to call repeatedly while waiting for another rank outside this channel.

        The function raises as a wait on the channel does: `PeerFailedError` if a rank has failed or its process has
        ended, `JoinTimeoutError` when the channel's timeout is over.
        """
        return self._check(self.failure)

    def _check(self, failure: Callable[[], JoinError | None]) -> Callable[[], None]:
        self._peers.begin_to_watch()
        start = time.monotonic()
        deadline, next_check = start + self._timeout.total_seconds(), start + _LOOKS_EVERY

        def check() -> None:
            nonlocal next_check
            raise_any(failure())
            now = time.monotonic()
            if now > deadline:
                raise self._timed_out()
            if now > next_check:
                next_check = now + _LOOKS_EVERY
                if (found := self._peers.find_failed(dict.fromkeys(self._links.left, LEFT))) is not None:
                    rank, why = found
                    self.fail(why, rank)
                    raise self.failure() or self._peers.error(rank, why)
                self.suspect()

        return check

    def health(self) -> Health:
        """Check which ranks are alive.

        Ranks answer from a separate thread, wherever their code is. A rank that does not answer within three
        seconds has ended or is stopped. The check ends early once a failure has been reported.
        """
        places = self._stream.places
        with self._links.lock:
            call, until = self._node.call_roll(self._number)
        deadline = time.monotonic() + _ANSWERS_WITHIN

        def answered(rank: int) -> bool:
            return rank in places and places[rank][0] >= call

        def enough() -> bool:
            now = time.monotonic()
            late = now > deadline or self.failure() is not None
            return late or (now > until and all(map(answered, range(self.world_size))))

        self._tree.wait(enough, lambda: None)
        found = {rank: places[rank][1] for rank in range(self.world_size) if answered(rank)}
        # A rank that has left the channel was reached, but its answer is empty.
        answers = {rank: self._decode("an answer", data, _ANSWER) for rank, data in found.items() if data}
        missing = [rank for rank in range(self.world_size) if rank not in answers]
        stuck = {*missing} - found.keys()
        return Health(answers, [rank for rank in missing if self._node.layout.between(rank).isdisjoint(stuck)])

    def find_why(self, what: str) -> tuple[JoinError | None, Health]:
        """Return the error that explains a problem on this rank, described by `what`, and the result of `health`."""
        answers, silent = health = self.health()
        ranks, failure = self.global_ranks, self.failure()
        if failure is not None:
            return failure, health
        if silent:
            return self._peers.silent(what, silent), health
        return self.explain({ranks[rank]: status for rank, (_, status) in answers.items()}), health

    def _place(self) -> bytes:
        waits = self.awaits is not None
        try:
            return _codec.encode((waits, self.status()))
        except Exception:  # another thread is changing the status
            return _codec.encode((waits, None))

    @property
    def passed(self) -> list[int]:
        """This rank's last barrier, its numbers of gathers and records, and its last gathers of some ranks."""
        return [self.barrier_number, self._gathers, self.records, *self._some]

    def _decode(self, what: str, data: bytes, of: Any) -> Any:
        try:
            return _codec.decode(data, of)
        except _codec.Malformed as problem:
            error = _codec.foreign(what, problem)
            self.fail(error)
            raise error from None

    # ------------------------------------------------------------ end

    def close(self, meets: bool = False) -> None:
        """Stop sending and answering messages.

        Args:
            meets: Whether all ranks call this, and wait for each other. This does not use the process group's barrier,
                which needs a device on an accelerator, or takes the first one.

        Raises:
            PeerFailedError: Another rank has ended early.
        """
        if meets:
            self.gather(None)
        self._stream.place = lambda: None
        self._tree.channels.pop(self._number, None)
        self._tree.part()  # sends reported failures before the process may end
        if self.world_size > 1:  # else others may share it
            self._end()

    # ------------------------------------------------------------ waiting

    def _until(
        self,
        ready: Callable[[], bool],
        meanwhile: Callable[[], None] | None = None,
        awaits: tuple[str, int, int] | None = None,
    ) -> None:
        """Wait until `ready`.

        Args:
            ready: Returns whether the wait is over.
            meanwhile: Called repeatedly.
            awaits: What this rank waits for: see the attribute `awaits`.
        """
        check: Callable[[], None] | None = None

        def poll() -> None:
            nonlocal check
            if meanwhile is not None:
                meanwhile()
            if self._cause is not None:  # the other ranks know of the failure, and will not come
                me = self.global_ranks[self.rank]
                raise JoinError(
                    f"Rank {me} cannot wait for the others: it has already reported its failure to them: {self._cause}"
                )
            check = check or self._check(self._known_failure)
            check()

        self.thread = threading.get_ident(), threading.get_native_id()
        self.awaits = (*(awaits or ("", 0, 1 << self.rank)), ready)
        is_awake = self.awaits[0] == "record"  # then other ranks wait for what this rank does next
        try:
            self._tree.wait(ready, poll, self._stream if meanwhile is None else None, is_awake)
        finally:
            self.awaits = None

    def _timed_out(self) -> JoinError:
        waited = f"Rank {self.global_ranks[self.rank]} waited {self._timeout.total_seconds():.0f} s for the other ranks"
        why, (answers, _) = self.find_why(waited)
        if why is not None:
            return why
        return self._peers.late(waited, [rank for rank, (waits, _) in answers.items() if not waits])


def _units(count: float) -> int:
    numerator, denominator = count.as_integer_ratio()
    return numerator * (_UNIT // denominator)


def _bits(ranks: Sequence[int]) -> int:
    return sum(1 << rank for rank in ranks)
