"""One connection of a process to a neighbour."""

import socket
import struct
from collections.abc import Iterable, Iterator

_HEADER = struct.Struct("<IBI")  # number of bytes that follow, kind, stream
MAX_BYTES = 1 << 30  # of one message, and of the unsent data of one connection
# With these options, this process notices after about 40 seconds that a host or the network to it is gone. The last one
# (in milliseconds) applies while a message is being sent, when the system sends no keepalives.
_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 40_000}


def pack(kind: int, stream: int, payload: bytes) -> bytes:
    """Return the bytes of a message."""
    return _HEADER.pack(len(payload), kind, stream) + payload


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
