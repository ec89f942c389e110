"""Exchanges messages over the ranks' process group, until the ranks are connected.

These collectives bypass the dispatcher, where a tap may listen. Gloo waits in them until its own timeout, and notices
only the end of ranks that it sends to or receives from. So each waiting rank also checks the other ranks' processes.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_join._base.devices import current_device
from torch_join._base.errors import JoinError, JoinTimeoutError, PeerFailedError
from torch_join._base.specs import copied_bytes
from torch_join._compat import groups as _compat
from torch_join._control import codec as _codec
from torch_join._control.peers import GONE, Peers
from torch_join._control.run_polling import run_polling

T = TypeVar("T")

_ASKS_AFTER, _ASKS_EVERY = 0.1, 1.0  # seconds between questions to gloo whether a rank is gone; each sends it bytes
_STAYS = 2.0  # seconds that a rank stays after it notices a failure, or other hosts would report this rank as failed
_COME_WITHIN = 60.0  # seconds for all further waits, once all ranks have met; connecting may take half of it
_BREAKS_WITHIN = 4.0  # seconds in which this rank tries to find out which rank has broken a collective


class SetUp:
    """One rank's side of the exchange.

    Args:
        group: The process group.
        timeout: How long this rank waits for others.

    Attributes:
        peers: The other ranks, with their processes once these are known.
        problem: This rank's error, to be sent in the next exchange.
    """

    problem = ""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.peers = Peers(self.rank, dist.get_process_group_ranks(group), {})
        self._device = torch.device("cpu") if _compat.can_send(group, "cpu") else current_device(group)
        self._wait_began = self._asks_at = 0.0
        self._until = self._come_until = math.inf  # deadlines of the current wait, and of all waits once ranks have met

    def meet(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            JoinTimeoutError: Some ranks have not come in time. Over gloo, rank 0 names them; other ranks name rank 0.
        """
        is_gloo = _compat.is_of_gloo(self._group)
        self._begin_to_wait(math.inf if is_gloo else time.monotonic() + self._timeout.total_seconds())
        with self._finding_the_cause():
            if is_gloo:
                run_polling(lambda: _compat.meet(self._group, self._timeout), self.check)
            else:
                self._gather(torch.zeros(1))
        self._come_until = time.monotonic() + _COME_WITHIN  # nearly the same on all ranks

    def exchange(self, value: T, of: Any) -> list[T]:
        """Return each rank's value, by rank; all ranks call this."""
        self._begin_to_wait(self._come_until)
        data = torch.frombuffer(bytearray(_codec.encode(value)), dtype=torch.uint8)
        with self._finding_the_cause():
            sizes = [int(size) for size in self._gather(torch.tensor([len(data)]))]
            try:
                if not 0 < min(sizes) <= max(sizes) <= _codec.MAX_BYTES:
                    raise _codec.Malformed(f"messages of {sizes} bytes")
                padded = torch.zeros(max(sizes), dtype=torch.uint8)
                padded[: len(data)] = data
                messages = [copied_bytes(each[:size]) for each, size in zip(self._gather(padded), sizes, strict=True)]
                return [_codec.decode(each, of) for each in messages]
            except _codec.Malformed as problem:
                raise _codec.foreign("the ranks' first message", problem) from None

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        timeout = timedelta(seconds=max(1.0, self._until - time.monotonic()))
        found = _compat.gather_directly(self._group, tensor.to(self._device), self.check, timeout)
        return [each.cpu() for each in found]

    # ------------------------------------------------------------ failures

    def check(self) -> None:
        """Raise if another rank's process has ended, or the wait has timed out. Waits call this repeatedly.

        It asks the system about processes on this host, including stopped ones, and gloo about those on other hosts.
        """
        now = time.monotonic()
        if (found := self.peers.find_failed({})) is None and now > self._asks_at:
            self._asks_at = now + min(now - self._wait_began, _ASKS_EVERY)
            others = {*range(self.world_size)} - {self.rank, *self.peers.processes}
            gone = [rank for rank in sorted(others) if _compat.is_gone(self._group, rank)]
            found = self.peers.first_of(dict.fromkeys(gone, GONE)) if gone else None
        if found is not None:
            if len(self.peers.processes) + 1 < self.world_size:
                time.sleep(_STAYS)
            raise self.peers.error(*found)
        if now > self._until + 1.0:
            raise self._late()

    def _begin_to_wait(self, until: float) -> None:
        self.peers.begin_to_watch()
        self._until, self._wait_began = until, time.monotonic()
        self._asks_at = self._wait_began + _ASKS_AFTER

    @contextmanager
    def _finding_the_cause(self) -> Iterator[None]:
        """If a collective inside fails, find out which rank broke it or did not come, and raise an error about it."""
        try:
            yield
        except JoinError:
            raise
        except _compat.NotHereError as error:
            raise self._late([error.rank]) from error
        except RuntimeError as error:
            if time.monotonic() > self._until - 0.5:
                raise self._late() from error
            deadline = time.monotonic() + _BREAKS_WITHIN
            while time.monotonic() < deadline:
                self.check()
                time.sleep(0.02)
            me = self.peers.global_ranks[self.rank]
            text = f"Rank {me} cannot connect, because its process group does not work. {type(error).__name__}: {error}"
            raise PeerFailedError(text) from error

    def _late(self, ranks: Sequence[int] = ()) -> JoinTimeoutError:
        me, others = self.peers.global_ranks[self.rank], [rank for rank in range(self.world_size) if rank != self.rank]
        missing = self.peers.name(ranks or others)
        if not ranks and len(others) > 1:
            missing = f"one or more of {missing}"
        waited = f"Rank {me} waited {time.monotonic() - self._wait_began:.0f} s for {missing}"
        gone = "killed, stopped, or cut off from the network"
        if self._come_until < math.inf:
            problem = f" {self.problem}" if self.problem else ""
            return JoinTimeoutError(
                f"{waited} while the ranks connected. A missing rank may have been {gone}.{problem}"
            )
        return JoinTimeoutError(
            f"{waited} to start its `with` (or fit), where the ranks connect. A missing rank may be busy elsewhere,"
            f" {gone}. Start it on all ranks, in the same order; if they arrive at different times, increase"
            " `timeout`."
        )
