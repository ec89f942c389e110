"""Opening a channel over the job's own store, or one of ours."""

import socket
import threading
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torch_join import _compat
from torch_join._channel import Channel
from torch_join._errors import JoinTimeoutError
from torch_join._store_channel import StoreChannel

_CONNECTING = timedelta(seconds=30)


class _Connections:
    """Two connections per group, as long as it lives; the second is made when it is first needed."""

    def __init__(self, first: Any) -> None:
        self.first = first
        self._second: Any = None
        self._lock = threading.Lock()

    def second(self) -> Any:
        with self._lock:
            self._second = self._second or self.first.clone()
            return self._second


# To the job's store, or to one of ours, which the group's first rank serves with the first of them.
_connections: WeakKeyDictionary[dist.ProcessGroup, _Connections] = WeakKeyDictionary()


def open_channel(group: dist.ProcessGroup | None = None, timeout: timedelta = timedelta(minutes=30)) -> Channel:
    """Open a channel between the ranks of `group`; every rank of it must call this, in the same order.

    Uses a connection of its own to the job's `TCPStore` (no new port; it works wherever the job
    works); where the job was started from another kind of store, the group's first rank serves one.

    Args:
        group: The process group, by default the whole world.
        timeout: How long a rank waits for another one.

    Returns:
        The channel of this rank.

    Raises:
        JoinTimeoutError: The group's first rank did not open its store in time.

    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Channel()
    group = group or cast(dist.ProcessGroup, dist.group.WORLD)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    job: Any = _compat.group_store(group)
    # Each rank counts its own calls in the job's store, so that all mean the same channel.
    name = f"torch_join/{job.add(f'torch_join/opened/{rank}', 1)}"
    if group not in _connections:
        is_tcp = isinstance(_compat.innermost_store(job), dist.TCPStore)
        first: Any = job.clone() if is_tcp else _own_store(dist.PrefixStore("torch_join", job), rank, timeout)
        _connections[group] = _Connections(first)
    both = _connections[group]
    second = lambda: dist.PrefixStore(name, both.second())  # noqa: E731
    return StoreChannel(dist.PrefixStore(name, both.first), rank, world_size, timeout, group, second)


def _own_store(job: dist.Store, rank: int, timeout: timedelta) -> dist.Store:
    here = socket.gethostname()
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        job.set("address", f"{here} {server.port}")
        return server
    try:
        job.wait(["address"], timeout)
    except RuntimeError as error:
        raise JoinTimeoutError(f"Rank {rank} waited for the store of the group's first rank: {error}") from error
    host, port = job.get("address").decode().split()
    # On one machine the name need not resolve, so do not rely on it.
    host = "127.0.0.1" if host == here else host
    try:
        # It is there already, or its process has ended: no reason to wait for long.
        limit = min(timeout, _CONNECTING)
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise JoinTimeoutError(f"Rank {rank} cannot reach the store of the group's first rank: {error}") from error
