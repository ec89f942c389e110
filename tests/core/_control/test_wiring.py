"""Making connections, among strangers; and what all hear when a rank fails that others are connected through."""

import errno
import os
import signal
import socket
import struct
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.inside import (
    Where,
    accept,
    connect_to,
    connects_within,
    is_linked,
    listen,
    on_host,
    open_channel,
    reach,
    reaching_nothing,
    seen_listeners,
)
from tests.support.workers import Workers
from torch_join import JoinError, JoinTimeoutError, PeerFailedError, UnsupportedError

SECRET = bytes(range(32))


# ---------------------------------------------------------------- strangers


def pester(where: Where, number: int) -> list[socket.socket]:
    """Connect as who knows nothing: silent, with garbage, with a large header, with half of a message."""
    says = [b"", os.urandom(500), struct.pack("<I", 0xFFFFFFFF) + bytes(48), struct.pack("<I", 1) + bytes(20)]
    found = []
    for index in range(number):
        try:
            one = reach(where)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        one.sendall(says[index % 4])
        found.append(one)
    return found


@pytest.mark.parametrize("on_this_host", [False, True])
@pytest.mark.parametrize("number", [4, 200])
def test_strangers_change_nothing(number: int, on_this_host: bool) -> None:
    listener, where = listen(on_this_host)
    children: dict[int, socket.socket] = {}
    strangers: list[socket.socket] = []

    def connect(rank: int) -> None:
        time.sleep(0.2)
        children[rank] = connect_to(where, rank, SECRET, 20.0)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (4, 7)]
    threads.append(threading.Thread(target=lambda: strangers.extend(pester(where, number))))
    for thread in threads:
        thread.start()
    start = time.monotonic()
    found = accept(listener, {4, 7}, SECRET, 20.0)
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 10
    listener.close()
    assert found.keys() == children.keys()
    for rank, one in found.items():
        one.sendall(b"%d" % rank)
        assert children[rank].recv(10) == b"%d" % rank
    for one in (*strangers, *found.values(), *children.values()):
        one.close()


@pytest.mark.parametrize("on_this_host", [False, True])
def test_a_wrong_secret_and_a_wrong_rank_are_refused(on_this_host: bool) -> None:
    listener, where = listen(on_this_host)
    problems: list[str] = []

    def connect(rank: int, secret: bytes) -> None:
        with pytest.raises(TimeoutError) as caught:
            connect_to(where, rank, secret, 0.7)
        problems.append(str(caught.value))

    threads = [threading.Thread(target=connect, args=arguments) for arguments in ((1, bytes(32)), (2, SECRET))]
    for thread in threads:
        thread.start()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not connect"):
        accept(listener, {1}, SECRET, 1.0)
    for thread in threads:
        thread.join()
    listener.close()
    assert len(problems) == 2
    assert all(f"cannot reach its parent in the tree, at {where[0][0]}: " in problem for problem in problems)


def test_a_parent_that_does_not_know_the_secret_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                one, _ = listener.accept()
                one.sendall(bytes(48))
                one.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TimeoutError, match=r"another program answered|hung up|reset"):
            connect_to((["127.0.0.1"], listener.getsockname()[1]), 1, SECRET, 0.15)
        socket.create_connection(listener.getsockname()).close()
        thread.join()


@pytest.mark.parametrize("error", [PeerFailedError, JoinTimeoutError])
@pytest.mark.parametrize("end", ["parent", "child"])
def test_a_failure_meanwhile_is_no_connection_that_cannot_be_made(end: str, error: type[JoinError]) -> None:
    """Some are an OSError too, as is what sockets raise."""
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise error("another rank")

    listener, where = listen(False)
    with listener, pytest.raises(error, match=r"^another rank$"):
        if end == "parent":
            accept(listener, {1}, SECRET, 20.0, look)
        else:
            connect_to(where, 1, SECRET, 20.0, look)  # nobody answers


def test_a_rank_without_free_file_descriptors_says_so_at_once() -> None:
    listener, where = listen(False)
    full = OSError(errno.EMFILE, "Too many open files")
    with listener, socket.create_connection((where[0][0], where[1])), mock.patch.object(socket.socket, "accept") as own:
        own.side_effect = full
        with pytest.raises(OSError, match="Too many open files"):
            accept(listener, {1}, SECRET, 20.0, lambda: None)


def open_among_strangers(rank: int, hosts: str) -> tuple[list[int], list[bool]]:
    found: list[socket.socket] = []
    with seen_listeners() as listeners, on_host(hosts[rank]):

        def come() -> None:
            while not listeners:
                time.sleep(0.001)
            found.extend(pester(listeners[0][1], 100))

        thread = threading.Thread(target=come, daemon=True)
        ports = []
        if rank == 0:
            thread.start()
        channel = open_channel()
        ports = [listener.fileno() for listener, _ in listeners]
        if rank == 0:
            thread.join(10)
    totals = [channel.barrier(rank).total for _ in range(20)]
    dist.barrier()
    for one in found:
        one.close()
    return totals, [is_linked(channel), all(port == -1 for port in ports), rank != 0 or len(ports) == 1]


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_a_job_begins_among_strangers_and_listens_no_more(workers: Workers, hosts: str) -> None:
    assert workers.run(3, open_among_strangers, hosts) == [([3] * 20, [True] * 3)] * 3


# ---------------------------------------------------------------- where links cannot be made


def open_where_one_cannot(rank: int, hosts: str) -> str:
    refused = reaching_nothing() if rank == 1 else nullcontext()
    with connects_within(1.0), on_host(hosts[rank]), refused, pytest.raises(UnsupportedError) as error:
        open_channel()
    return str(error.value)


def test_all_say_why_one_cannot_be_connected(workers: Workers) -> None:
    for text in workers.run(3, open_where_one_cannot, "abc"):
        assert text.startswith("The ranks cannot connect to each other")
        assert "rank 1: it cannot reach its parent in the tree, at " in text
        assert "Allow TCP connections" in text
        assert "set GLOO_SOCKET_IFNAME to an interface on each host" in text


# ---------------------------------------------------------------- children that outlive their parent


def die_with_children(rank: int, path: str) -> tuple[str, float]:
    channel = open_channel(timeout=timedelta(seconds=30))
    channel.barrier()
    children = []
    for _ in range(2):  # as those of a DataLoader, which do not see at once that their parent has ended
        children.append(os.fork())
        if children[-1] == 0:
            time.sleep(5)
            os._exit(0)
    channel.barrier()
    if rank == 1:
        Path(path).write_text(" ".join(map(str, [time.monotonic(), *children])))
        os.kill(os.getpid(), signal.SIGKILL)
    text = ""
    try:
        channel.barrier()
    except Exception as error:
        text = str(error)
    end = time.monotonic()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    dist.destroy_process_group()
    return text, end


def test_workers_that_outlive_a_rank_do_not_hide_that_it_is_gone(crowd: Workers, tmp_path: Path) -> None:
    path = tmp_path / "struck"
    outcomes = crowd.outcomes(4, die_with_children, str(path))
    struck, *children = path.read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    for rank in (0, 2, 3):
        text, end = outcomes[rank].value
        assert text.startswith(f"Rank 1 failed, so rank {rank} cannot continue. Rank 1: its process is gone")
        assert end - float(struck) < 0.5
