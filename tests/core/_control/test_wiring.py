"""Making connections, among strangers; and what all hear when a rank fails that others are connected through."""

import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
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
    neighbours,
    on_host,
    open_channel,
    reach,
    seen_listeners,
)
from tests.support.workers import Workers, sum_and_read
from torch_join.integration import Channel, telling_failures

SECRET = bytes(range(32))


@pytest.fixture(scope="module")
def crowd() -> Iterator[Workers]:
    pool = Workers(12, links=True)
    yield pool
    pool.close()


# ---------------------------------------------------------------- strangers


def pester(where: Where, number: int) -> list[socket.socket]:
    """Connect as who knows nothing: silent, with garbage, with a large header, with half of a message."""
    says = [b"", os.urandom(500), struct.pack("<I", 0xFFFFFFFF) + bytes(48), struct.pack("<I", 1) + bytes(20)]
    found = []
    for index in range(number):
        try:
            one = reach(where)
        except BlockingIOError:  # where the queue of a host's own socket is full, nobody waits in it
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
    with pytest.raises(TimeoutError, match=r"ranks \[1\] have not connected"):
        accept(listener, {1}, SECRET, 1.0)
    for thread in threads:
        thread.join()
    listener.close()
    assert len(problems) == 2
    assert all(f"cannot be reached, at {where[0][0]}: " in problem for problem in problems)


def test_a_parent_that_does_not_know_the_secret_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                one, _ = listener.accept()
                one.sendall(bytes(48))
                one.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TimeoutError, match=r"somebody else is there|hung up|reset"):
            connect_to((["127.0.0.1"], listener.getsockname()[1]), 1, SECRET, 0.15)
        socket.create_connection(listener.getsockname()).close()
        thread.join()


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
    totals = [channel.beat(rank).total for _ in range(20)]
    dist.barrier()
    for one in found:
        one.close()
    return totals, [is_linked(channel), all(port == -1 for port in ports), rank != 0 or len(ports) == 1]


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_a_job_begins_among_strangers_and_listens_no_more(workers: Workers, hosts: str) -> None:
    assert workers.run(3, open_among_strangers, hosts, links=True) == [([3] * 20, [True] * 3)] * 3


# ---------------------------------------------------------------- where links cannot be made


def open_where_one_cannot(rank: int, hosts: str) -> tuple[bool, list[str], int]:
    connect = socket.create_connection

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no network here")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with (
            connects_within(1.0),
            on_host(hosts[rank]),
            mock.patch.object(socket, "create_connection", refuse if rank == 1 else connect),
        ):
            channel = open_channel()
    again = open_channel()
    total = channel.beat(1).total + again.beat(1).total
    dist.barrier()
    return is_linked(channel) or is_linked(again), [str(each.message) for each in caught], total


def test_all_agree_on_the_store_where_one_cannot_connect(workers: Workers) -> None:
    (first, said, total), *others = workers.run(3, open_where_one_cannot, "abc", links=True)
    assert (first, total) == (False, 6)
    assert [text[:34] for text in said] == ["The ranks cannot be connected: ran"]
    assert others == [(False, [], 6)] * 2


# ---------------------------------------------------------------- faults


