"""Making the connections of a tree: who listens where, and how both ends know each other.

A rank with children listens until these are there, and no longer; on the interface that GLOO_SOCKET_IFNAME names, else
on all. Where all of them are on its host it is a socket of that host alone, if one can be had: what goes over it costs
a third of what TCP does (send and receive: 2.5 and 7.8 us). Both ends show that they know a secret, which goes over the
process group.
"""

import os
import secrets
import socket
import struct
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from torch_join._base import compat_groups as _compat
from torch_join._base.devices import device_of
from torch_join._base.errors import JoinError
from torch_join._control._links.handshake import HOSTS_OWN, Where, accept, connect
from torch_join._control._links.layout import Layout
from torch_join._control._links.node import Node
from torch_join._control._links.tree import Tree
from torch_join._control.processes import Process, this_host, this_process
from torch_join._control.store_channel import StoreChannel

_WITHIN = 30.0  # seconds, for all connections
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915

_Here = tuple[str, int, int, bool]  # host, process, and whether the secret can go over the group


def wire(channel: StoreChannel, group: dist.ProcessGroup) -> Tree | bool | None:
    """Connect the ranks; all of them call this.

    Args:
        channel: A channel over the job's store; it gets to know the processes of this host.
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
    channel.processes = {
        rank: Process(pid, began)
        for rank, (host, pid, began, _) in enumerate(everyone)
        if host == here[0] and rank != channel.rank
    }
    secret = _share_secret(group, channel.vigil())
    layout = Layout([host for host, *_ in everyone], channel.rank)
    problem, listener = "", None
    where: Where = [], 0
    try:
        if layout.children:
            listener = _listen(all(everyone[child][0] == here[0] for child in layout.children))
            where = _where(listener)
    except OSError as error:
        problem, where = f"rank {channel.names[channel.rank]} cannot listen: {error}", ([], -1)
    places = channel.gather(where, of=Where)
    connections: dict[int, socket.socket] = {}
    try:
        if all(port >= 0 for _, port in places):
            deadline, look = time.monotonic() + _WITHIN, channel.vigil()
            if layout.parent is not None:
                where = places[layout.parent]
                connections[layout.parent] = connect(where, channel.rank, secret, deadline, look)
            if listener is not None:
                children = {child: channel.names[child] for child in layout.children}
                connections.update(accept(listener, children, secret, deadline, look))
    except JoinError:  # of which some are an OSError too
        for connection in connections.values():
            connection.close()
        raise
    except OSError as error:
        problem = f"rank {channel.names[channel.rank]}: {error}"
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
    reference = weakref.ref(group)

    def is_gone(peer: int) -> bool | None:
        group = reference()
        return _compat.is_gone(group, peer) if group is not None and _compat.tells_who_is_gone(group) else None

    return Tree(connections, Node(layout, channel.rank, channel.processes, channel.names, is_gone))


def _share_secret(group: dist.ProcessGroup, look: Callable[[], None]) -> bytes:
    secret = torch.tensor(list(secrets.token_bytes(32)), dtype=torch.uint8)
    device = torch.device("cpu") if _compat.can_send(group, "cpu") else device_of(group)
    return bytes(_compat.broadcast_directly(group, secret.to(device), look).cpu().tolist())


# ------------------------------------------------------------ where to listen


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


def _where(listener: socket.socket) -> Where:
    """Return where others may reach a socket."""
    bound = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return [HOSTS_OWN + bound[1:].decode()], 0
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
