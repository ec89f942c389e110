"""The handshake of a new connection: both ends prove that they know a secret, without sending it.

A connecting process has five seconds, and does not delay others. Meanwhile both ends check whether a rank has failed.
"""

import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch_join._base.errors import JoinError

HOSTS_OWN = "unix:"  # prefix of an address in Linux's abstract namespace, which has no files

_LOOKS_EVERY = 0.1  # seconds
_STRANGER_SECONDS = 5.0  # the time in which a new connection must prove that it knows the secret
_MOST_STRANGERS = 64
_REACHES_WITHIN = 2.0  # seconds before all addresses are tried again
_NONCE = 16
_HELLO = struct.Struct(f"<I{_NONCE}s32s")  # rank, the nonce for the other end to sign, the signature

Where = tuple[list[str], int]  # addresses and port of a listening rank

# ------------------------------------------------------------ the listening end


def accept(
    listener: socket.socket, children: Mapping[int, int], secret: bytes, deadline: float, poll: Callable[[], None]
) -> dict[int, socket.socket]:
    """Wait until all children have connected, unless `poll` raises; strangers that connect cannot disturb this.

    Args:
        listener: The listening socket.
        children: By rank, its name in errors.
        secret: The secret that children know.
        deadline: When to stop waiting, by `time.monotonic`.
        poll: Called repeatedly.
    """
    found: dict[int, socket.socket] = {}
    # By connection whose other end has not proved that it knows the secret: the nonce for it to sign, and its deadline.
    strangers: dict[socket.socket, tuple[bytes, float]] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def drop(stranger: socket.socket) -> None:
            del strangers[stranger]
            selector.unregister(stranger)
            stranger.close()

        try:
            while len(found) < len(children):
                if time.monotonic() > deadline:
                    missing = sorted(children[rank] for rank in children.keys() - found.keys())
                    raise TimeoutError(f"ranks {missing} did not connect in time")
                poll()
                for key, _ in selector.select(_LOOKS_EVERY):
                    if key.fileobj is listener:
                        try:
                            stranger, nonce = listener.accept()[0], secrets.token_bytes(_NONCE)
                            if len(strangers) == _MOST_STRANGERS:
                                drop(next(iter(strangers)))
                            stranger.setblocking(False)
                            selector.register(stranger, selectors.EVENT_READ)
                            strangers[stranger] = nonce, time.monotonic() + _STRANGER_SECONDS
                            stranger.send(nonce)
                        except OSError as error:
                            if error.errno in (errno.EMFILE, errno.ENFILE):  # no child can be accepted either
                                raise
                    elif (stranger := cast(socket.socket, key.fileobj)) in strangers:
                        try:
                            rank, child_nonce, signature = _HELLO.unpack(stranger.recv(_HELLO.size))
                        except (OSError, struct.error):  # a child of which only a part has come will connect again
                            drop(stranger)
                            continue
                        is_child = hmac.compare_digest(signature, _sign(secret, "child", rank, strangers[stranger][0]))
                        if not is_child or rank not in children.keys() - found.keys():
                            drop(stranger)
                            continue
                        del strangers[stranger]
                        selector.unregister(stranger)
                        stranger.setblocking(True)
                        stranger.sendall(_sign(secret, "parent", rank, child_nonce))
                        found[rank] = stranger
                for stranger in [one for one, (_, until) in strangers.items() if time.monotonic() > until]:
                    drop(stranger)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        finally:
            for stranger in [*strangers]:
                drop(stranger)
    return found


# ------------------------------------------------------------ the connecting end


def connect(where: Where, rank: int, secret: bytes, deadline: float, poll: Callable[[], None]) -> socket.socket:
    """Connect to a listening rank, at the first of its addresses that works."""
    problems: list[str] = []
    while time.monotonic() < deadline:
        poll()  # here too, since maybe no address answers
        for address, connection in _reached(*where, poll, problems):
            try:
                connection.settimeout(_LOOKS_EVERY)
                nonce = secrets.token_bytes(_NONCE)
                parent_nonce = _receive(connection, _NONCE, deadline, poll)
                connection.sendall(_HELLO.pack(rank, nonce, _sign(secret, "child", rank, parent_nonce)))
                if hmac.compare_digest(_receive(connection, 32, deadline, poll), _sign(secret, "parent", rank, nonce)):
                    return connection
                problems.append(f"{address}: another program answered")
            except JoinError:  # from `poll`; some are also an OSError
                connection.close()
                raise
            except OSError as error:
                problems.append(f"{address}: {error}")
            connection.close()
        time.sleep(_LOOKS_EVERY)
    raise TimeoutError(f"it cannot reach its parent in the tree, at {'; '.join([*dict.fromkeys(problems)][:8])}")


def _reached(
    addresses: Sequence[str], port: int, poll: Callable[[], None], problems: list[str]
) -> Iterator[tuple[str, socket.socket]]:
    """Connect to all addresses at once; yield each address that answers, with its connection; note why others fail."""
    deadline = time.monotonic() + _REACHES_WITHIN
    with selectors.DefaultSelector() as selector:
        try:
            for address in addresses:
                try:
                    selector.register(_reach(address, port), selectors.EVENT_WRITE, address)
                except OSError as problem:
                    problems.append(f"{address}: {problem}")
            while selector.get_map() and time.monotonic() < deadline:
                poll()
                for key, _ in selector.select(_LOOKS_EVERY):
                    connection = selector.unregister(key.fileobj).fileobj
                    assert isinstance(connection, socket.socket)
                    if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        problems.append(f"{key.data}: {os.strerror(error)}")
                        connection.close()
                    else:
                        yield key.data, connection
        finally:
            for key in [*selector.get_map().values()]:
                problems.append(f"{key.data}: no answer")
                cast(socket.socket, key.fileobj).close()


def _reach(address: str, port: int) -> socket.socket:
    """Start to connect; once the socket is writable, the connection is established or has failed."""
    place: Any = "\0" + address.removeprefix(HOSTS_OWN)
    family = socket.AF_UNIX
    if not address.startswith(HOSTS_OWN):
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family)
    connection.setblocking(False)
    if (error := connection.connect_ex(place)) not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(error, os.strerror(error))
    return connection


def _receive(connection: socket.socket, size: int, deadline: float, poll: Callable[[], None]) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = connection.recv(size - len(data))
        except TimeoutError:
            poll()
            if time.monotonic() > deadline:
                raise
            continue
        if not more:
            raise ConnectionError("the other end has hung up")
        data += more
    return data


def _sign(secret: bytes, role: str, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(secret, role.encode() + struct.pack("<I", rank) + nonce, "sha256")