def strike(victim: int, how: str, path: str, peer: int, channel: Any) -> None:
    time.sleep(0.3)  # the others wait
    Path(path).write_text(str(time.monotonic()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise KeyError("a hole")
    elif how == "stop":
        subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        neighbours(channel)[peer].shutdown(socket.SHUT_RDWR)


def wait_for_others(channel: Channel, where: str) -> None:
    if where == "beat":
        channel.beat()
    elif where == "gather":
        channel.gather(None)
    elif where == "log":
        channel.follow()
    else:
        sum_and_read()


def suffer(rank: int, victim: int, how: str, where: str, hosts: str, path: str, peer: int) -> tuple[str, float]:
    """Return what this rank hears of a fault, and when."""
    with on_host(hosts[rank]):
        channel = open_channel(timeout=timedelta(seconds=30))
    assert is_linked(channel)
    channel.beat()
    dist.barrier()
    text, end = "", 0.0
    try:
        with telling_failures(channel):
            if rank == victim:
                strike(victim, how, path, peer, channel)
                if how == "cut":
                    channel.read("never")
            wait_for_others(channel, where)
    except Exception as error:
        text, end = f"{type(error).__name__}: {error}", time.monotonic()
    channel.leave()
    dist.destroy_process_group()
    return text, end


SEVERAL, ONE = "aaabbbcccddd", "a" * 12
ROOT, INNER, LEAF = 0, {SEVERAL: 3, ONE: 1}, {SEVERAL: 5, ONE: 11}
PLACES = [(hosts, victim) for hosts in (ONE, SEVERAL) for victim in (ROOT, INNER[hosts], LEAF[hosts])]
EVERY = [
    (hosts, victim, how, where)
    for hosts, victim in PLACES
    for how in ("kill", "raise", "stop", "cut")
    for where in ("beat", "gather", "log", "collective")
    if not (how in ("stop", "cut") and where == "collective")  # gloo reports neither
    if not (how == "stop" and hosts == SEVERAL and victim != LEAF[SEVERAL])  # who knows of it cannot reach the others
]
FEW = [
    (ONE, ROOT, "kill", "beat"),
    (SEVERAL, 3, "kill", "gather"),
    (ONE, 1, "raise", "log"),
    (SEVERAL, 5, "raise", "beat"),
    (ONE, 1, "cut", "gather"),
    (ONE, 1, "stop", "beat"),
]


def check(crowd: Workers, tmp_path: Path, hosts: str, victim: int, how: str, where: str) -> None:
    path = tmp_path / "struck"
    peer = 2 if victim == 0 else {SEVERAL: {3: 4, 5: 3}, ONE: {1: 9, 11: 1}}[hosts][victim]
    outcomes = crowd.outcomes(12, suffer, victim, how, where, hosts, str(path), peer, timeout=10.0, deadline=50.0)
    struck = float(path.read_text())
    for rank, outcome in enumerate(outcomes):
        if rank == victim and how != "cut":
            continue
        assert outcome.value is not None, (rank, outcome)
        text, end = outcome.value
        if how == "cut":
            assert f"the link between ranks {min(victim, peer)} and {max(victim, peer)} broke" in text, (rank, text)
        else:
            assert re.match(f"PeerFailedError: Rank {victim} failed, so rank {rank} cannot", text), (rank, text)
        if how == "raise":
            assert text.endswith(f"Rank {victim}: KeyError: 'a hole'"), (rank, text)
        if where != "collective":
            assert end - struck < {"stop": 4.0, "cut": 1.0}.get(how, 0.5), (rank, text, end - struck)


@pytest.mark.parametrize(("hosts", "victim", "how", "where"), FEW)
def test_faults(crowd: Workers, tmp_path: Path, hosts: str, victim: int, how: str, where: str) -> None:
    check(crowd, tmp_path, hosts, victim, how, where)


@pytest.mark.long
@pytest.mark.parametrize(("hosts", "victim", "how", "where"), [each for each in EVERY if each not in FEW])
def test_every_fault(crowd: Workers, tmp_path: Path, hosts: str, victim: int, how: str, where: str) -> None:
    check(crowd, tmp_path, hosts, victim, how, where)


# ---------------------------------------------------------------- children that outlive their parent


def die_with_children(rank: int, path: str) -> tuple[str, float]:
    channel = open_channel(timeout=timedelta(seconds=30))
    channel.beat()
    children = []
    for _ in range(2):  # as those of a DataLoader, which do not see at once that their parent has ended
        children.append(os.fork())
        if children[-1] == 0:
            time.sleep(4)
            os._exit(0)
    channel.beat()
    if rank == 1:
        Path(path).write_text(" ".join(map(str, [time.monotonic(), *children])))
        os.kill(os.getpid(), signal.SIGKILL)
    text = ""
    try:
        channel.beat()
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
        assert text.startswith(f"Rank 1 failed, so rank {rank} cannot go on. Rank 1: its process is gone")
        assert end - float(struck) < 0.5
