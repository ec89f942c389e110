"""Opening a channel over connections between the ranks, or where there are none over a store."""

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from torch_join._base import compat as _compat
from torch_join._base.compat_groups import is_gone
from torch_join._base.errors import JoinTimeoutError, PeerFailedError, UnsupportedError
from torch_join._control._links.tree import Tree
from torch_join._control._links.tree_channel import TreeChannel
from torch_join._control._links.wiring import wire
from torch_join._control.beside import beside
from torch_join._control.channel import Channel
from torch_join._control.codec import foreign
from torch_join._control.failures import telling_failures
from torch_join._control.quiesce import quiesce_at_exit
from torch_join._control.store_channel import StoreChannel
from torch_join._control.waiting import GONE, STORE_GONE, failed

T = TypeVar("T")

_SWITCH = "TORCH_JOIN_LINKS"
_CONNECTING = timedelta(seconds=30)
_TELLS_WITHIN = 10.0  # seconds, in which a rank that misses another one may yet come to tell all
_ASKS_AFTER, _ASKS_EVERY = 0.1, 2.0  # whether a rank is gone


# Two per group, to the job's store, or to one of ours, which the group's first rank serves with the first of them. Both
# are made here, before anything is trained: torch's server looks up the name of whoever connects, and serves nobody
# meanwhile, which has been seen to take ten seconds.
_connections: WeakKeyDictionary[dist.ProcessGroup, tuple[Any, Any]] = WeakKeyDictionary()
_trees: WeakKeyDictionary[dist.ProcessGroup, Tree] = WeakKeyDictionary()
_flat: WeakSet[dist.ProcessGroup] = WeakSet()  # those whose ranks cannot be connected


def open_channel(group: dist.ProcessGroup | None = None, timeout: timedelta = timedelta(minutes=30)) -> Channel:
    """Open a channel between the ranks of `group`; every rank of it must call this, in the same order.

    The first one over a group connects its ranks, which the job's store is used for; where that cannot be done, or
    `TORCH_JOIN_LINKS=0` is set on all ranks, all channels go over that store: a `TCPStore`, or where the job was
    started from another kind of store, one that the group's first rank serves.

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
    if os.environ.get(_SWITCH) == "0":
        return _over_store(job, group, timeout)
    if (tree := _trees.get(group)) is None and group not in _flat:
        channel = _over_store(job, group, timeout, is_watchful=True)
        try:
            with telling_failures(channel):
                made = wire(channel, group)
            channel.finish()
        except BaseException:
            channel.leave()
            raise
        if isinstance(made, Tree):
            _connections.pop(group, None)
            _trees[group] = tree = made
        elif made is False:  # and not `None`: the device is not known yet, and the next channel may be better
            _flat.add(group)
    if tree is None:
        return _over_store(job, group, timeout)
    return TreeChannel(tree, rank, world_size, timeout, group)


def _over_store(job: Any, group: dist.ProcessGroup, timeout: timedelta, is_watchful: bool = False) -> StoreChannel:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    is_tcp = isinstance(_compat.innermost_store(job), dist.TCPStore)
    before = _connections.get(group)  # a thread that waits keeps no group alive

    def connect() -> tuple[str, Any, Any]:
        # Each rank counts its own calls in the job's store, so that all mean the same channel.
        name = f"torch_join/{job.add(f'torch_join/opened/{rank}', 1)}"
        if before is not None:
            return name, *before
        first: Any = job.clone() if is_tcp else _own_store(dist.PrefixStore("torch_join", job), rank, timeout)
        return name, first, first.clone()

    name, first, second = _unless_gone(connect, group)
    _connections[group] = first, second
    first, second = dist.PrefixStore(name, first), dist.PrefixStore(name, second)
    hosts = (dist.get_rank() if is_tcp else rank) == 0
    return StoreChannel(first, rank, world_size, timeout, group, second, hosts, is_watchful)


def _unless_gone(connect: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Return what `connect` does: torch tries to reach a server that is gone for as long as any other.

    Raises:
        PeerFailedError: The process of a rank of the group has ended.
    """
    rank, names = dist.get_rank(group), dist.get_process_group_ranks(group)
    others = [peer for peer in range(len(names)) if peer != rank]
    start = time.monotonic()
    missed: tuple[int, float] | None = None  # whom, and since when
    asks_at = start + _ASKS_AFTER

    def look(now: float) -> None:
        nonlocal missed, asks_at
        if missed is None and now > asks_at:
            asks_at = now + min(now - start, _ASKS_EVERY)  # each question leaves some bytes with who is asked
            gone = next((peer for peer in others if is_gone(group, peer)), None)
            missed = None if gone is None else (gone, now)
        # Who is connected is told by all whom they miss, and names the same one; but the first rank may be the server.
        if missed is not None and (missed[0] == 0 or now > missed[1] + _TELLS_WITHIN):
            raise failed(names[missed[0]], names[rank], GONE)

    try:
        return beside(connect, lambda: look(time.monotonic()))
    except dist.DistNetworkError as error:
        asks_at = start
        look(time.monotonic() + _TELLS_WITHIN)
        if _is_local(error):
            raise
        raise PeerFailedError(STORE_GONE) from error


def _is_local(error: BaseException) -> bool:
    """Whether an error of a store is of one that nobody has reached: of this host, perhaps, and not of the store's."""
    return not any(sign in str(error) for sign in ("recv", "send", "reset by peer", "Broken pipe"))


def _own_store(job: dist.Store, rank: int, timeout: timedelta) -> dist.Store:
    here = socket.gethostname()
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        job.set("address", f"{here} {server.port}")
        return server
    try:
        job.wait(["address"], timeout)
    except RuntimeError as error:
        raise JoinTimeoutError(
            f"Rank {dist.get_rank()} waited for the store of the group's first rank: {error}"
        ) from error
    host, port = _address(job.get("address"))
    # On one machine the name need not resolve, so do not rely on it.
    host = "127.0.0.1" if host == here else host
    try:
        # It is there already, or its process has ended: no reason to wait for long.
        limit = min(timeout, _CONNECTING)
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise JoinTimeoutError(
            f"Rank {dist.get_rank()} cannot reach the store of the group's first rank: {error}"
        ) from error


def _address(data: bytes) -> tuple[str, str]:
    try:
        host, port = data.decode().split()
        if 0 < int(port) < 1 << 16:
            return host, port
    except ValueError:
        pass
    raise foreign("'address'", f"{data[:60]!r} in place of a host and a port")
