"""The channel over a key-value store.

Why a store and not collectives: on two gloo ranks one `beat` takes 0.17 ms where the smallest
all-reduce takes 0.4 to 1.0 ms (and 0.3 against 3.5 ms on three ranks of two cores); it never
touches the accelerator; and its order cannot collide with anybody's collectives.

The contract relied on: `add` and `append` are atomic, `get` and `multi_get` wait on the server until
the keys exist, `clone` opens a connection of its own.

A `beat` costs each rank one addition and as a rule at most one more request; a server was seen to take 79,000 additions
per second.

A wait is one request, which the server answers when the keys are there. It is not ended by a timeout, of which
torch would print warnings, unless the rank's own does: after some seconds, and as soon as a rank has failed, the
thread that answers roll calls writes into the keys that there is something to look at. Whoever waits for them then
looks again and again: whether they are there, whether a rank has failed, whether a process is gone.
"""

import copy
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torch_join._base.errors import JoinError, JoinValueError, PeerFailedError
from torch_join._control import codec as _codec
from torch_join._control.beats import MAX_RANKS, Beats
from torch_join._control.channel import Channel
from torch_join._control.messages import Messages, naming_failures
from torch_join._control.presence import Presence, call, delete_all
from torch_join._control.waiting import GONE, MOST_TEXT, WaitingChannel
from torch_join._control.watched_store import WatchedStore

T = TypeVar("T")

FAILED, _LOOK = b"failed", b"look"  # in place of a value: no JSON
# A wait this long is no longer latency: from then on the failure notices are looked at too.
_PATIENCE = 5.0  # seconds
_LIMIT = timedelta(seconds=8)  # longer than it takes until the thread wakes up a rank
_STAGGER = 0.02  # between ranks, of which the first wakes up all
_POLL_SECONDS = 0.05
_SHORT_POLL_SECONDS = 0.0003
_READING_SECONDS = 2.0  # for which the store's host waits until all have read of a failure


