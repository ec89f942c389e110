"""How a rank waits for others, what it looks at meanwhile, and what it says of those for whom it has waited in vain."""

import copy
import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_join._base.compat_groups import is_gone
from torch_join._base.errors import JoinError, JoinTimeoutError, PeerFailedError, name_ranks, raise_any
from torch_join._control import codec as _codec
from torch_join._control.channel import Status
from torch_join._control.processes import Process

_SUSPECT_SECONDS = 0.9
MOST_TEXT = 20_000  # of what is told of a failure
GONE = (
    "its process is gone: killed, or ended without a word. Its own log, or the system's (a lack of memory, perhaps),"
    " says why."
)
SILENT = "it does not answer: it was killed, or is stopped. Its own log says why."
STORE_GONE = (
    "The rank that hosts the job's key-value store (as a rule rank 0) is gone: it was killed or has exited early. Its"
    " own log says why."
)


def failed(name: int, me: int, reason: str) -> PeerFailedError:
    """Return the error of rank `me` where the one of this name has failed."""
    return PeerFailedError(f"Rank {name} failed, so rank {me} cannot go on. Rank {name}: {reason}", name, reason)


class WaitingChannel:
    """The part of a channel that waits, and that knows of failures, whatever the channel goes over.

    Args:
        store: Where a failure is told.
        timeout: How long a rank waits for another one.
        group: The process group, whose connections tell of a process that has ended.

    Attributes:
        processes: Those of other ranks that are on this rank's host, where they are known.
    """

    processes: Mapping[int, Process]
    rank: int
    names: Sequence[int]
    world_size: int
    status: Callable[[], Status | None]
    silent: Callable[[Container[int]], list[int]]
    explain: Callable[[dict[int, Any]], JoinError | None]
    suspect: Callable[[], object]
    # In seconds of a wait: how often it looks whether a rank has failed, and after how many, and then how often, it
    # looks for processes that are gone.
    _looks_every, _probes_after, _probes_every = 0.1, 5.0, 2.0
    _MOST_PAUSE = 2.0  # each question leaves some bytes in the memory of who is asked

    def __init__(self, store: Any, timeout: timedelta, group: dist.ProcessGroup | None) -> None:
        self._store = store
        self._timeout = timeout
        # Weakly, so that a destroyed group hangs up on its peers at once.
        self._group = None if group is None else weakref.ref(group)
        self._waits: Any = None  # not `None` while this rank waits
        self._heard: PeerFailedError | None = None
        self._has_told = False  # whether this rank has told of a failure of its own
        self._silent: set[int] = set()  # who did not answer the last roll call, or has failed
        self.processes = {}
        if group is not None:
            self.names = dist.get_process_group_ranks(group)
        self._asks_at, self._pause = 0.0, self._probes_every  # when it asks of connections next, and how long after
        self._suspects: dict[int, float] = {}  # at the last look: ranks that may be in others' way, since when

    def fail(self, reason: str, rank: int | None = None) -> None:
        """See `Channel.fail`."""
        raise NotImplementedError

    def tell(self, error: BaseException) -> None:
        """See `Channel.tell`."""
        if not isinstance(error, PeerFailedError):
            self.fail(f"{type(error).__name__}: {error}")
        elif self._heard is None and error.rank in self.names:  # of another channel, perhaps
            self.fail(error.reason, self.names.index(error.rank))

    def failure(self) -> PeerFailedError | None:
        try:
            self.listen(self._store)
        except PeerFailedError as error:
            return error
        except RuntimeError:
            if gone := self._gone():
                return self._error_of(*self._first_of(dict.fromkeys(gone, GONE)))
            return PeerFailedError(STORE_GONE)
        # A new one each time: what is raised holds the frames that it has passed, and with them this channel.
        return copy.copy(self._heard)

    def roll_call(self, closed: Container[int] = ()) -> dict[int, Any]:
        """See `Channel.roll_call`.

        Args:
            closed: Ranks whose connections have ended, which are not waited for as long as others.
        """
        answers = self._call_roll(closed)
        if self._heard is None:  # which ends it early
            self._silent = set(self.silent(answers))
        return answers

    def _call_roll(self, closed: Container[int]) -> dict[int, Any]:
        raise NotImplementedError

    # ------------------------------------------------------------ what other threads call

    def place(self) -> tuple[bool, Status | None]:
        """Return what this rank answers to a roll call: whether it waits on the channel, and its status."""
        return self._waits is not None, self.status()

    def listen(self, store: Any) -> None:
        """Look whether a rank has failed."""
        if self._heard is None:
            self._heard = self._read_failure(store)

    # ------------------------------------------------------------ failures

    def _gone(self) -> list[int]:
        """Return which processes of this host have ended."""
        return [rank for rank, process in self.processes.items() if not process.is_there]

    def _error_of(self, rank: int, reason: str) -> PeerFailedError:
        return failed(self.names[rank] if rank < self.world_size else rank, self.names[self.rank], reason)

    def _name(self, ranks: Iterable[int]) -> str:
        return name_ranks(self.names[rank] for rank in ranks)

    def _read_failure(self, store: Any) -> PeerFailedError | None:
        if not store.check(["failure"]):
            return None
        me = self.names[self.rank]
        try:
            rank, reason = _codec.decode(store.get("failure"), tuple[int, str])
        except _codec.Malformed as problem:
            error = _codec.foreign("'failure'", problem)
            return PeerFailedError(f"Rank {me} cannot go on, since a rank may have failed. {error}")
        self._silent.add(rank)
        if rank == self.rank and self._has_told:
            return None
        if rank == self.rank:
            return PeerFailedError(f"The others go on, or end, without rank {me}: {reason}")
        return self._error_of(rank, reason)

    def _published(self, error: JoinError) -> JoinError:
        """Return an error that all ranks hear of."""
        self.tell(error)
        return error

    def _decode(self, key: str, data: bytes, of: Any) -> Any:
        try:
            return _codec.decode(data, of)
        except _codec.Malformed as problem:
            raise self._published(_codec.foreign(repr(key), problem)) from None

    # ------------------------------------------------------------ waiting

    def vigil(
        self, start: float | None = None, known: Callable[[], PeerFailedError | None] | None = None
    ) -> Callable[[], None]:
        """See `Channel.vigil`.

        Args:
            start: When the wait has begun, by default now.
            known: Returns a failure that is known, where somebody else reads what the others say.
        """
        self._suspects = {}
        failure_of = self.failure if known is None else known
        start = time.monotonic() if start is None else start
        deadline, next_look, next_probe = start + self._timeout.total_seconds(), start, start + self._probes_after

        def look() -> None:
            nonlocal next_look, next_probe
            now = time.monotonic()
            if now > next_look:
                next_look = now + self._looks_every
                raise_any(failure_of())
            if now > deadline:
                raise self._timed_out()
            if now > next_probe:
                next_probe = now + self._probes_every
                self._probe()
                self.suspect()

        return look

    def _probe(self) -> None:
        self._look_at_processes({})
        group = self._group() if self._group is not None else None
        if group is None or (now := time.monotonic()) < self._asks_at:
            return
        self._asks_at, self._pause = now + self._pause, min(2 * self._pause, self._MOST_PAUSE)
        others = {*range(self.world_size)} - {self.rank, *self.processes}
        gone = [rank for rank in sorted(others) if is_gone(group, rank)]
        if gone:  # from gloo, at a timeout of a collective, or from the world
            answers = self.roll_call(gone)
            raise_any(self.failure())
            gone = [rank for rank in gone if rank not in answers]
        if gone:
            self.fail(GONE, gone[0])
            text = f"The process of {self._name(gone)} is gone{GONE.removeprefix('its process is gone')}"
            raise PeerFailedError(text, self.names[gone[0]], GONE)

    def _look_at_processes(self, suspects: dict[int, str]) -> None:
        """Raise if a process of this host is gone; or if one is stopped for a second, or suspect otherwise."""
        if found := dict.fromkeys(self._gone(), GONE) or self._in_the_way(suspects):
            rank, why = self._first_of(found)
            self.fail(why, rank)
            raise self.failure() or self._error_of(rank, why)

    def _first_of(self, found: dict[int, str]) -> tuple[int, str]:
        """Return a rank of those that have failed, and why: of which some may have heard of the first, and left."""
        rank, why = min(found.items())
        if others := found.keys() - {rank}:
            why += f" The same goes for {self._name(others)}, and any of them may have been the first."
        return rank, why

    def _in_the_way(self, suspects: dict[int, str]) -> dict[int, str]:
        """Return which of the suspects, and of the stopped processes of this host, have been so for a second; why."""
        now = time.monotonic()
        stopped = [rank for rank, process in self.processes.items() if process.is_stopped]
        suspects = {**suspects, **dict.fromkeys(stopped, "its process is stopped: by a signal.")}
        self._suspects = {rank: self._suspects.get(rank, now) for rank in suspects}
        return {rank: why for rank, why in suspects.items() if now - self._suspects[rank] > _SUSPECT_SECONDS}

    def _check_alive(self, ranks: list[int], waited: float) -> None:
        """Raise if one of these ranks has ended, or was waited for longer than the channel's timeout."""
        group = self._group() if self._group is not None else None
        gone = [rank for rank in self._gone() if rank in ranks]
        gone = gone or [rank for rank in ranks if group is not None and is_gone(group, rank)]
        if gone or waited > self._timeout.total_seconds():
            raise PeerFailedError(
                f"Rank {self.names[self.rank]} has waited for {self._name(gone or ranks)} to come out of the loop too:"
                " killed, or stopped, after all had the last state. Its own log, or the system's, says why."
            )

    def _timed_out(self) -> JoinError:
        answers = self.roll_call()
        if (failure := self.failure()) is not None:
            return failure
        waited = f"Rank {self.names[self.rank]} waited {self._timeout.total_seconds():.0f} s for the other ranks"
        if self._silent:
            text = f"{waited}, and {self._name(self._silent)} did not answer: killed, or stopped."
            return PeerFailedError(text, self.names[min(self._silent)], SILENT)
        if (explained := self.explain({self.names[rank]: status for rank, (_, status) in answers.items()})) is not None:
            return explained
        busy = [rank for rank, (waits, _) in answers.items() if not waits]
        who = f"{self._name(busy)} at work elsewhere" if busy else "all wait"
        return JoinTimeoutError(
            f"{waited} to say whether they have a next batch, or what comes next: {who}. Usual causes: a dataloader"
            " that takes longer than the timeout (raise `timeout`); a `break` at different steps, or something done"
            " with others every so many steps, by a counter of a rank's own, which is lower where a rank has run out of"
            " batches (give the counter to Join too, in an object with state_dict and load_state_dict; heartbeat=True"
            " for a `break`); batches that one rank leaves out, by `continue` or in a generator around the loop (leave"
            " them out within: join.batches(good(loader))); something done with others after a loop by iter() and"
            " next() that has not been asked for its end; a step that only some ranks run. py-spy dump tells what these"
            " ranks are doing."
        )
