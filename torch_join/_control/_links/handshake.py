"""How the ends of a connection know each other: both show that they know a secret, without saying it.

Whoever connects is given five seconds, and does not hold up others. Both ends look meanwhile whether a rank has failed.
"""

import errno
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping

from torch_join._base.errors import JoinError

HOSTS_OWN = "unix:"  # begins an address that is a name in Linux's abstract namespace, which has no files

_LOOKS_EVERY = 0.1  # seconds
_STRANGER_SECONDS = 5.0  # for one that has not shown what it knows
_MOST_STRANGERS = 64
_REACHES_WITHIN = 2.0  # an address, before it is the next one's turn
_NONCE = 16
_HELLO = struct.Struct(f"<I{_NONCE}s32s")  # rank, what the other end has to sign, the signature

Where = tuple[list[str], int]  # addresses and port of a rank that listens

# ------------------------------------------------------------ the end that listens


class _Stranger:
    """A connection whose other end has not shown that it knows the secret."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.nonce = secrets.token_bytes(_NONCE)
        self.said = b""
        self.deadline = time.monotonic() + _STRANGER_SECONDS


def accept(
    listener: socket.socket, children: Mapping[int, int], secret: bytes, deadline: float, look: Callable[[], None]
) -> dict[int, socket.socket]:
    """Wait for all children, unless `look` raises; nothing that others send, or do not, changes that.

    Args:
        listener: Where they connect to.
        children: By rank, what errors call it.
        secret: What they have to know.
        deadline: By `time.monotonic`.
        look: Called again and again.
    """
    found: dict[int, socket.socket] = {}
    strangers: list[_Stranger] = []
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def drop(stranger: _Stranger) -> None:
            selector.unregister(stranger.socket)
            strangers.remove(stranger)
            stranger.socket.close()

        try:
            while len(found) < len(children):
                if time.monotonic() > deadline:
                    missing = sorted(children[rank] for rank in children.keys() - found.keys())
                    raise TimeoutError(f"ranks {missing} have not connected in time")
                look()
                for key, _ in selector.select(_LOOKS_EVERY):
                    if key.fileobj is listener:
                        try:
                            stranger = _Stranger(listener.accept()[0])
                            if len(strangers) == _MOST_STRANGERS:
                                drop(strangers[0])
                            strangers.append(stranger)
                            selector.register(stranger.socket, selectors.EVENT_READ, stranger)
                            stranger.socket.send(stranger.nonce)
                        except OSError as error:
                            if error.errno in (errno.EMFILE, errno.ENFILE):  # no child can be accepted either
                                raise
                        continue
                    stranger = key.data
                    try:
                        data = stranger.socket.recv(_HELLO.size - len(stranger.said))
                    except OSError:
                        data = b""
                    stranger.said += data
                    if data and len(stranger.said) < _HELLO.size:
                        continue
                    rank = _check(stranger, secret) if data else None
                    if rank not in children.keys() - found.keys():
                        drop(stranger)
                        continue
                    assert rank is not None
                    selector.unregister(stranger.socket)
                    strangers.remove(stranger)
                    nonce = _HELLO.unpack(stranger.said)[1]
                    stranger.socket.setblocking(True)
                    stranger.socket.sendall(_sign(secret, "parent", rank, nonce))
                    found[rank] = stranger.socket
                for stranger in [one for one in strangers if time.monotonic() > one.deadline]:
                    drop(stranger)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        finally:
            for stranger in [*strangers]:
                drop(stranger)
    return found


def _check(stranger: _Stranger, secret: bytes) -> int | None:
    rank, _, signature = _HELLO.unpack(stranger.said)
    return rank if hmac.compare_digest(signature, _sign(secret, "child", rank, stranger.nonce)) else None


# ------------------------------------------------------------ the end that connects


def connect(where: Where, rank: int, secret: bytes, deadline: float, look: Callable[[], None]) -> socket.socket:
    addresses, port = where
    problems = []
    while time.monotonic() < deadline:
        for address in addresses:
            look()
            try:
                connection = _reach(address, port)
            except OSError as error:
                problems.append(f"{address}: {error}")
                continue
            try:
                connection.settimeout(_LOOKS_EVERY)
                nonce = secrets.token_bytes(_NONCE)
                theirs = _receive(connection, _NONCE, deadline, look)
                connection.sendall(_HELLO.pack(rank, nonce, _sign(secret, "child", rank, theirs)))
                if hmac.compare_digest(_receive(connection, 32, deadline, look), _sign(secret, "parent", rank, nonce)):
                    return connection
                problems.append(f"{address}: somebody else is there")
            except JoinError:  # of `look`, of which some are an OSError too
                connection.close()
                raise
            except OSError as error:
                problems.append(f"{address}: {error}")
            connection.close()
        time.sleep(_LOOKS_EVERY)
    raise TimeoutError(f"its parent in the tree cannot be reached, at {'; '.join([*dict.fromkeys(problems)][:8])}")


def _reach(address: str, port: int) -> socket.socket:
    if not address.startswith(HOSTS_OWN):
        return socket.create_connection((address, port), timeout=_REACHES_WITHIN)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_REACHES_WITHIN)
        connection.connect("\0" + address.removeprefix(HOSTS_OWN))
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, size: int, deadline: float, look: Callable[[], None]) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = connection.recv(size - len(data))
        except TimeoutError:
            look()
            if time.monotonic() > deadline:
                raise
            continue
        if not more:
            raise ConnectionError("the other end has hung up")
        data += more
    return data


def _sign(secret: bytes, role: str, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(secret, role.encode() + struct.pack("<I", rank) + nonce, "sha256")
