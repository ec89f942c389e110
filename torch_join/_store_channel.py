"""The channel over a key-value store.

Why a store and not collectives: on two gloo ranks one `beat` takes 0.17 ms where the smallest
all-reduce takes 0.4 to 1.0 ms (and 0.3 against 3.5 ms on three ranks of two cores); it never
touches the accelerator; and its order cannot collide with anybody's collectives.

The contract relied on: `add` and `append` are atomic, `get` and `multi_get` wait on the server until
the keys exist, `clone` opens a connection of its own.

A `beat` costs each rank one addition and as a rule at most one more request; a server was seen to take 79,000 additions
per second.
"""

import json
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from torch_join import _compat
from torch_join._beats import MAX_RANKS, Beats
from torch_join._channel import Beat, Channel
from torch_join._errors import JoinError, JoinValueError, PeerFailedError, name_ranks
from torch_join._presence import Presence, delete_all, timed_out

P = ParamSpec("P")
T = TypeVar("T")

_FAILED = b"failed"
_NOBODY = -1  # in place of the rank of a corrected length: a rank has failed
# A wait this long is no longer latency: from then on the failure notices are looked at too.
_PATIENCE = timedelta(seconds=5)
_POLL_SECONDS = 0.1
_SHORT_POLL_SECONDS = 0.0003
_PROBE_SECONDS = 2.0


