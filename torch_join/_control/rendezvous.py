"""Opening a channel: where it is the first one over a process group, its ranks are connected."""

from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torch_join._base.errors import UnsupportedError
from torch_join._compat import ddp as _compat
from torch_join._control._links.tree import Tree
from torch_join._control._links.wiring import wire
from torch_join._control.channel import TIMEOUT, Channel
from torch_join._control.exit_guard import drain_gloo_at_exit
from torch_join._control.failures import telling_failures
from torch_join._control.set_up import SetUp

_trees: WeakKeyDictionary[dist.ProcessGroup, Tree] = WeakKeyDictionary()


def open_channel(group: dist.ProcessGroup | None = None, timeout: timedelta = TIMEOUT) -> Channel:
    """Open a channel between the ranks of `group`; every rank of it must call this, in the same order.

    The first one over a group connects its ranks, which the job's store is used for.

    Args:
        group: The process group, by default the whole world.
        timeout: How long a rank waits for another one.

    Returns:
        The channel of this rank.

    Raises:
        JoinTimeoutError: Another rank did not come in time.
        PeerFailedError: Another rank has failed.
        UnsupportedError: The ranks cannot be connected, or the job has no store.
    """
    if dist.is_initialized():
        drain_gloo_at_exit()
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Channel()
    group = group or cast(dist.ProcessGroup, dist.group.WORLD)
    if (tree := _trees.get(group)) is None:
        tree = _trees[group] = _connect(group, timeout)
    return Channel(tree, timeout)


def tree_of(group: dist.ProcessGroup | None) -> Tree | None:
    """Return this rank's node, if the ranks of a group have been connected."""
    return None if group is None else _trees.get(group)


def _connect(group: dist.ProcessGroup, timeout: timedelta) -> Tree:
    job: Any = _compat.group_store(group)
    if type(job) is dist.Store:
        raise UnsupportedError(
            "The job's process group has no key-value store, over which ranks tell each other how they are reached:"
            " MPI's has none. Begin the job with another backend (`torchrun`, init_process_group('gloo') or 'nccl')."
        )
    inner = job
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    hosts = dist.get_rank() == 0 and isinstance(inner, dist.TCPStore)
    set_up = SetUp(job, dist.get_rank(group), dist.get_process_group_ranks(group), timeout, group, hosts)
    with set_up.telling():
        tree = wire(set_up, group)
    # No rank's process ends, and the store with it, before all have come out.
    channel = Channel(tree, timeout)
    # One that has failed as it came out has told so in the store, and not over the connections.
    channel.suspect, channel.looks_every = set_up.look, set_up.most_pause
    with telling_failures(channel):
        channel.close(meets=True)
    return tree
