"""Ranks that are threads of one process, each with a channel to the others: for what needs no process group.

They go over the same connections as ranks that are processes, and a run takes milliseconds.
"""

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch_join._control._links.layout import Layout
from torch_join._control._links.node import Node
from torch_join._control._links.tree import Tree
from torch_join._control.channel import Channel
from torch_join._control.peers import Peers


def trees(world_size: int) -> list[Tree]:
    """Return the trees of ranks that are connected, by rank."""
    return [make() for make in unmade(world_size)]


def unmade(world_size: int) -> list[Callable[[], Tree]]:
    """Return, by rank, what makes the tree of ranks that are connected already."""
    layouts = [Layout(["here"] * world_size, rank) for rank in range(world_size)]
    ends: list[dict[int, socket.socket]] = [{} for _ in layouts]
    for rank, layout in enumerate(layouts):
        for child in layout.children:
            ends[rank][child], ends[child][rank] = socket.socketpair()
    names = range(world_size)
    return [
        partial(Tree, its, Node(layout, Peers(rank, names, {}), lambda _: None))
        for rank, (its, layout) in enumerate(zip(ends, layouts, strict=True))
    ]


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 20.0) -> list[Any]:
    """Return what `function(channel, *args)` returns on each rank; the first error of a rank is raised."""
    made = trees(world_size)
    channels = [Channel(tree, timedelta(seconds=timeout)) for tree in made]  # all answer until the last one has ended
    outcomes: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def serve(rank: int) -> None:
        try:
            outcomes[rank] = function(channels[rank], *args)
        except BaseException as error:
            errors.append(error)
            channels[rank].fail(error)

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 10)
        assert not thread.is_alive(), "a rank does not end"
    for tree in made:
        tree.close()
    if errors:
        raise errors[0]
    return outcomes
