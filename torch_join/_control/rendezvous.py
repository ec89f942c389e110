"""Opens a channel; the first one over a process group connects its ranks."""

from datetime import timedelta
from typing import cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torch_join._control._links.tree import Tree
from torch_join._control._links.wiring import wire
from torch_join._control.channel import TIMEOUT, Channel
from torch_join._control.exit_guard import drain_gloo_at_exit
from torch_join._control.failures import telling_failures

_trees: WeakKeyDictionary[dist.ProcessGroup, Tree] = WeakKeyDictionary()


def open_channel(group: dist.ProcessGroup | None = None, timeout: timedelta = TIMEOUT) -> Channel:
    """Open a channel between the ranks of `group`; all its ranks must call this, in the same order.

    The first channel over a group connects its ranks, which takes collectives of the group.

    Args:
        group: The process group, by default the whole world.
        timeout: How long a rank waits for another one.

    Returns:
        This rank's channel.

    Raises:
        JoinTimeoutError: Another rank did not come in time.
        PeerFailedError: Another rank has failed.
        UnsupportedError: The ranks cannot be connected.
    """
    if dist.is_initialized():
        drain_gloo_at_exit()
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Channel()
    group = group or cast(dist.ProcessGroup, dist.group.WORLD)
    if (tree := _trees.get(group)) is None:
        tree = wire(group, timeout)
        channel = Channel(tree, timeout)
        with telling_failures(channel):
            channel.close(meets=True)  # no rank leaves before all are connected
        _trees[group] = tree
    return Channel(tree, timeout)
