"""The channel over a key-value store.

Why a store and not collectives: on two gloo ranks one `beat` takes 0.17 ms where the smallest
all-reduce takes 0.4 to 1.0 ms (and 0.3 against 3.5 ms on three ranks of two cores); it never
touches the accelerator; and its order cannot collide with anybody's collectives.

The contract relied on: `add` and `append` are atomic, `get` and `multi_get` wait on the server until
the keys exist, `clone` opens a connection of its own.

A `beat` costs each rank one addition and as a rule at most one more request; a server was seen to take 79,000 additions
per second.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from torch_join._base.errors import JoinError, JoinValueError, PeerFailedError
from torch_join._control import codec as _codec
from torch_join._control.beats import MAX_RANKS, Beats
from torch_join._control.channel import Beat, Channel
from torch_join._control.presence import delete_all
from torch_join._control.waiting import FAILED, WaitingChannel

P = ParamSpec("P")
T = TypeVar("T")

_LOOKING_SECONDS = 5.0  # after which rank 0 looks for those that have not come out of a loop with it
_NOBODY = -1  # in place of the rank of a corrected length: a rank has failed


def _naming_failures(method: Callable[P, T]) -> Callable[P, T]:
    """Have a method say who has failed, if the store has hung up, and what is wrong with a number."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        channel: Any = args[0]
        try:
            return method(*args, **kwargs)
        except dist.DistNetworkError as error:
            raise channel._lost() or error from error
        except _codec.Malformed as problem:
            raise channel._published(_codec.foreign("a number of a meeting", problem)) from None

    return call


class StoreChannel(WaitingChannel, Channel):
    """A channel over a `torch.distributed` store; see `WaitingChannel` for its arguments."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        group: dist.ProcessGroup | None,
        second: dist.Store,
        hosts: bool,
    ) -> None:
        if world_size > MAX_RANKS:
            raise JoinValueError(f"A channel serves at most {MAX_RANKS} ranks, not {world_size}.")
        self._gathers = self._log = self._forgotten = self._loop = 0
        self._until_met: list[str] = []  # keys that all will have read when they have met
        Channel.__init__(self, rank, world_size)
        WaitingChannel.__init__(self, store, timeout, group, second, hosts)
        # Weakly, so that a channel that is dropped ends its thread at once.
        wait = weakref.WeakMethod(self._wait_for)
        self._beats = Beats(self._store, rank, world_size, lambda key: wait()(key), self._read.append)  # type: ignore[misc]

    @_naming_failures
    def say(
        self, count: int = 0, notice: dict[str, Any] | None = None, participants: int | None = None, waits: bool = True
    ) -> None:
        self._beats.say(count, notice, participants or self.world_size, waits)

    @_naming_failures
    def hear(self) -> Beat:
        return self._beats.hear()

    @_naming_failures
    def gather(self, value: T, unless_beat: bool = False, of: Any = Any) -> list[T]:
        data = _codec.encode(value)
        index, self._gathers = self._gathers, self._gathers + 1
        keys = [f"gather/{index}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], data)
        if index >= 2:
            self.delete(f"gather/{index - 2}/{self.rank}")
        meanwhile = (lambda: self._refuse_beat(keys)) if unless_beat else None
        found = self._wait(keys, meanwhile)
        self._all_have_met()
        return [self._decode(key, data, of) for key, data in zip(keys, found, strict=True)]

    def announce(self, record: Any, leads: bool) -> None:
        number, self._log = self._log, self._log + 1
        if leads:
            self.post(f"log/{number}", record)

    @property
    def records(self) -> int:
        return self._log

    def follow(self, meanwhile: Callable[[], None] | None = None, of: Any = Any) -> Any:
        number, self._log = self._log, self._log + 1
        return self.read(f"log/{number}", meanwhile, of)

    @_naming_failures
    def post(self, key: str, value: Any, until_met: bool = False) -> None:
        self._store.set(key, _codec.encode(value))
        if until_met:
            self._until_met.append(key)

    @_naming_failures
    def posted(self, key: str) -> bool:
        return bool(self._store.check([key]))

    @_naming_failures
    def read(
        self, key: str, meanwhile: Callable[[], None] | None = None, of: Any = Any, is_polled: bool = False
    ) -> Any:
        return self._decode(key, self._wait([key], meanwhile, not is_polled)[0], of)

    @_naming_failures
    def add(self, key: str, number: int) -> int:
        return int(self._store.add(key, number))

    def delete(self, key: str) -> None:
        self._read.append(key)

    def forget(self, delete: bool = True) -> None:
        for number in range(self._forgotten, self._log) if delete else ():
            self.delete(f"log/{number}")
        self._forgotten = self._log

    def begin_loop(self) -> None:
        self._loop = self._gathers

    @_naming_failures
    def correct(self, length: int) -> None:
        self._store.append(f"corrections/{self._loop}", _codec.encode((self.rank, length)).decode() + "\n")

    @_naming_failures
    def corrections(self) -> dict[int, int]:
        if not self._store.check([f"corrections/{self._loop}"]):
            return {}
        key = f"corrections/{self._loop}"
        lines = [self._decode(key, line, tuple[int, int]) for line in self._store.get(key).splitlines()]
        lengths = dict(lines)
        if _NOBODY in lengths:
            raise self.failure() or PeerFailedError("Another rank failed.")
        if not all(0 <= rank < self.world_size and length >= 0 for rank, length in lines):
            raise self._published(_codec.foreign(repr(key), f"{_codec.brief(lines)} in place of ranks and lengths"))
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
            self._tell(reason, self.rank if rank is None else rank)
            # The others can only be waiting for what this rank would have said next, or look before a step.
            self._store.set(f"go/{self.beats}", FAILED)
            self._store.set(f"gather/{self._gathers}/{self.rank}", FAILED)
            self._store.set(f"log/{self._log}", FAILED)
            self._store.append(f"corrections/{self._loop}", _codec.encode((_NOBODY, 0)).decode() + "\n")
        except RuntimeError:  # the store went down with its host: nobody is left to tell
            pass

    def finish(self) -> None:
        self.gather(None)
        if self.rank != 0:
            self.post(f"finished/{self.rank}", None)
        else:
            self._wait_until_finished({rank: f"finished/{rank}" for rank in range(1, self.world_size)})
        self.close()

    @_naming_failures
    def _wait_until_finished(self, keys: dict[int, str]) -> None:
        # Not as for a message: whoever has left answers no roll call, and nothing is wrong with that any more.
        pause, start = 0.001, time.monotonic()
        next_look = start + _LOOKING_SECONDS
        while not self._store.check([*keys.values()]):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if (now := time.monotonic()) > next_look:
                next_look = now + _LOOKING_SECONDS
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                self._check_alive(missing, now - start)
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
        while self._until_met:
            self.delete(self._until_met.pop())

    def _use(self, store: Any) -> None:
        super()._use(store)
        self._beats.use(store)

    def _refuse_beat(self, keys: list[str]) -> None:
        # A rank that has met this one here comes to the next beat later, when all keys are there.
        if self._beats.somebody_came() and self._there(keys) is None:
            raise JoinError(
                f"Rank {self.rank} came to something that all ranks do together (a metric's compute(), a loop over"
                " join.batches) while another rank is at the next forward of its loop. Ranks leave a plain `for` at"
                " different steps: use `for batch in join.batches(loader)`, which all leave together, or do it after"
                " the `with`."
            )