class StoreChannel(Messages, WaitingChannel, Channel):
    """A channel over a `torch.distributed` store.

    Args:
        store: A connection of this object's own.
        rank: This rank.
        world_size: The number of ranks.
        timeout: How long a rank waits for another one.
        group: The process group, whose connections tell of a process that has ended.
        second: Another connection, over which this rank answers roll calls while it waits.
        hosts: Whether the store may go down with this rank's process.
        is_watchful: Whether it looks all the time whether a rank has failed, which takes a request for each look.
    """

    say, hear = naming_failures(Messages.say), naming_failures(Messages.hear)

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        group: dist.ProcessGroup | None,
        second: dist.Store,
        hosts: bool,
        is_watchful: bool = False,
    ) -> None:
        if world_size > MAX_RANKS:
            raise JoinValueError(f"A channel serves at most {MAX_RANKS} ranks, not {world_size}.")
        watched: Any = store
        if is_watchful:
            watched = WatchedStore(store, weakref.WeakMethod(self._look_beside))
            self._looks_every, self._probes_after = 0.0, max(0.1, world_size / 2000)
            self._probes_every = self._probes_after
        self._is_watchful = is_watchful
        Messages.__init__(self)
        Channel.__init__(self, rank, world_size)
        WaitingChannel.__init__(self, watched, timeout, group)
        self._store.set_timeout(min(timeout, _LIMIT))
        self._read: deque[str] = deque()  # keys that all have read; deleting one takes as long as a beat
        self._hosts, self._failed = hosts, False
        self._late = ""  # a key that was not there, and that is looked for first: many keys are a long question
        # Weakly, so that a channel that is dropped ends its thread at once.
        self._presence = Presence(second, rank, world_size, weakref.ref(self), self._read)
        wait = weakref.WeakMethod(self._wait_for)
        self._beats = Beats(self._store, rank, world_size, lambda key: wait()(key), self._read.append)  # type: ignore[misc]

    @naming_failures
    def gather(self, value: T, unless_beat: bool = False, of: Any = Any) -> list[T]:
        self.before_meeting()
        data = _codec.encode(value)
        index, self._gathers = self._gathers, self._gathers + 1
        keys = [f"gather/{index}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], data)
        if index >= 2:
            self.delete(f"gather/{index - 2}/{self.rank}")
        meanwhile = (lambda: self._refuse_beat(lambda: self._there(keys) is not None)) if unless_beat else None
        found = self._wait(keys, meanwhile)
        self._all_have_met()
        return [self._decode(key, data, of) for key, data in zip(keys, found, strict=True)]

    def post(self, key: str, value: Any, until_met: bool = True) -> None:
        super().post(key, value, not key.startswith("finished/"))

    def delete(self, key: str) -> None:
        self._read.append(key)

    def fail(self, reason: str, rank: int | None = None) -> None:
        self._has_told = self._has_told or rank is None
        try:
            self._tell(reason, self.rank if rank is None else rank)
            # The others can only be waiting for what this rank would have said next, or look before a step.
            self._store.set(f"go/{self.beats}", FAILED)
            self._store.set(f"gather/{self._gathers}/{self.rank}", FAILED)
            self._store.set(f"log/{self._log}", FAILED)
        except RuntimeError:  # the store went down with its host: nobody is left to tell
            pass

    def finish(self) -> None:
        self.gather(None)
        if self.rank != 0:
            self.post(f"finished/{self.rank}", None)
        else:
            self._wait_until_finished({rank: f"finished/{rank}" for rank in range(1, self.world_size)})
        self.close()

    @naming_failures
    def _wait_until_finished(self, keys: dict[int, str]) -> None:
        # Not as for a message: whoever has left answers no roll call, and nothing is wrong with that any more.
        pause, start = 0.001, time.monotonic()
        next_look = start + self._probes_after
        while not self._store.check([*keys.values()]):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if (now := time.monotonic()) > next_look:
                next_look = now + max(self._probes_every, (now - start) / 2)
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                try:
                    self._check_alive(missing, now - start)
                except PeerFailedError:
                    if not self._store.check([keys[rank] for rank in missing]):  # else they have come, and ended since
                        raise
        for key in keys.values():
            self.delete(key)

    def close(self) -> None:
        self.leave()
        # Others may have yet to read what this rank gave to the last ones: who goes last deletes it.
        last = range(max(0, self._gathers - 2), self._gathers) if self.rank == 0 else ()
        for index in last:
            for rank in range(self.world_size):
                self.delete(f"gather/{index}/{rank}")
        self._all_have_met()
        self._beats.close()
        with suppress(RuntimeError):  # whoever hosts the store may be gone already
            delete_all(self._store, self._read)

    def _all_have_met(self) -> None:
        self._beats.all_have_met()
        super()._all_have_met()

    # ------------------------------------------------------------ failures

    def _tell(self, reason: str, rank: int) -> None:
        """Leave a notice, unless there is one, and have all ranks look at it."""
        self._failed = True
        self._store.compare_set("failure", "", _codec.encode((rank, reason[:MOST_TEXT])).decode())
        with suppress(_codec.Malformed):  # they look by themselves after some seconds
            call(self._store)

    def _look_beside(self) -> None:
        """Raise beside a request if a process of this host is stopped for a second, or rank 0 gone for as long.

        Rank 0 is the last to leave, and as a rule hosts the store, which hears of what is stopped when it goes on.
        """
        if not (found := self._in_the_way({0: GONE} if 0 in self._gone() else {})):
            return
        rank, why = self._first_of(found)
        if not self._failed:
            self._failed = True
            threading.Thread(target=self.fail, args=(why, rank), daemon=True).start()
        raise copy.copy(self._heard) or self._error_of(rank, why)

    def _call_roll(self, closed: Container[int]) -> dict[int, Any]:
        if gone := self._gone():
            rank, why = self._first_of(dict.fromkeys(gone, GONE))
            self.fail(why, rank)  # unless it has said why
        try:
            return self._presence.call(enough=lambda _: self.failure() is not None, closed=closed)
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
        readers = set(range(self.world_size)) - self._silent - {*self._gone()}

        def have_read(answers: dict[int, Any]) -> bool:
            return all(rank in answers or self._store.check([f"left/{rank}"]) for rank in readers)

        self._presence.call(have_read, within=_READING_SECONDS)

    def look(self, store: Any) -> None:
        """See `Rank.look`."""
        waits = self._waits
        if waits is not None and (self._heard is not None or time.monotonic() > waits[1]):
            for key in waits[0]:
                store.compare_set(key, "", _LOOK.decode())  # unless it is there

    def _lost(self) -> JoinError | None:
        """Say why the store has hung up on this rank."""
        # While the connections are made it does so for no request, and torch may take five seconds to ask the other.
        if self._is_watchful or (other := self._presence.connection) is None:
            return self.failure()
        self._use(other)
        # It does so if it is to add to what is no number.
        return self.failure() or self._published(_codec.foreign("a number", "it is none"))

    def _use(self, store: Any) -> None:
        self._store = store
        self._beats.use(store)

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
        polls = self._is_watchful or meanwhile is not None
        self._waits = keys if wakes and not polls else [], start + _PATIENCE + _STAGGER * (self.rank % 50)
        try:
            found: list[bytes] | None = None
            if not polls:
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
        if self._late in keys and not self._store.check([self._late]):
            return None
        if not self._store.check(keys):
            while len(keys) > 1:
                half = keys[: len(keys) // 2]
                keys = keys[len(half) :] if self._store.check(half) else half
            self._late = keys[0]
            return None
        found: list[bytes] = self._store.multi_get(keys)
        return None if _LOOK in found else found

    def _wait_long(self, keys: list[str], start: float, meanwhile: Callable[[], None] | None) -> list[bytes]:
        look, pause = self.vigil(start), _SHORT_POLL_SECONDS
        while (found := self._there(keys)) is None:
            if meanwhile is not None:
                meanwhile()
            try:
                look()
            except JoinError:
                if (found := self._there(keys)) is not None:  # they came before the failure that `look` has read of
                    return found
                raise
            time.sleep(pause)
            if meanwhile is None:
                pause = min(2 * pause, max(_POLL_SECONDS, self.world_size / 5000))
        return found
