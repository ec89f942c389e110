"""A rank's place in the tree, and how it waits there."""

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
from torch_join._control._links.node import Node
from torch_join._control._links.portable import PortableLinks
from torch_join._control._links.stream import ChannelState

_READ_SECONDS = 0.05  # for which a wait reads at a time
# A core that is asleep takes 0.1 to 0.4 ms to hear of a message, and keeps the sender as long, which adds up where many
# are waited for in a step. More than these milliseconds gain nothing: what is awake slows down what shares a core. Any
# other wait is of a meeting, to which ranks come together as a rule: a barrier of two takes 23 us so, and 74 asleep,
# and less processor time.
_AWAKE_SECONDS, _BRIEFLY = 0.002, 0.0001
_LOOKS_EVERY = 16  # reads, where something comes within each


def has_epoll() -> bool:
    """Whether a process can read its connections in whatever thread waits, while another one sleeps."""
    return hasattr(select, "epoll") and hasattr(os, "eventfd")


class Tree:
    """This rank's node.

    Args:
        connections: To the neighbours.
        node: What handles their messages.
    """

    def __init__(self, connections: Mapping[int, socket], node: Node) -> None:
        self._has_cores = bool(connections) and len(node.processes) < (os.cpu_count() or 1)
        self.node = node
        kind = Links if has_epoll() else PortableLinks
        node.links = self.links = kind(connections, node.handle, node.look_after)
        self.channels: WeakValueDictionary[int, Any] = WeakValueDictionary()  # that are open, by their streams
        self.watch: object = None  # what watches them
        self.close = weakref.finalize(self, self.links.close)
        self.links.begin()

    @classmethod
    def of_one(cls) -> "Tree":
        """Return the tree of a world of one."""
        return cls({}, Node(Layout([""], 0), 0, {}, range(1), lambda _: None))

    def wait(
        self,
        ready: Callable[[], bool],
        look: Callable[[], None],
        stream: ChannelState | None = None,
        is_awake: bool = False,
    ) -> None:
        """Read until something is so; call `look` again and again, which may take its time.

        Args:
            ready: Whether it is so.
            look: Raises if it is not to be waited for any more.
            stream: `look` is called where a failure has come in it, or when nothing has come for 50 ms or much has;
                if there is none, at once and after each read.
            is_awake: Whether the core is kept awake for milliseconds and not only briefly, if every rank of this host
                has one.
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
                        look()
                    except JoinError:
                        if ready():  # it came before the failure that `look` has read of
                            return
                        raise
                if not is_reading:
                    is_reading = links.begin_reading()
                if links.messages[1] == seen:  # none that another thread has read since
                    links.read(_READ_SECONDS, awake_until)
                reads += 1
        finally:
            if is_reading:
                links.end_reading()
            else:
                links.resume()

    def part(self) -> None:
        """Wait until all is sent, and until the other end of a connection that broke has noticed, for seconds at most.

        It would take a rank that has left by then for one that was killed.
        """
        self.links.flush()
        if (stays := self.node.stays_until - time.monotonic()) > 0:  # to sleep for no time gives the core away, too
            time.sleep(stays)

    def open(self) -> tuple[int, ChannelState]:
        """Begin the next stream, as all ranks do; its messages may have come before. Return its number too."""
        node = self.node
        with self.links.lock:
            number, node.opened = node.opened, node.opened + 1
            stream = node.streams.setdefault(number, ChannelState())
            node.tell_who_is_lost()
        return number, stream
