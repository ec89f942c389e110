"""Making the connections of a tree: who listens where, and how both ends know each other.

A rank with children listens until these are there, and no longer; on the interface that GLOO_SOCKET_IFNAME names, else
on all. Where all of them are on its host it is a socket of that host alone, if one can be had: what goes over it costs
a third of what TCP does (send and receive: 2.5 and 7.8 us). Whoever connects is given five seconds, and does not hold
up others. Both ends show that they know a secret, which goes over the process group, without saying it.
"""

import hmac
import os
import secrets
import selectors
import socket
import struct
import time
import warnings
from contextlib import suppress

import torch
import torch.distributed as dist

from torch_join._base import compat as _compat
from torch_join._base.devices import device_of
from torch_join._control._links.layout import Layout
from torch_join._control._links.processes import Process, this_host, this_process
from torch_join._control._links.tree import Tree
from torch_join._control.channel import Channel

_WITHIN = 30.0  # seconds, for all connections
_STRANGER_SECONDS = 5.0  # for one that has not shown what it knows
_MOST_STRANGERS = 64
_NONCE = 16
_HELLO = struct.Struct(f"<I{_NONCE}s32s")  # rank, what the other end has to sign, the signature
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_HOSTS_OWN = "unix:"  # begins an address that is a name in Linux's abstract namespace, which has no files

_Here = tuple[str, int, int, bool]  # host, process, and whether the secret can go over the group
_Where = tuple[list[str], int]  # addresses and port of a rank that listens


def wire(channel: Channel, group: dist.ProcessGroup) -> Tree | bool | None:
    """Connect the ranks; all of them call this.

    Args:
        channel: A channel over the job's store.
        group: Their process group.

    Returns:
        This rank's node; on all ranks `False` where connections cannot be made, and `None` where that shows later,
        when each rank's device is known.
    """
    can_share = any(_compat.can_send(group, kind) for kind in ("cpu", device_of(group).type))
    is_able = hasattr(os, "eventfd") and os.path.exists("/proc/self/stat")
    here: _Here = (this_host(), *this_process(), can_share) if is_able else ("", 0, 0, can_share)
    everyone = channel.gather(here, of=_Here)
    if not all(host for host, *_ in everyone):
        return False
    if not all(can_share for *_, can_share in everyone):
        return None
    secret = _share_secret(group)
    layout = Layout([host for host, *_ in everyone], channel.rank)
    problem, listener = "", None
    where: _Where = [], 0
    try:
        if layout.children:
            listener = _listen(all(everyone[child][0] == here[0] for child in layout.children))
            where = _where(listener)
    except OSError as error:
        problem, where = f"rank {channel.rank} cannot listen: {error}", ([], -1)
    places = channel.gather(where, of=_Where)
    connections: dict[int, socket.socket] = {}
    try:
        if all(port >= 0 for _, port in places):
            deadline = time.monotonic() + _WITHIN
            if layout.parent is not None:
                connections[layout.parent] = _connect(places[layout.parent], channel.rank, secret, deadline)
            if listener is not None:
                connections.update(_accept(listener, {*layout.children}, secret, deadline))
    except OSError as error:
        problem = f"rank {channel.rank}: {error}"
    finally:
        if listener is not None:
            listener.close()
    problems = [text for text in channel.gather(problem, of=str) if text]
    if problems:
        for connection in connections.values():
            connection.close()
        if channel.rank == 0:
            warnings.warn(
                f"The ranks cannot be connected: {problems[0]}. So all that they tell each other goes through the"
                " job's key-value store, whose one thread serves about 79,000 requests a second: more than a few dozen"
                f" ranks wait for it. If hosts have several networks, name one in {_INTERFACE}.",
                stacklevel=2,
            )
        return False
    on_this_host = {
        rank: Process(pid, began)
        for rank, (host, pid, began, _) in enumerate(everyone)
        if host == here[0] and rank != channel.rank
    }
    return Tree(connections, layout, channel.rank, on_this_host)


def _share_secret(group: dist.ProcessGroup) -> bytes:
    secret = torch.tensor(list(secrets.token_bytes(32)), dtype=torch.uint8)
    device = torch.device("cpu") if _compat.can_send(group, "cpu") else device_of(group)
    return bytes(_compat.broadcast_directly(group, secret.to(device)).cpu().tolist())


# ------------------------------------------------------------ the end that listens


