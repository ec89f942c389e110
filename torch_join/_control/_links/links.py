"""Connections of one process to its neighbours in a tree. No call here waits for a neighbour.

While a process computes, one thread forwards the messages between its neighbours. A thread that waits for a message
reads the connections itself, and the forwarding thread sleeps. It sleeps on a second epoll that contains the first one
as a file, and one call removes that file. (With two ranks, a message takes 120 to 144 us through the forwarding thread,
46 to 62 us if the waiting thread reads it.) The forwarding thread also sleeps after this process has announced a read:
a thread that wakes up in the middle of a step takes the interpreter's lock and a core from the step.

A forked child process has copies of all descriptors, and would keep the connections of a dead parent open, so it closes
them at once.

Contract: An epoll descriptor is readable when some of its files are (epoll(7)). Bytes that a process sent before it
ended are read before the end of the connection.
"""

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

_HEADER = struct.Struct("<IBI")  # number of bytes that follow, kind, stream
MAX_BYTES = 1 << 30  # of one message, and of the unsent data of one connection
# With these options, this process notices after about 40 seconds that a host or the network to it is gone. The last one
# (in milliseconds) applies while a message is being sent, when the system sends no keepalives.
_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 40_000}
_READ_BYTES = 1 << 16  # allocated for each read; allocating twice as many takes a system call, and 13 us more
_BYE = 255  # the kind of the last message, before a process closes its connections
_LOOKS_FOR = 1.0  # seconds of checks after a connection has ended
_LOOKS_EVERY = 0.02
_FLUSH_SECONDS = 2.0
_READS_WITHIN = 0.1  # seconds after which the thread reads for a process that has announced a read

Handle = Callable[[int, int, int, bytes], None]  # called with sender, kind, stream and payload


class Link:
    """A connection with its incomplete messages.

    Args:
        connection: The socket.
        peer: The neighbour's rank.

    Attributes:
        incoming: The part of a message received so far.
        outgoing: The data still to be sent.
    """

    def __init__(self, connection: socket.socket, peer: int) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _ALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket = connection
        self.peer = peer
        self.incoming = bytearray()
        self.outgoing = bytearray()

    def messages(self, data: bytes) -> Iterable[tuple[int, int, bytes] | None]:
        """Iterate over the messages that `data` completes: kind, stream, payload.

        Yields `None` instead of a message that is too long, and then stops.
        """
        if not self.incoming and len(data) >= _HEADER.size:  # usually exactly one message
            length, kind, stream = _HEADER.unpack_from(data)
            if len(data) == _HEADER.size + length:
                return ((kind, stream, data[_HEADER.size :]),)
        return self._parts(data)

    def _parts(self, data: bytes) -> Iterator[tuple[int, int, bytes] | None]:
        # Keep all data first: a signal handler may wait, and read further data, while a message is being handled.
        self.incoming += data
        while len(self.incoming) >= _HEADER.size:
            length, kind, stream = _HEADER.unpack_from(self.incoming)
            if length > MAX_BYTES:
                yield None
                return
            end = _HEADER.size + length
            if len(self.incoming) < end:
                return
            payload = bytes(self.incoming[_HEADER.size : end])
            del self.incoming[:end]
            yield kind, stream, payload


