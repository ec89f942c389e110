"""What ranks tell each other over the job's store, until they are connected.

A store has no end to a request where its server is stopped, and long ones where that is gone. So each is made in a
thread, beside which a rank looks whether others are there; it waits in steps, in which it looks for a failure that
another one has told of. The first rank collects what all have said, so that nobody else asks for many keys.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torch_join._base.errors import JoinTimeoutError, PeerFailedError, raise_any
from torch_join._compat import ddp as _compat
from torch_join._compat.groups import is_gone
from torch_join._control import codec as _codec
from torch_join._control.peers import GONE, MOST_TEXT, Peers
from torch_join._control.run_polling import run_polling

T = TypeVar("T")

_MOST_PAUSE = 0.05  # seconds between two looks; at more than 250 ranks longer, for the server's sake
_ASKS_AFTER, _ASKS_EVERY = 0.1, 2.0  # whether gloo knows that a rank is gone: each question leaves bytes with that one
_TELLS_WITHIN = 1.0  # seconds, in which a rank that has ended may have told why, or others of it
_BREAKS_WITHIN = 4.0  # seconds, in which it shows who has broken a collective
_ANSWERS_WITHIN = 5.0  # seconds, for which the store may take longer than all ranks do to come
_HEARS_WITHIN = 2.0  # seconds, for which the store's host waits until all have heard of a failure
STORE_GONE = (
    "The rank that hosts the job's key-value store (as a rule rank 0) is gone: it was killed or has exited early. Its"
    " own log says why."
)
STORE_SILENT = (
    "The rank that hosts the job's key-value store (as a rule rank 0) does not answer: its process is stopped, or its"
    " host, or the network to it, is gone."
)


class SetUp:
    """What one rank says, and hears.

    Args:
        store: The job's.
        rank: This rank.
        global_ranks: By rank, its number in the whole job.
        timeout: How long it waits for others.
        group: The process group, whose connections tell of a process that has ended.
        hosts: Whether the store ends with this process.

    Attributes:
        peers: The others; their processes, once they are known.
        most_pause: Seconds between two looks at the store, at most.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        global_ranks: Sequence[int],
        timeout: timedelta,
        group: dist.ProcessGroup | None = None,
        hosts: bool = False,
    ) -> None:
        self._store: Any = store
        self._group, self._hosts = group, hosts
        self.rank, self.world_size = rank, len(global_ranks)
        self.peers = Peers(rank, global_ranks, {})
        self._timeout = timeout.total_seconds()
        self.most_pause = max(_MOST_PAUSE, self.world_size / 5000)
        self._exchanges = 0
        self._begin_to_wait()
        # Each rank counts its own, so that all mean the same one.
        self._place = f"torch_join/{self._request(lambda: self._store.add(f'torch_join/opened/{self.rank}', 1))}"

    def exchange(self, value: T, of: Any) -> list[T]:
        """Meet all ranks, and return what each of them says, by rank."""
        place = f"{self._place}/{self._exchanges}"
        self._exchanges += 1
        self._begin_to_wait()
        data = _codec.encode(value)
        said = self._request(lambda: self._exchange([f"{place}/{rank}" for rank in range(self.world_size)], data))
        try:
            return list(_codec.decode(said, list[of]))
        except _codec.Malformed as problem:
            raise _codec.foreign("what ranks say at the begin", problem) from None

    def _exchange(self, keys: Sequence[str], data: bytes) -> bytes:
        store, every = self._store, f"{keys[0]}/all"
        store.set(keys[self.rank], data)
        if self.rank != 0:
            self._await([every])
            store.delete_key(keys[self.rank])
            return bytes(store.get(every))
        self._await(keys)
        if (before := self._exchanges - 2) >= 0:  # all have read what they said there
            for key in (f"{self._place}/{before}/0", f"{self._place}/{before}/0/all"):
                store.delete_key(key)
        said = _codec.in_list(map(_codec.Encoded, store.multi_get(keys)))
        store.set(every, said)
        return said

    def _await(self, keys: Sequence[str]) -> None:
        pause, deadline = 0.0005, time.monotonic() + self._timeout
        for key in keys:
            while not self._store.check([key]):
                raise_any(self._told())
                if time.monotonic() > deadline:
                    raise self._timed_out()
                time.sleep(pause)
                pause = min(2 * pause, self.most_pause)

    def _timed_out(self) -> JoinTimeoutError:
        place = f"{self._place}/{self._exchanges - 1}"
        missing = [rank for rank in range(self.world_size) if not self._store.check([f"{place}/{rank}"])]
        me = self.peers.global_ranks[self.rank]
        return JoinTimeoutError(
            f"Rank {me} waited {self._timeout:.0f} s for {self.peers.name(missing or [0])} to begin its `with` (or fit)"
            " too, where the ranks are connected: at work elsewhere, killed, or stopped. Begin it on all ranks, in the"
            " same order; if they come at such different times, raise `timeout`."
        )

    # ------------------------------------------------------------ failures

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks what ends this one inside, and say who has broken a collective."""
        try:
            yield
        except PeerFailedError:  # which has been told, or read
            raise
        except BaseException as error:
            if _compat.is_communication_error(error):
                self._find_cause(error)
            self._tell(f"{type(error).__name__}: {error}", self.rank)
            raise

    def look(self) -> None:
        """Raise if a rank has failed: to be called again and again in a wait for others."""
        self._look_at_peers()
        self._request(lambda: raise_any(self._told()))

    def _request(self, act: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._timeout + _ANSWERS_WITHIN

        def look() -> None:
            self._look_at_peers()
            if time.monotonic() > deadline:
                me = self.peers.global_ranks[self.rank]
                raise JoinTimeoutError(f"Rank {me} waited {self._timeout:.0f} s to be connected. {STORE_SILENT}")

        try:
            return run_polling(act, look)
        except dist.DistNetworkError as error:
            self._find_cause(error)
            raise PeerFailedError(STORE_GONE) from error

    def _find_cause(self, error: BaseException) -> None:
        """Raise if it shows who is the cause of an error."""
        is_of_store = isinstance(error, dist.DistNetworkError)
        deadline = time.monotonic() + (_TELLS_WITHIN if is_of_store else _BREAKS_WITHIN)
        while time.monotonic() < deadline:
            if is_of_store:
                self._look_at_peers()
            else:
                self.look()
            time.sleep(0.02)

    def _begin_to_wait(self) -> None:
        self.peers.begin_to_watch()
        self._begun = time.monotonic()
        self._asks_at = self._begun + _ASKS_AFTER

    def _look_at_peers(self) -> None:
        """Raise if a process of this host is gone, or stopped for a second; or gone as gloo knows."""
        if (found := self.peers.find_failed({})) is None and (now := time.monotonic()) > self._asks_at:
            self._asks_at = now + min(now - self._begun, _ASKS_EVERY)
            others = {*range(self.world_size)} - {self.rank, *self.peers.processes}
            gone = [rank for rank in sorted(others) if self._group is not None and is_gone(self._group, rank)]
            found = self.peers.first_of(dict.fromkeys(gone, GONE)) if gone else None
        if found is None:
            return
        rank, why = found
        # One that has raised has told so before its end; and whoever notices first tells.
        raise self._tell(why, rank) or self.peers.error(rank, why)

    def _told(self) -> PeerFailedError | None:
        """Return the failure that a rank has told of."""
        if not self._store.check([f"{self._place}/failure"]):
            return None
        try:
            rank, reason = _codec.decode(self._store.get(f"{self._place}/failure"), tuple[int, str])
        except _codec.Malformed as problem:
            return PeerFailedError(str(_codec.foreign("a failure", problem)))
        self._store.set(f"{self._place}/heard/{self.rank}", "")
        if rank == self.rank:
            me = self.peers.global_ranks[rank]
            return PeerFailedError(f"The others go on, or end, without rank {me}: {reason}")
        return self.peers.error(rank, reason)

    def _tell(self, reason: str, rank: int) -> PeerFailedError | None:
        """Tell of a failure, unless one is known; return what is.

        Whoever fails itself, or is the store's host, waits until the others have heard: its process may end.
        """
        told: list[PeerFailedError | None] = []
        stays = self._hosts or rank == self.rank

        def tell() -> None:
            with suppress(Exception):
                value = _codec.encode((rank, reason[:MOST_TEXT])).decode()
                self._store.compare_set(f"{self._place}/failure", "", value)
                told.append(self._told())
                deadline = time.monotonic() + _HEARS_WITHIN
                others = {*range(self.world_size)} - {self.rank, rank, *self.peers.gone()}
                heard = [f"{self._place}/heard/{other}" for other in others]
                while stays and time.monotonic() < deadline and not self._store.check(heard):
                    time.sleep(0.02)

        thread = threading.Thread(target=tell, name="torch_join telling", daemon=True)
        with suppress(RuntimeError):  # the interpreter ends
            thread.start()
            thread.join(_TELLS_WITHIN + (_HEARS_WITHIN if stays else 0.0))  # it hangs where the server is stopped
        return next(filter(None, told), None)