def _listen(on_this_host: bool) -> socket.socket:
    if on_this_host:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"\0torch_join {secrets.token_hex(16)}")
            listener.listen(128)
            return listener
        except OSError:  # a sandbox may forbid it
            listener.close()
            return socket.create_server(("127.0.0.1", 0), backlog=128)
    if name := os.environ.get(_INTERFACE, "").split(",")[0]:
        return socket.create_server((_address_of(name), 0), backlog=128)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=128)


def _address_of(interface: str) -> str:
    import fcntl  # of POSIX, as the rest is

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def _where(listener: socket.socket) -> _Where:
    """Return where others may reach a socket."""
    bound = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return [_HOSTS_OWN + bound[1:].decode()], 0
    return [bound[0]] if bound[0] not in ("::", "0.0.0.0") else _addresses(), bound[1]


def _addresses() -> list[str]:
    """Return this host's addresses: the most likely to be reached first."""
    found = []
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            found.append(_address_of(name))
    with suppress(OSError), open("/proc/net/if_inet6") as file:  # of each: address, ..., and the interface
        found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in file]
    outside = [address for address in found if not address.startswith(("127.", "fe80:")) and address != "::1"]
    return [*dict.fromkeys(outside), "127.0.0.1"]


class _Stranger:
    """A connection whose other end has not shown that it knows the secret."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.nonce = secrets.token_bytes(_NONCE)
        self.said = b""
        self.deadline = time.monotonic() + _STRANGER_SECONDS


def _accept(listener: socket.socket, children: set[int], secret: bytes, deadline: float) -> dict[int, socket.socket]:
    """Wait for all children; nothing that others send, or do not, changes that."""
    found: dict[int, socket.socket] = {}
    strangers: list[_Stranger] = []
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def drop(stranger: _Stranger) -> None:
            selector.unregister(stranger.socket)
            strangers.remove(stranger)
            stranger.socket.close()

        while len(found) < len(children):
            if time.monotonic() > deadline:
                for connection in [*found.values(), *(stranger.socket for stranger in strangers)]:
                    connection.close()
                missing = sorted(children - found.keys())
                raise TimeoutError(f"ranks {missing} have not connected within {_WITHIN:.0f} s")
            for key, _ in selector.select(0.1):
                if key.fileobj is listener:
                    with suppress(OSError):
                        stranger = _Stranger(listener.accept()[0])
                        if len(strangers) == _MOST_STRANGERS:
                            drop(strangers[0])
                        strangers.append(stranger)
                        selector.register(stranger.socket, selectors.EVENT_READ, stranger)
                        stranger.socket.send(stranger.nonce)
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
                if rank not in children - found.keys():
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
        for stranger in [*strangers]:
            drop(stranger)
    return found


def _check(stranger: _Stranger, secret: bytes) -> int | None:
    rank, _, signature = _HELLO.unpack(stranger.said)
    return rank if hmac.compare_digest(signature, _sign(secret, "child", rank, stranger.nonce)) else None


# ------------------------------------------------------------ the end that connects


def _connect(where: _Where, rank: int, secret: bytes, deadline: float) -> socket.socket:
    addresses, port = where
    problems = []
    while time.monotonic() < deadline:
        for address in addresses:
            try:
                connection = _reach(address, port)
            except OSError as error:
                problems.append(f"{address}: {error}")
                continue
            try:
                connection.settimeout(max(0.1, deadline - time.monotonic()))
                nonce = secrets.token_bytes(_NONCE)
                theirs = _receive(connection, _NONCE)
                connection.sendall(_HELLO.pack(rank, nonce, _sign(secret, "child", rank, theirs)))
                if hmac.compare_digest(_receive(connection, 32), _sign(secret, "parent", rank, nonce)):
                    return connection
                problems.append(f"{address}: somebody else is there")
            except OSError as error:
                problems.append(f"{address}: {error}")
            connection.close()
        time.sleep(0.1)
    raise TimeoutError(f"its parent in the tree cannot be reached, at {'; '.join([*dict.fromkeys(problems)][:8])}")


def _reach(address: str, port: int) -> socket.socket:
    if not address.startswith(_HOSTS_OWN):
        return socket.create_connection((address, port), timeout=_STRANGER_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_STRANGER_SECONDS)
        connection.connect("\0" + address.removeprefix(_HOSTS_OWN))
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise ConnectionError("the other end has hung up")
        data += more
    return data


def _sign(secret: bytes, role: str, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(secret, role.encode() + struct.pack("<I", rank) + nonce, "sha256")