class Links:
    """The connections of this process.

    Args:
        connections: The sockets, by rank.
        handle: Called with each message, in order and one at a time, in the thread that reads it.
        lost: Called repeatedly in the forwarding thread with the ranks whose connections ended without a goodbye, and
            the seconds since then.

    Attributes:
        lock: Held while a message is handled.
        reads_deferred: Whether the thread sleeps until this process reads; see `defer_reads`.
        left: The ranks that have sent a goodbye.
        messages: The numbers of messages sent and received.
    """

    def __init__(
        self, connections: Mapping[int, socket.socket], handle: Handle, lost: Callable[[Mapping[int, float]], None]
    ) -> None:
        self.lock = threading.RLock()
        self.left: set[int] = set()
        self.messages = [0, 0]
        self._handle = handle
        self._lost = lost
        self._links = {peer: Link(connection, peer) for peer, connection in connections.items()}
        self._takers = {**self._links}  # the links that still accept data; the others may still be read
        self._by_file = {link.socket.fileno(): link for link in self._links.values()}
        self._ended: dict[int, float] = {}  # by rank, when its connection ended
        self._readers = 0  # the number of waiting threads, which read themselves
        self._is_taking = False
        self.reads_deferred = False
        self._deferrals = 0  # the number of calls of `defer_reads`
        self._pause: float | None = None  # the longest sleep of the thread
        self._closing = not connections  # a world of one
        if self._closing:
            return
        self._open()
        self._thread = threading.Thread(target=self._forward, name="torch_join links", daemon=True)
        _alive.add(self)

    def begin(self) -> None:
        """Start the thread; from now on it may call `handle` and `lost`."""
        if not self._closing:
            self._thread.start()

    # ------------------------------------------------------------ overridden in `PortableLinks`

    def _open(self) -> None:
        self._inner, self._outer = select.epoll(), select.epoll()
        for file in self._by_file:
            self._inner.register(file, select.EPOLLIN)
        self._inner_file = self._inner.fileno()
        self._outer.register(self._inner_file, select.EPOLLIN)
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outer.register(self._alarm, select.EPOLLIN)

    def _wake(self) -> None:
        """Wake the thread."""
        os.eventfd_write(self._alarm, 1)

    def _watch(self, link: Link, writes: bool) -> None:
        """Make polls report data to read from this link and, if `writes`, room to send."""
        self._inner.modify(link.socket.fileno(), select.EPOLLIN | (select.EPOLLOUT if writes else 0))

    def _unwatch(self, link: Link) -> None:
        self._inner.unregister(link.socket.fileno())

    def _close_files(self) -> None:
        self._inner.close()
        self._outer.close()
        os.close(self._alarm)

    # ------------------------------------------------------------ for other modules

    @property
    def files(self) -> frozenset[int]:
        """The file descriptors of the connections."""
        return frozenset(self._by_file)

    def send(self, peers: Iterable[int], kind: int, stream: int, payload: bytes) -> None:
        """Send a message to each peer; if there is no room for all of it, the rest is sent later."""
        message = _HEADER.pack(len(payload), kind, stream) + payload
        with self.lock:
            for peer in peers:
                if (link := self._takers.get(peer)) is not None:  # else a waiting thread finds that it is gone
                    self._send(link, message)

    def _send(self, link: Link, message: bytes) -> None:
        self.messages[0] += 1
        if link.outgoing:
            link.outgoing += message
            if len(link.outgoing) > 2 * MAX_BYTES:
                self._end(link)
            return
        try:
            sent = link.socket.send(message)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._stop_sending(link)
            return
        if sent < len(message):
            link.outgoing += message[sent:]
            self.resume()
            self._watch(link, writes=True)

    def begin_reading(self) -> bool:
        """Start a wait, in which this thread reads and the forwarding thread sleeps; return `True`."""
        with self.lock:
            self._readers += 1
            if self._readers == 1 and not self._closing:
                self._outer.modify(self._inner_file, 0)
                self.reads_deferred = False
        return True

    def end_reading(self) -> bool:
        """End a wait, after which this thread no longer reads; return `False`."""
        with self.lock:
            self._readers -= 1
            if self._readers == 0 and not self._closing:
                self._outer.modify(self._inner_file, select.EPOLLIN)
        return False

    def defer_reads(self) -> None:
        """Note that this process is about to read; the thread sleeps until then, for a short time at most."""
        with self.lock:
            self._deferrals += 1
            unsent = any(link.outgoing for link in self._links.values())
            if not (self.reads_deferred or self._readers or self._closing or unsent):
                self.reads_deferred = True
                self._outer.modify(self._inner_file, 0)
                if self._pause is None:
                    self._wake()

    def resume(self) -> None:
        """Make the thread read messages at once again, if reads are deferred."""
        if self.reads_deferred:
            with self.lock:
                if self.reads_deferred and not self._closing:
                    self._outer.modify(self._inner_file, select.EPOLLIN)
                    self.reads_deferred = False

    def read(self, seconds: float = 0.0, awake_until: float = 0.0) -> None:
        """Handle the messages that have come; if there are none, wait for some, which needs `begin_reading` first.

        Args:
            seconds: The longest wait.
            awake_until: Until when, by `time.monotonic`, to keep the core awake in this wait.
        """
        if self._closing or (not seconds and (self._readers or self._is_taking)):
            time.sleep(seconds)
            return  # a waiting thread, or the code that this handler interrupted, is reading
        found = None
        if seconds:  # without the lock, so that other threads can send
            while awake_until and time.monotonic() < awake_until and not (found := self._inner.poll(0)):
                os.sched_yield()
            found = found or self._inner.poll(seconds)
        with self.lock:
            if not self._closing:
                self._is_taking = True
                try:
                    self._take(self._inner.poll(0) if found is None else found)
                finally:
                    self._is_taking = False

    def flush(self) -> None:
        """Wait until all data is sent, for a few seconds at most."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        self.begin_reading()
        try:
            while time.monotonic() < deadline and any(link.outgoing for link in self._links.values()):
                self.read(0.01)
        finally:
            self.end_reading()

    def close(self) -> None:
        """End the thread and the connections."""
        if self._closing:  # in a forked child too
            return
        self.send(self._links, _BYE, 0, b"")
        self.flush()
        with self.lock:
            self._closing = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._drop()

    def drop_in_child(self) -> None:
        """Only close the descriptors, since the connections belong to the parent process."""
        self.lock = threading.RLock()  # another thread may have held it
        self._closing = True
        self._drop()

    def _drop(self) -> None:
        for link in self._links.values():
            link.socket.close()
        self._close_files()
        _alive.discard(self)

    # ------------------------------------------------------------ reading

    def _forward(self) -> None:
        deferrals = 0
        while not self._closing:
            for file, _ in self._outer.poll(self._pause):
                if file == self._alarm:
                    os.eventfd_read(self._alarm)
            with self.lock:
                if self._closing:
                    return
                if deferrals == self._deferrals:
                    self.resume()
                if self._readers == 0 and not self.reads_deferred:
                    self._take(self._inner.poll(0))
                deferrals, self._pause = self._deferrals, _READS_WITHIN if self.reads_deferred else None
            self._check_ended()

    def _check_ended(self) -> None:
        now = time.monotonic()
        with self.lock:
            ended = {peer: now - since for peer, since in self._ended.items() if peer not in self.left}
        if ended:
            self._lost(ended)
            if min(ended.values()) < _LOOKS_FOR:
                self._pause = _LOOKS_EVERY

    def _take(self, found: list[tuple[int, int]]) -> None:
        for file, events in found:
            if self._closing:  # the garbage collector may close the links in the middle of this loop
                return
            if (link := self._by_file.get(file)) is None:
                continue
            if events & select.EPOLLOUT:
                self._write(link)
            if events != select.EPOLLOUT:
                self._receive(link)

    def _write(self, link: Link) -> None:
        try:
            del link.outgoing[: link.socket.send(link.outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._stop_sending(link)
            return
        if not link.outgoing:
            self._watch(link, writes=False)

    def _stop_sending(self, link: Link) -> None:
        self._takers.pop(link.peer, None)
        link.outgoing.clear()
        self._watch(link, writes=False)

    def _receive(self, link: Link) -> None:
        try:
            data = link.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(link)
            return
        for message in link.messages(data):
            if message is None:
                self._end(link)
                return
            self.messages[1] += 1
            kind, stream, payload = message
            if kind == _BYE:
                self.left.add(link.peer)
            else:
                self._handle(link.peer, kind, stream, payload)

    def _end(self, link: Link) -> None:
        if self._closing or link.peer in self._ended:
            return
        self._ended[link.peer] = time.monotonic()
        del self._by_file[link.socket.fileno()]
        self._stop_sending(link)
        self._unwatch(link)
        with suppress(OSError):
            link.socket.shutdown(socket.SHUT_RDWR)  # so that the peer, if it is alive, notices too
        self._wake()  # the thread finds out why


_alive: "weakref.WeakSet[Links]" = weakref.WeakSet()


def _drop_in_child() -> None:
    for links in [*_alive]:
        links.drop_in_child()


os.register_at_fork(after_in_child=_drop_in_child)
