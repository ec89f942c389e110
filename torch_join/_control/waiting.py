"""How a rank waits for what others write to the store, and what it looks at meanwhile.

A wait is one request, which the server answers when the keys are there. It is not ended by a timeout, of which
torch would print warnings, unless the rank's own does: after some seconds, and as soon as a rank has failed, the
thread that answers roll calls writes into the keys that there is something to look at. Whoever waits for them then
looks again and again: whether they are there, whether a rank has failed, whether a process is gone.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_join._base import compat as _compat
from torch_join._base.errors import JoinError, JoinTimeoutError, PeerFailedError, name_ranks
from torch_join._control import codec as _codec
from torch_join._control.channel import Status
from torch_join._control.presence import Presence, call

FAILED, _LOOK = b"failed", b"look"  # in place of a value: no JSON
# A wait this long is no longer latency: from then on the failure notices are looked at too.
_PATIENCE = 5.0  # seconds
_LIMIT = timedelta(seconds=8)  # longer than it takes until the thread wakes up a rank
_STAGGER = 0.02  # between ranks, of which the first wakes up all
_POLL_SECONDS = 0.1
_SHORT_POLL_SECONDS = 0.0003
_PROBE_SECONDS = 2.0
_READING_SECONDS = 2.0  # for which the store's host waits until all have read of a failure
_MOST_TEXT = 20_000


class WaitingChannel:
    """The part of a channel over a store that waits, and that knows of failures; the rest is `StoreChannel`'s.

    Args:
        store: A connection of this object's own.
        timeout: How long a rank waits for another one.
        group: The process group, whose connections tell of a process that has ended.
        second: Another connection, over which this rank answers roll calls while it waits.
        hosts: Whether the store may go down with this rank's process.
    """

    rank: int
    world_size: int
    status: Callable[[], Status | None]
    explain: Callable[[dict[int, Any]], JoinError | None]

    def __init__(
        self, store: dist.Store, timeout: timedelta, group: dist.ProcessGroup | None, second: dist.Store, hosts: bool
    ) -> None:
        self._store: Any = store  # torch's stubs lack half of its methods
        self._store.set_timeout(min(timeout, _LIMIT))
        self._timeout = timeout
        # Weakly, so that a destroyed group hangs up on its peers at once.
        self._group = None if group is None else weakref.ref(group)
        self._read: deque[str] = deque()  # keys that all have read; deleting one takes as long as a beat
        self._waits: tuple[list[str], float] | None = None  # for which keys, and when it is time to look
        self._heard: PeerFailedError | None = None
        self._hosts, self._failed = hosts, False
        self._silent: set[int] = set()  # who did not answer the last roll call
        # Weakly, so that a channel that is dropped ends its thread at once.
        self._presence = Presence(second, self.rank, self.world_size, weakref.ref(self), self._read)

    def fail(self, reason: str, rank: int | None = None) -> None:
        """See `Channel.fail`."""
        raise NotImplementedError

    def failure(self) -> PeerFailedError | None:
        try:
            self.listen(self._store)
        except RuntimeError:
            return PeerFailedError(
                "The rank that hosts the job's key-value store (as a rule rank 0) is gone: it was"
                " killed or has exited early. Its own log says why."
            )
        return self._heard

    def roll_call(self) -> dict[int, Any]:
        try:
            answers = self._presence.call(enough=lambda _: self.failure() is not None)
            self._silent = set(range(self.world_size)).difference(answers)
            return answers
        except _codec.Malformed as problem:
            raise self._published(_codec.foreign("an answer to a roll call", problem)) from None

    def leave(self) -> None:
        if not self._presence.leave.alive:
            return
        if self._failed or self._heard is not None:
            with suppress(_codec.Malformed, RuntimeError):
                self._part_in_failure()
        self._presence.leave()

    def _part_in_failure(self) -> None:
        """Leave a note, or as the store's host wait for the others: nobody can read once its process has ended."""
        if not self._hosts:
            self._store.set(f"left/{self.rank}", "")
            return
        readers = set(range(self.world_size)) - self._silent

        def have_read(answers: dict[int, Any]) -> bool:
            return all(rank in answers or self._store.check([f"left/{rank}"]) for rank in readers)

        self._presence.call(have_read, within=_READING_SECONDS)

    # ------------------------------------------------------------ what the thread calls

    def place(self) -> tuple[bool, Status | None]:
        """See `Rank.place`."""
        return self._waits is not None, self.status()

    def listen(self, store: Any) -> None:
        """See `Rank.listen`."""
        if self._heard is None:
            self._heard = self._read_failure(store)

    def look(self, store: Any) -> None:
        """See `Rank.look`."""
        waits = self._waits
        if waits is not None and (self._heard is not None or time.monotonic() > waits[1]):
            for key in waits[0]:
                store.compare_set(key, "", _LOOK.decode())  # unless it is there

    # ------------------------------------------------------------ failures

    def _tell(self, reason: str, rank: int) -> None:
        """Leave a notice, unless there is one, and have all ranks look at it."""
        self._failed = True
        self._store.compare_set("failure", "", _codec.encode((rank, reason[:_MOST_TEXT])).decode())
        with suppress(_codec.Malformed):  # they look by themselves after some seconds
            call(self._store)

    def _read_failure(self, store: Any) -> PeerFailedError | None:
        if not store.check(["failure"]):
            return None
        try:
            rank, reason = _codec.decode(store.get("failure"), tuple[int, str])
        except _codec.Malformed as problem:
            error = _codec.foreign("'failure'", problem)
            return PeerFailedError(f"Rank {self.rank} cannot go on, since a rank may have failed. {error}")
        if rank == self.rank:
            return None
        return PeerFailedError(f"Rank {rank} failed, so rank {self.rank} cannot go on. Rank {rank}: {reason}")

    def _published(self, error: JoinError) -> JoinError:
        """Return an error that all ranks hear of."""
        self.fail(f"{type(error).__name__}: {error}")
        return error

    def _decode(self, key: str, data: bytes, of: Any) -> Any:
        try:
            return _codec.decode(data, of)
        except _codec.Malformed as problem:
            raise self._published(_codec.foreign(repr(key), problem)) from None

    def _lost(self) -> JoinError | None:
        """Say why the store has hung up on this rank."""
        if (other := self._presence.connection) is None:
            return self.failure()
        self._use(other)
        # It does so if it is to add to what is no number.
        return self.failure() or self._published(_codec.foreign("a number", "it is none"))

    def _use(self, store: Any) -> None:
        self._store = store

    # ------------------------------------------------------------ waiting

    def _wait_for(self, key: str) -> bytes:
        return self._wait([key])[0]

    def _wait(self, keys: list[str], meanwhile: Callable[[], None] | None = None, wakes: bool = True) -> list[bytes]:
        """Wait for keys and return their values.

        Args:
            keys: The keys.
            meanwhile: Called again and again while they are not there; the wait is then not as quick.
            wakes: Whether the thread may write to the keys that there is something to look at.
        """
        start = time.monotonic()
        self._waits = keys if wakes and meanwhile is None else [], start + _PATIENCE + _STAGGER * (self.rank % 50)
        try:
            found: list[bytes] | None = None
            if meanwhile is None:
                with suppress(dist.DistStoreError):
                    found = self._store.multi_get(keys) if len(keys) > 1 else [self._store.get(keys[0])]  # quicker
            if found is None or _LOOK in found:
                found = self._wait_long(keys, start, meanwhile)
        finally:
            self._waits = None
        if FAILED in found:
            raise self.failure() or PeerFailedError("Another rank failed.")
        return found

    def _there(self, keys: list[str]) -> list[bytes] | None:
        """Return the values of keys if they are there; waits for nobody."""
        if not self._store.check(keys):
            return None
        found: list[bytes] = self._store.multi_get(keys)
        return None if _LOOK in found else found

    def _wait_long(self, keys: list[str], start: float, meanwhile: Callable[[], None] | None) -> list[bytes]:
        deadline, next_look = start + self._timeout.total_seconds(), start
        next_probe = start + _PATIENCE
        while (found := self._there(keys)) is None:
            now = time.monotonic()
            if meanwhile is not None:
                meanwhile()
            if now > next_look:
                next_look = now + _POLL_SECONDS
                if (failure := self.failure()) is not None:
                    raise failure
            if now > deadline:
                raise self._timed_out()
            if now > next_probe:
                next_probe = now + _PROBE_SECONDS
                self._probe()
            time.sleep(_POLL_SECONDS if meanwhile is None else _SHORT_POLL_SECONDS)
        return found

    def _probe(self) -> None:
        group = self._group() if self._group is not None else None
        if group is None:
            return
        gone = [r for r in range(self.world_size) if r != self.rank and _compat.is_gone(group, r)]
        if gone:  # from gloo, at a timeout of a collective, or from the world
            answers = self.roll_call()
            if (failure := self.failure()) is not None:
                raise failure
            gone = [rank for rank in gone if rank not in answers]
        if gone:
            why = "killed, or ended without a word. Its own log, or the system's (a lack of memory, perhaps), says why."
            self.fail(f"its process is gone: {why}", gone[0])
            raise PeerFailedError(f"The process of {name_ranks(gone)} is gone: {why}")

    def _check_alive(self, ranks: list[int], waited: float) -> None:
        """Raise if one of these ranks has ended, or was waited for longer than the channel's timeout."""
        group = self._group() if self._group is not None else None
        gone = [rank for rank in ranks if group is not None and _compat.is_gone(group, rank)]
        if gone or waited > self._timeout.total_seconds():
            raise PeerFailedError(
                f"Rank {self.rank} has waited for {name_ranks(gone or ranks)} to come out of the loop too: killed, or"
                " stopped, after all had the last state. Its own log, or the system's, says why."
            )

    def _timed_out(self) -> JoinError:
        answers = self.roll_call()
        if (failure := self.failure()) is not None:
            return failure
        waited = f"Rank {self.rank} waited {self._timeout.total_seconds():.0f} s for the other ranks"
        if self._silent:
            return PeerFailedError(f"{waited}, and {name_ranks(self._silent)} did not answer: killed, or stopped.")
        if (explained := self.explain({rank: status for rank, (_, status) in answers.items()})) is not None:
            return explained
        busy = [rank for rank, (waits, _) in answers.items() if not waits]
        who = f"{name_ranks(busy)} at work elsewhere" if busy else "all wait"
        return JoinTimeoutError(
            f"{waited} to say whether they have a next batch, or what comes next: {who}. Usual causes: a dataloader"
            " that takes longer than the timeout (raise `timeout`); a `break` at different steps (a counter of a rank's"
            " own steps is lower where a rank has run out of batches: use heartbeat=True, or count what all count); a"
            " step that only some ranks run. py-spy dump tells what these ranks are doing."
        )
