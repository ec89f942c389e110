"""Connects the ranks of a tree: where ranks listen, and how both ends identify themselves.

A rank with children listens until they have connected. It listens at gloo's address (that of the interface in
GLOO_SOCKET_IFNAME, or of the host's name), or without gloo at all addresses. If all children are on its host, it uses a
Unix socket if possible, which costs a third of TCP (send and receive: 2.5 and 7.8 us). Both ends prove that they know a
secret, which was sent over the process group.
"""

import errno
import os
import secrets
import socket
import struct
import time
import weakref
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from torch_join._base.errors import JoinError, UnsupportedError
from torch_join._compat import groups as _compat
from torch_join._control._links.handshake import HOSTS_OWN, Where, accept, connect
from torch_join._control._links.layout import Layout
from torch_join._control._links.node import Node
from torch_join._control._links.tree import Tree
from torch_join._control.peers import Process, this_host, this_process
from torch_join._control.set_up import SetUp

_WITHIN = 30.0  # seconds, for all connections
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_LOCAL = ("127.", "fe80:", "::1")  # prefixes of addresses that other hosts cannot use

_Here = tuple[str, int, int, str]  # host; process id (0 if the system shows no others) and start; rank 0's secret


def wire(group: dist.ProcessGroup, timeout: timedelta) -> Tree:
    """Connect the ranks; all of them call this.

    Args:
        group: Their process group.
        timeout: How long a rank waits for the other ranks to call this.

    Returns:
        This rank's node.

    Raises:
        UnsupportedError: The ranks cannot be connected; raised on all ranks.
        JoinTimeoutError: Another rank did not come in time.
        PeerFailedError: Another rank is gone.
    """
    set_up = SetUp(group, timeout)
    set_up.meet()
    rank, names = set_up.rank, set_up.peers.global_ranks
    own: _Here = (this_host(), *this_process(), secrets.token_hex(32))
    by_rank = set_up.exchange(own, of=_Here)
    set_up.peers.processes = {
        peer: Process(pid, began)
        for peer, (host, pid, began, _) in enumerate(by_rank)
        if host == own[0] and peer != rank and pid
    }
    secret = bytes.fromhex(by_rank[0][-1])
    layout = Layout([host for host, *_ in by_rank], rank)
    set_up.peers.hosts = layout.elsewhere
    reference = weakref.ref(group)

    def is_gone(peer: int) -> bool | None:
        group = reference()
        return _compat.is_gone(group, peer) if group is not None and _compat.detects_gone_ranks(group) else None

    listener, tree, problem = None, None, ""
    where: Where = [], 0
    connections: dict[int, socket.socket] = {}
    try:
        # A rank sends its error in the next exchange, so that all ranks raise it.
        try:
            if layout.children:
                is_own = all(by_rank[child][0] == own[0] for child in layout.children)
                listener = _listen(is_own, _compat.is_of_gloo(group))
                where = _where(listener)
        except Exception as error:
            problem, where = f"rank {names[rank]} cannot listen: {_text_of(error)}", ([], -1)
        places = set_up.exchange(where, of=Where)
        if all(port >= 0 for _, port in places):
            try:
                deadline = time.monotonic() + _WITHIN
                if layout.parent is not None:
                    connections[layout.parent] = connect(places[layout.parent], rank, secret, deadline, set_up.check)
                if listener is not None:
                    children = {child: names[child] for child in layout.children}
                    connections.update(accept(listener, children, secret, deadline, set_up.check))
                tree = Tree(connections, Node(layout, set_up.peers, is_gone))
            except JoinError:  # a rank is gone
                raise
            except Exception as error:
                problem = f"rank {names[rank]}: {_text_of(error)}"
        set_up.problem = problem
        if problems := [text for text in set_up.exchange(problem, of=str) if text]:
            raise UnsupportedError(
                f"The ranks cannot connect to each other: {'; '.join(problems[:3])}. Allow TCP connections between"
                " any two hosts, on ports that the system chooses (net.ipv4.ip_local_port_range); gloo needs these"
                f" connections too. If hosts have several networks, set {_INTERFACE} to an interface on each host"
                " (see `ip addr`)."
            )
        assert tree is not None
        return tree
    except BaseException:
        if tree is not None:
            tree.close()
        for connection in connections.values():
            connection.close()
        raise
    finally:
        if listener is not None:
            listener.close()


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


# ------------------------------------------------------------ where to listen


def _listen(on_this_host: bool, where_gloo_does: bool) -> socket.socket:
    """Listen for ranks on this host only, or also for ranks on other hosts.

    Raises:
        OSError: The interface in the environment variable has no address.
    """
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
        addresses = _addresses_of(name)
        if not addresses:
            raise OSError(errno.ENODEV, f"{name} ({_INTERFACE}) does not exist or has no address")
        return _listen_at(addresses[0])
    # Like gloo, listen at the first address of the host's name that belongs to this host.
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM) if where_gloo_does else []
        for address in [str(place[0]) for *_, place in found if not str(place[0]).startswith(_LOCAL)]:
            with suppress(OSError):
                return _listen_at(address)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=128)


def _listen_at(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=128)


def _addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface at which other hosts may reach it, IPv4 first."""
    import fcntl  # POSIX only, like the rest

    found = []
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # it may have only IPv6
        found.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]))
    with suppress(OSError), open("/proc/net/if_inet6") as file:  # each line: address, ..., interface
        rows = [line.split() for line in file]
        found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[-1] == interface]
    return [address for address in found if not address.startswith("fe80:")]


def _where(listener: socket.socket) -> Where:
    """Return the addresses and the port at which other ranks can reach a socket."""
    bound = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return [HOSTS_OWN + bound[1:].decode()], 0
    if bound[0] not in ("::", "0.0.0.0"):
        return [bound[0]], bound[1]
    found = [address for _, name in socket.if_nameindex() for address in _addresses_of(name)]
    if not found:  # not Linux
        with suppress(OSError):
            found = [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)]
    outside = [address for address in found if not address.startswith(_LOCAL)]
    return [*dict.fromkeys(outside), "127.0.0.1"], bound[1]
