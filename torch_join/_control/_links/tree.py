"""A rank's node in the tree with its connections, and how the rank waits for messages."""

import os
import select
import time
import weakref
from collections.abc import Callable, Mapping
from socket import socket
from typing import Any
from weakref import WeakValueDictionary

from torch_join._base.errors import JoinError
from torch_join._control._links.layout import Layout
from torch_join._control._links.links import Links
from torch_join._control._links.node import ChannelState, Node
from torch_join._control._links.portable import PortableLinks
from torch_join._control.peers import Peers

_READ_SECONDS = 0.05  # the longest single read of a wait
# A sleeping core takes 0.1 to 0.4 ms to notice a message, and delays the sender as much. This adds up over many waits
# in a step. More than 2 ms gain nothing: a busy core slows down whatever shares it. Other waits are for
# meetings, where ranks usually arrive together: a barrier of two takes 23 us (asleep: 74), and less processor time.
_AWAKE_SECONDS, _BRIEFLY = 0.002, 0.0001
_LOOKS_EVERY = 16  # reads between two calls of `check`, if each read receives something


def has_epoll() -> bool:
    """Whether any waiting thread can read the connections, while the forwarding thread sleeps."""
    return hasattr(select, "epoll") and hasattr(os, "eventfd")


class Tree:
    """This rank's node and its connections.

    Args:
        connections: The connections to the neighbours.
        node: The node, which handles the neighbours' messages.
    """

    def __init__(self, connections: Mapping[int, socket], node: Node) -> None:
        self._has_cores = bool(connections) and len(node.peers.processes) < (os.cpu_count() or 1)
        self.node = node
        kind = Links if has_epoll() else PortableLinks
        node.links = self.links = kind(connections, node.handle, node.explain_ended)
        self.channels: WeakValueDictionary[int, Any] = WeakValueDictionary()  # the open channels, by stream
        self.watch: object = None  # a `Watch` of these channels
        self.close = weakref.finalize(self, self.links.close)
        self.links.begin()

    @classmethod
    def of_one(cls) -> "Tree":
        """Return the tree of a world of one."""
        return cls({}, Node(Layout([""], 0), Peers(0, range(1), {}), lambda _: None))

    def wait(
        self,
        ready: Callable[[], bool],
        check: Callable[[], None],
        stream: ChannelState | None = None,
        is_awake: bool = False,
    ) -> None:
        """Read until `ready`; call `check` repeatedly, which may take long.

        Args:
            ready: Returns whether the wait is over.
            check: Raises to end the wait.
            stream: If given, `check` is called only after a failure in it, after 50 ms without a message, and every 16
                reads; otherwise at once and after each read.
            is_awake: Whether to keep the core awake for 2 ms instead of 0.1 ms. Without a core for each rank of this
                host, it always sleeps.
        """
        links, is_reading, seen, reads = self.links, False, -1, 1
        awake_until = time.monotonic() + (_AWAKE_SECONDS if is_awake else _BRIEFLY) if self._has_cores else 0.0
        try:
            while True:
                is_quiet, seen = links.messages[1] == seen, links.messages[1]
                if ready():
                    return
                has_failed = stream is None or stream.failure is not None
                if has_failed or is_quiet or reads % _LOOKS_EVERY == 0:
                    if is_reading:
                        is_reading = links.end_reading()
                    try:
                        check()
                    except JoinError:
                        if ready():  # it arrived before the failure that `check` raised
                            return
                        raise
                if not is_reading:
                    is_reading = links.begin_reading()
                if links.messages[1] == seen:  # no other thread has read one since
                    links.read(_READ_SECONDS, awake_until)
                reads += 1
        finally:
            if is_reading:
                links.end_reading()
            else:
                links.resume()

    def part(self) -> None:
        """Wait for seconds at most until all data is sent, and the other end of a broken connection has noticed.

        If this rank left earlier, the other end would report that it was killed.
        """
        self.links.flush()
        if (remaining := self.node.stays_until - time.monotonic()) > 0:  # even `sleep(0)` would yield the core
            time.sleep(remaining)

    def open(self) -> tuple[int, ChannelState]:
        """Open the next stream, with any messages that came early; return its number, equal on all ranks, and state."""
        node = self.node
        with self.links.lock:
            number, node.opened = node.opened, node.opened + 1
            stream = node.streams.setdefault(number, ChannelState())
            node.report_lost()
        return number, stream
