"""Opening a channel over the job's own store, or one of ours."""

import socket
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torch_join._base import compat as _compat
from torch_join._base.errors import JoinTimeoutError, UnsupportedError
from torch_join._control.channel import Channel
from torch_join._control.codec import foreign
from torch_join._control.quiesce import quiesce_at_exit
from torch_join._control.store_channel import StoreChannel

_CONNECTING = timedelta(seconds=30)


# Two per group, to the job's store, or to one of ours, which the group's first rank serves with the first of them. Both
# are made here, before anything is trained: torch's server looks up the name of whoever connects, and serves nobody
# meanwhile, which has been seen to take ten seconds.
_connections: WeakKeyDictionary[dist.ProcessGroup, tuple[Any, Any]] = WeakKeyDictionary()


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
        UnsupportedError: The job has no store.

    """
    if dist.is_initialized():
        quiesce_at_exit()
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Channel()
    group = group or cast(dist.ProcessGroup, dist.group.WORLD)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    job: Any = _compat.group_store(group)
    if type(job) is dist.Store:
        raise UnsupportedError(
            "The job's process group has no key-value store, over which ranks tell each other who has a batch: MPI's"
            " has none. Begin the job with another backend (`torchrun`, init_process_group('gloo') or 'nccl')."
        )
    # Each rank counts its own calls in the job's store, so that all mean the same channel.
    name = f"torch_join/{job.add(f'torch_join/opened/{rank}', 1)}"
    is_tcp = isinstance(_compat.innermost_store(job), dist.TCPStore)
    if group not in _connections:
        first: Any = job.clone() if is_tcp else _own_store(dist.PrefixStore("torch_join", job), rank, timeout)
        _connections[group] = first, first.clone()
    first, second = (dist.PrefixStore(name, connection) for connection in _connections[group])
    return StoreChannel(
        first, rank, world_size, timeout, group, second, hosts=(dist.get_rank() if is_tcp else rank) == 0
    )


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
    host, port = _address(job.get("address"))
    # On one machine the name need not resolve, so do not rely on it.
    host = "127.0.0.1" if host == here else host
    try:
        # It is there already, or its process has ended: no reason to wait for long.
        limit = min(timeout, _CONNECTING)
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise JoinTimeoutError(f"Rank {rank} cannot reach the store of the group's first rank: {error}") from error


def _address(data: bytes) -> tuple[str, str]:
    try:
        host, port = data.decode().split()
        if 0 < int(port) < 1 << 16:
            return host, port
    except ValueError:
        pass
    raise foreign("'address'", f"{data[:60]!r} in place of a host and a port")