def _naming_failures(method: Callable[P, T]) -> Callable[P, T]:
    """Have a method say who has failed, if the store has gone down with its host."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except dist.DistNetworkError as error:
            channel: Any = args[0]
            raise channel.failure() or error from error

    return call


class StoreChannel(Channel):
    """A channel over a `torch.distributed` store.

    Args:
        store: A connection of this object's own.
        rank, world_size: This rank, and the number of ranks.
        timeout: How long a rank waits for another one.
        group: The process group, whose connections tell of a process that has ended.
        second: Returns another connection, over which this rank answers roll calls while it waits.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        group: dist.ProcessGroup | None = None,
        second: Callable[[], dist.Store] | None = None,
    ) -> None:
        if world_size > MAX_RANKS:
            raise JoinValueError(f"A channel serves at most {MAX_RANKS} ranks, not {world_size}.")
        super().__init__(rank, world_size)
        self._store: Any = store  # torch's stubs lack half of its methods
        self._store.set_timeout(min(timeout, _PATIENCE))
        self._timeout = timeout
        # Weakly, so that a destroyed group hangs up on its peers at once.
        self._group = None if group is None else weakref.ref(group)
        self._gathers = self._log = self._forgotten = 0
        self._read: deque[str] = deque()  # keys that all have read; deleting one takes as long as a beat
        # Weakly, so that a channel that is dropped ends its thread at once.
        wait, place = weakref.WeakMethod(self._wait_for), weakref.WeakMethod(self._place)
        self._beats = Beats(self._store, rank, world_size, lambda key: wait()(key), self._read.append)  # type: ignore[misc]
        self._waits = False
        say = lambda: (p := place()) and p()  # noqa: E731
        self._presence = Presence(second, rank, world_size, say, self._read) if second else None

    @_naming_failures
    def say(
        self, count: int = 0, notice: dict[str, Any] | None = None, participants: int | None = None, waits: bool = True
    ) -> None:
        self._beats.say(count, notice, participants or self.world_size, waits)

    @_naming_failures
    def hear(self) -> Beat:
        return self._beats.hear()

    @_naming_failures
    def gather(self, value: T, unless_beat: bool = False) -> list[T]:
        index, self._gathers = self._gathers, self._gathers + 1
        keys = [f"gather/{index}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], pickle.dumps(value))
        if index >= 2:
            self.delete(f"gather/{index - 2}/{self.rank}")
        if unless_beat:
            self._wait_long(keys, time.monotonic(), lambda: self._refuse_beat(keys))
        found = self._wait(keys, lambda: self._store.multi_get(keys))
        self._beats.all_have_met()
        return [pickle.loads(data) for data in found]

    def announce(self, record: Any, leads: bool) -> None:
        number, self._log = self._log, self._log + 1
        if leads:
            self.post(f"log/{number}", record)

    @property
    def records(self) -> int:
        return self._log

    def follow(self, meanwhile: Callable[[], None] | None = None) -> Any:
        number, self._log = self._log, self._log + 1
        return self.read(f"log/{number}", meanwhile)

    @_naming_failures
    def post(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))

    @_naming_failures
    def posted(self, key: str) -> bool:
        return bool(self._store.check([key]))

    @_naming_failures
    def read(self, key: str, meanwhile: Callable[[], None] | None = None) -> Any:
        if meanwhile is not None:
            self._wait_long([key], time.monotonic(), meanwhile)
        return pickle.loads(self._wait_for(key))

    @_naming_failures
    def add(self, key: str, number: int) -> int:
        return int(self._store.add(key, number))

    def delete(self, key: str) -> None:
        self._read.append(key)

    def forget(self, delete: bool = True) -> None:
        for number in range(self._forgotten, self._log) if delete else ():
            self.delete(f"log/{number}")
        self._forgotten = self._log

    @_naming_failures
    def correct(self, length: int) -> None:
        self._store.append(f"corrections/{self._gathers}", f"{self.rank} {length}\n")

    @_naming_failures
    def corrections(self) -> dict[int, int]:
        if not self._store.check([f"corrections/{self._gathers}"]):
            return {}
        lines = self._store.get(f"corrections/{self._gathers}").decode().split()
        lengths = dict(zip(map(int, lines[::2]), map(int, lines[1::2]), strict=True))
        if _NOBODY in lengths:
            raise self.failure() or PeerFailedError("Another rank failed.")
        return lengths

    @property
    def beats(self) -> int:
        return self._beats.number

    @property
    def position(self) -> Any:
        return self._beats.position

    def skip_to(self, position: Any) -> None:
        self._beats.skip_to(position)

    def fail(self, reason: str, rank: int | None = None) -> None:
        try:
            # The first one counts.
            self._store.compare_set("failure", "", json.dumps([self.rank if rank is None else rank, reason]))
            # The others can only be waiting for what this rank would have said next, or look before a step.
            self._store.set(f"go/{self.beats}", _FAILED)
            self._store.set(f"gather/{self._gathers}/{self.rank}", _FAILED)
            self._store.set(f"log/{self._log}", _FAILED)
            self._store.append(f"corrections/{self._gathers}", f"{_NOBODY} 0\n")
        except RuntimeError:  # the store went down with its host: nobody is left to tell
            pass

    def failure(self) -> PeerFailedError | None:
        try:
            if not self._store.check(["failure"]):
                return None
            rank, reason = json.loads(self._store.get("failure"))
        except RuntimeError:
            return PeerFailedError(
                "The rank that hosts the job's key-value store (as a rule rank 0) is gone: it was"
                " killed or has exited early. Its own log says why."
            )
        if rank == self.rank:
            return None
        return PeerFailedError(f"Rank {rank} failed, so rank {self.rank} cannot go on. Rank {rank}: {reason}")

    def roll_call(self) -> dict[int, Any]:
        if self._presence is None:
            return {rank: [False, None] for rank in range(self.world_size)}
        return self._presence.call(enough=lambda: self.failure() is not None)

    def leave(self) -> None:
        if self._presence is not None:
            self._presence.leave()

    def close(self) -> None:
        self.leave()
        for index in range(max(0, self._gathers - 2), self._gathers):
            self.delete(f"gather/{index}/{self.rank}")
        self._beats.close()
        with suppress(RuntimeError):  # whoever hosts the store may be gone already
            delete_all(self._store, self._read)

    def _place(self) -> Any:
        return [self._waits, self.status()]

    def _wait_for(self, key: str) -> bytes:
        return self._wait([key], lambda: [self._store.get(key)])[0]

    def _wait(self, keys: list[str], read: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        self._waits = True
        start = time.monotonic()
        try:
            found = read()
        except _compat.store_error():
            self._wait_long(keys, start)
            found = read()
        finally:
            self._waits = False
        if _FAILED in found:
            raise self.failure() or PeerFailedError("Another rank failed.")
        return found

    def _refuse_beat(self, keys: list[str]) -> None:
        # A rank that has met this one here comes to the next beat later, when all keys are there.
        if self._beats.somebody_came() and not self._store.check(keys):
            raise JoinError(
                f"Rank {self.rank} came to something that all ranks do together (a metric's compute(), a loop over"
                " join.batches) while another rank is at the next forward of its loop. Ranks leave a plain `for` at"
                " different steps: use `for batch in join.batches(loader)`, which all leave together, or do it after"
                " the `with`."
            )

    def _wait_long(self, keys: list[str], start: float, meanwhile: Callable[[], None] | None = None) -> None:
        deadline, next_look = start + self._timeout.total_seconds(), start
        next_probe = start + _PATIENCE.total_seconds()
        while not self._store.check(keys):
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
            raise PeerFailedError(
                f"The process of {name_ranks(gone)} is gone: killed, or ended without a word. Its own log, or the"
                " system's (a lack of memory, for example), says why."
            )

    def _timed_out(self) -> JoinError:
        answers = self.roll_call()
        if (failure := self.failure()) is not None:
            return failure
        waited = f"Rank {self.rank} waited {self._timeout.total_seconds():.0f} s for the other ranks"
        return timed_out(waited, self.world_size, answers, self.explain)
