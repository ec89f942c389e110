"""Connections between ranks: what they carry, who hears what through whom, and what a child process holds of them."""

import ctypes
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from tests.core._control.hearing import told
from tests.core.threads import unmade
from tests.support.inside import (
    MOST_BYTES,
    Layout,
    Links,
    awake_longer,
    channel_of,
    is_linked,
    links_of,
    messages,
    neighbours,
    on_host,
    open_channel,
    silent,
    tree_over,
    without_epoll,
)
from tests.support.workers import Workers
from torch_join import Join, JoinTypeError, PeerFailedError
from torch_join._control._links.handshake import accept, connect
from torch_join._control._links.node import ChannelState
from torch_join._control._links.portable import PortableLinks
from torch_join._control.channel import Channel
from torch_join._control.reports import BarrierResult

# ---------------------------------------------------------------- bytes


class Ends:
    """Two processes' links in one, and what each has got."""

    def __init__(self, kind: type[Links] = Links) -> None:
        self.ours, theirs = connected()
        self.got: tuple[list[Any], list[Any]] = [], []
        self.lost: list[int] = []
        self.first = kind({1: self.ours}, lambda *message: self.got[0].append(message), self.lost.extend)
        self.second = kind({0: theirs}, lambda *message: self.got[1].append(message), self.lost.extend)
        self.first.begin()
        self.second.begin()

    def close(self) -> None:
        self.first.close()
        self.second.close()


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends, as between hosts; and links know nothing of another kind of socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def wait(ready: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends()) as made:
        yield made


@pytest.fixture(params=[Links, PortableLinks])
def either(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """With epoll, and as where there is none."""
    with closing(Ends(request.param)) as made:
        yield made


def test_what_a_peer_has_said_last_is_heard(either: Ends) -> None:
    with either.first.lock:  # it is in the midst of something, and says things itself
        either.second.send([0], 2, 0, b"why")
        either.second.close()
        for _ in range(3):
            either.first.send([1], 0, 0, b"too late")
            time.sleep(0.05)
    wait(lambda: either.first.left == {1})
    assert either.got[0] == [(1, 2, 0, b"why")]
    assert not either.lost


def test_what_is_there_as_a_tree_is_made_is_passed_on() -> None:
    for _ in range(30):
        makes = unmade(3)
        one, other = makes[1](), makes[2]()
        hears = Channel(other)
        Channel(one).fail(ValueError("on purpose"))
        between = makes[0]()
        wait(lambda hears=hears: hears.failure() is not None)
        for tree in (one, other, between):
            tree.close()


def test_an_address_that_answers_does_not_wait_for_others() -> None:
    secret, found = b"secret", dict[int, socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as full:
        port = listener.getsockname()[1]
        full.bind(("127.0.0.2", port))
        full.listen(0)
        pending = [socket.create_connection(full.getsockname()[:2])]  # so that the next ones wait for an answer
        accepting = threading.Thread(
            target=lambda: found.update(accept(listener, {1: 1}, secret, time.monotonic() + 20, lambda: None))
        )
        accepting.start()
        where, begun = (["127.0.0.2"] * 30 + ["127.0.0.1"], port), time.monotonic()
        pending.append(connect(where, 1, secret, begun + 20, lambda: None))
        assert time.monotonic() - begun < 1
        accepting.join()
        for connection in [*pending, *found.values()]:
            connection.close()


def test_a_peer_that_ends_before_it_has_got_all_is_lost() -> None:
    ours, theirs = connected()
    lost: list[int] = []
    links = Links({1: ours}, lambda *_: None, lost.extend)
    links.begin()
    links.send([1], 3, 0, bytes(30_000_000))
    theirs.close()
    wait(lambda: len(lost) >= 3)  # the thread looks again and again
    links.close()


def test_more_than_sockets_hold_goes_both_ways_at_once(either: Ends) -> None:
    texts = [bytes([number]) * 3_000_000 for number in range(12)]
    for text in texts:  # nobody reads meanwhile but the threads
        either.first.send([1], 3, 7, text)
        either.second.send([0], 4, 8, text)
    wait(lambda: len(either.got[0]) == len(either.got[1]) == 12)
    assert either.got[1] == [(0, 3, 7, text) for text in texts]
    assert either.got[0] == [(1, 4, 8, text) for text in texts]
    assert either.first.messages == either.second.messages == [12, 12]


@pytest.mark.parametrize("piece", [1, 7, 13])  # bytes that come at a time; a header has nine
def test_messages_that_come_in_pieces_are_put_together(piece: int) -> None:
    ours, theirs = socket.socketpair()
    got: list[Any] = []
    links = Links({1: ours}, lambda *message: got.append(message), lambda _: None)
    links.begin()
    texts = [b"", b"a", b"bc" * 9, b"", b"d" * 40]
    data = b"".join(struct.pack("<IBI", len(text), 3, 7) + text for text in texts)
    links.begin_reading()  # so that the thread does not
    for begin in range(0, len(data), piece):
        theirs.sendall(data[begin : begin + piece])
        links.read(1.0)
    links.end_reading()
    theirs.close()
    links.close()
    assert got == [(1, 3, 7, text) for text in texts]


def test_who_waits_amid_what_others_say_looks_too(either: Ends) -> None:
    looks: list[int] = []
    done = threading.Event()

    def chatter() -> None:
        while not done.wait(0.002):
            either.second.send([0], 1, 0, b"x")

    thread = threading.Thread(target=chatter)
    thread.start()
    try:
        tree_over(either.first).wait(lambda: len(looks) == 5, lambda: looks.append(len(either.got[0])), ChannelState())
    finally:
        done.set()
        thread.join()
    assert 5 * 10 < looks[-1] < 5 * 50


def test_the_thread_leaves_to_who_reads_soon_what_comes(ends: Ends) -> None:
    ends.first.defer_reads()
    for text in (b"x", b"y", b"z"):
        ends.second.send([0], 1, 0, text)
        time.sleep(0.04)
        ends.first.defer_reads()
    assert ends.got[0] == []
    ends.first.read()
    assert [text for *_, text in ends.got[0]] == [b"x", b"y", b"z"]
    ends.first.resume()
    ends.second.send([0], 1, 0, b"at once")
    wait(lambda: len(ends.got[0]) == 4)


@pytest.mark.parametrize("waits", [False, True])
def test_the_thread_reads_where_who_would_read_soon_does_not(ends: Ends, waits: bool) -> None:
    for count in range(1, 4):
        ends.first.defer_reads()
        if waits:  # and is put off no longer
            ends.first.begin_reading()
            ends.first.end_reading()
            assert not ends.first.reads_deferred
            ends.first.defer_reads()
        ends.second.send([0], 1, 0, b"x")
        wait(lambda count=count: len(ends.got[0]) == count)
        wait(lambda: not ends.first.reads_deferred)


def test_who_waits_amid_a_message_reads_the_others_in_order() -> None:
    """As the handler of a signal may; some have come with the message that it interrupts."""
    ours, theirs = socket.socketpair()
    got: list[bytes] = []

    def handle(peer: int, kind: int, stream: int, text: bytes) -> None:
        got.append(text)
        if text == b"1":
            theirs.sendall(struct.pack("<IBI", 1, 3, 7) + b"4")
            links.read(1.0)

    links = Links({1: ours}, handle, lambda _: None)
    links.begin()
    links.begin_reading()
    theirs.sendall(b"".join(struct.pack("<IBI", 1, 3, 7) + text for text in (b"1", b"2", b"3")))
    links.read(1.0)
    links.end_reading()
    theirs.close()
    links.close()
    assert got == [b"1", b"2", b"3", b"4"]


def test_many_threads_send_whole_messages(either: Ends) -> None:
    def send(number: int) -> None:
        for _ in range(200):
            either.first.send([1], number, 0, bytes([number]) * 5000)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait(lambda: len(either.got[1]) == 1600)
    assert all(payload == bytes([kind]) * 5000 for _, kind, _, payload in either.got[1])


def test_a_message_that_is_too_long_ends_the_connection() -> None:
    ours, theirs = connected()
    lost: list[int] = []
    links = Links({5: ours}, lambda *_: None, lost.extend)
    links.begin()
    theirs.sendall((MOST_BYTES + 1).to_bytes(4, "little") + bytes(5))
    wait(lambda: lost)
    links.close()
    theirs.close()
    assert lost[0] == 5


def test_whoever_says_goodbye_is_not_lost(either: Ends) -> None:
    before = threading.active_count()
    either.first.send([1], 2, 0, b"last words")
    either.first.close()
    wait(lambda: either.second.left == {0})
    time.sleep(0.1)
    assert either.got[1] == [(0, 2, 0, b"last words")]
    assert either.lost == []
    assert threading.active_count() == before - 1


def test_a_forked_child_holds_no_connection(either: Ends) -> None:
    with either.first.lock:  # as another thread may
        child = os.fork()
    if child == 0:
        with either.first.lock:
            pass
        either.first.close()  # as a finalizer does
        time.sleep(5)
        os._exit(0)
    either.first.send([1], 2, 0, b"x")
    wait(lambda: either.got[1])
    either.ours.shutdown(socket.SHUT_WR)
    start = time.monotonic()
    wait(lambda: either.lost)
    assert time.monotonic() - start < 1
    os.kill(child, 9)
    os.waitpid(child, 0)


def train_without_epoll(rank: int) -> list[Any]:
    with without_epoll():
        channel = open_channel(dist.new_group())
        assert isinstance(links_of(channel), PortableLinks)
        model = DistributedDataParallel(torch.nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Join([model, optimizer], may_break=True) as join:
            assert isinstance(links_of(channel_of(join)), PortableLinks)
            for x in join.batches([torch.ones(2, 5)] * (5, 40, 0)[rank]):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        begin = time.monotonic()
        for step in range(200):
            assert channel.barrier(rank, {"at": step} if rank == 1 else None) == BarrierResult(3, {1: {"at": step}})
        assert time.monotonic() - begin < 5
    return [p.tolist() for p in model.parameters()]


def test_a_loop_without_epoll(workers: Workers) -> None:
    first, *others = workers.run(3, train_without_epoll)
    assert others == [first] * 2


def end_without_epoll(rank: int) -> tuple[str, float]:
    with without_epoll():
        channel = open_channel()
    channel.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(channel, channel.barrier, tells=False)


def test_a_killed_rank_is_named_without_epoll(workers: Workers) -> None:
    outcomes = workers.outcomes(3, end_without_epoll)
    for rank in (0, 2):
        text, seconds = outcomes[rank].value
        assert text.startswith(f"Rank 1 failed, so rank {rank} cannot continue. Rank 1: its process is gone")
        assert seconds < 1.0


# ---------------------------------------------------------------- the layout


@given(st.lists(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), min_size=1, max_size=200))
@settings(max_examples=60, deadline=None)
def test_layouts(hosts: list[str]) -> None:
    layouts = [Layout(hosts, rank) for rank in range(len(hosts))]
    everyone = (1 << len(hosts)) - 1
    assert [rank for rank, layout in enumerate(layouts) if layout.parent is None] == [0]
    for rank, layout in enumerate(layouts):
        assert all(layouts[child].parent == rank for child in layout.children)
        here = [child for child in layout.children if hosts[child] == hosts[rank]]
        assert len(here) <= 7
        assert len(layout.children) - len(here) <= 7
        assert sum(layout.below.values()) | 1 << rank == layout.subtree
        assert sum(ranks.bit_count() for ranks in layout.below.values()) == layout.subtree.bit_count() - 1
        for child, ranks in layout.below.items():
            assert ranks == layouts[child].subtree
        way, steps = rank, 0
        while (parent := layouts[way].parent) is not None:
            way, steps = parent, steps + 1
        assert way == 0
        assert steps <= 6  # 200 ranks: three levels of hosts, and three of a host's
        for other in range(len(hosts)):
            if other != rank:
                neighbour = layout.next_to(other)
                assert neighbour == layout.parent or layouts[neighbour].subtree >> other & 1
                way, passed = neighbour, set()
                while way != other:
                    passed.add(way)
                    way = layouts[way].next_to(other)
                assert layout.between(other) == passed
    assert layouts[0].subtree == everyone


@pytest.mark.parametrize(
    ("hosts", "reached", "answered", "expected"),
    [
        ("aaa", {1}, {1}, [0]),  # rank 2 is asked through it
        ("aaa", {0, 1}, {1}, [0, 2]),  # it has left, and passes on
        ("aaa", {0, 1}, {0, 1}, [2]),
        ("a" * 12, {*range(12)} - {0, 10}, {*range(12)} - {0, 10}, [0, 10]),  # 8 to 11 are below rank 1
        ("aabb", {1}, {1}, [0]),
        ("aabb", {0, 1}, {0, 1}, [2]),
    ],
)
def test_who_is_asked_through_a_silent_rank_is_not_accused(
    hosts: str, reached: set[int], answered: set[int], expected: list[int]
) -> None:
    assert silent(Layout(hosts, 1), 1, len(hosts), reached, answered) == expected


# ---------------------------------------------------------------- several levels of real processes


def meet(rank: int, hosts: str) -> Any:
    with on_host(hosts[rank]):
        channel = open_channel()
    assert is_linked(channel)
    world_size, found = len(hosts), []
    for step in range(60):
        notice = {"at": step} if step % world_size == rank else None
        barrier = channel.barrier(rank + step, notice)
        found.append((barrier.total, barrier.notices))
    # Some ranks meet, on both sides of nodes that do not take part.
    some = range(1, world_size, 2)
    if rank in some:
        for step in range(20):
            channel.arrive(step, {"rank": rank} if step == 7 else None, some)
            barrier = channel.wait()
            found.append((barrier.total, barrier.notices))
        assert channel.gather({"at": rank}, among=("theirs", some)) == [{"at": other} for other in some]
    channel.gather(rank)
    if rank in some:
        channel.contribute("sum", rank, some)
    found.append((channel.barrier(1).total, {}))
    assert channel.contributed("sum", some) == (sum(some) if rank == 1 else None)
    assert len({*channel.gather(channel.barrier_number)}) == 1
    if rank == world_size - 1:
        channel.append("said by one", leads=True)
    assert rank == world_size - 1 or channel.follow() == "said by one"
    sums = channel.add("together", 1)
    assert 0 < sums <= world_size
    channel.gather(None)
    channel.close(meets=True)
    return found


@pytest.mark.parametrize("hosts", ["aa", "aaa", "aaaaaaaaaaaa", "aaabbbcccddd", "abababababab"])
def test_meetings_over_several_levels(crowd: Workers, hosts: str) -> None:
    world_size = len(hosts)
    expected: list[Any] = []
    for step in range(60):
        said = {rank: {"at": step} for rank in range(world_size) if step % world_size == rank}
        expected.append((sum(range(world_size)) + world_size * step, said))
    some = range(1, world_size, 2)
    partly = [(len(some) * step, {rank: {"rank": rank} for rank in some} if step == 7 else {}) for step in range(20)]
    for rank, found in enumerate(crowd.run(world_size, meet, hosts)):
        assert found == [*expected, *(partly if rank in some else []), (world_size, {})], rank


def count_messages(rank: int) -> list[int]:
    channel = open_channel()
    channel.barrier()
    dist.barrier()
    time.sleep(0.3)  # the deletions of what all have met in
    before = messages(channel)
    for _ in range(100):
        channel.barrier(1)
    return [after - then for after, then in zip(messages(channel), before, strict=True)]


def test_a_beat_takes_one_message_each_way_over_each_link(crowd: Workers) -> None:
    counts = crowd.run(12, count_messages)
    for sent, came in counts[2:]:
        assert 100 <= sent <= 102
        assert 100 <= came <= 102
    assert 700 <= counts[0][0] <= 710


def call_the_roll_at_once(rank: int) -> tuple[int, list[int]]:
    channel = open_channel()
    channel.gather(None)
    dist.barrier()
    time.sleep(0.3)
    before = sum(messages(channel))
    dist.barrier()
    answered = [len(channel.health().answers)]
    dist.barrier()
    time.sleep(0.3)
    took = sum(messages(channel)) - before
    if rank == 11:
        channel.close()
    dist.barrier()
    if rank != 11:
        answered.append(len(channel.health().answers))
    dist.barrier()
    return took, answered


def test_who_calls_the_roll_at_once_hears_the_same_answers(crowd: Workers) -> None:
    for rank, (took, answered) in enumerate(crowd.run(12, call_the_roll_at_once)):
        assert answered == ([12] if rank == 11 else [12, 11]), rank
        assert took <= (7 if rank == 0 else 5 if rank == 1 else 1) * (12 + 2), rank


def gather_what_cannot_be_sent(rank: int) -> list[int]:
    channel = open_channel()
    if rank == 0:
        with pytest.raises(JoinTypeError):
            channel.gather(object())
    return channel.gather(rank)


def test_what_cannot_be_sent_is_refused_before_anything_is_said(crowd: Workers) -> None:
    for outcome in crowd.outcomes(2, gather_what_cannot_be_sent, deadline=20.0):
        assert outcome.value == [0, 1], outcome.error


def meet_late(rank: int, hosts: str, catches_up: bool) -> list[Any]:
    """Hear of each beat only after something else, in which some ranks are long; one fails in the end."""
    with on_host(hosts[rank]):
        channel = open_channel(dist.new_group(range(len(hosts))))
    assert is_linked(channel)
    found: list[Any] = []
    for step in range(40):
        channel.defer_reads()
        channel.arrive(rank, {"at": step} if step == rank else None)
        if catches_up:
            channel.poll()
        if step % len(hosts) == rank:
            time.sleep(0.02)
        found.append(tuple(vars(channel.wait()).values()))
    channel.defer_reads()
    if rank == len(hosts) - 1:
        channel.fail("on purpose")
        channel.close()
        return found
    channel.arrive()
    begin = time.monotonic()
    with pytest.raises(PeerFailedError, match=rf"Rank {len(hosts) - 1}( \(on .\))? failed.*on purpose"):
        channel.wait()
    assert time.monotonic() - begin < 0.5
    channel.close()
    return found


@pytest.mark.parametrize("catches_up", [False, True])
@pytest.mark.parametrize("hosts", ["aa", "aaaaaaaaaaaa", "aaabbbcccddd", "abababababab"])
def test_meetings_of_which_ranks_hear_late(crowd: Workers, hosts: str, catches_up: bool) -> None:
    ranks = range(len(hosts))
    expected = [(sum(ranks), {step: {"at": step}} if step in ranks else {}) for step in range(40)]
    assert crowd.run(len(hosts), meet_late, hosts, catches_up) == [expected] * len(ranks)


# ---------------------------------------------------------------- a loop leaves nothing


def open_and_close(rank: int) -> list[tuple[int, int, int]]:
    counts = []
    for number in range(60):
        channel = open_channel()
        channel.barrier()
        channel.gather(number)
        channel.close(meets=True)
        streams = len(links_of(channel)._handle.__self__.streams)
        if number in (9, 59):
            dist.barrier()
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd")), streams))
    return counts


def test_channels_leave_no_threads_descriptors_or_messages(crowd: Workers) -> None:
    for early, late in crowd.run(3, open_and_close):
        assert late == early
        assert late[2] <= 1


# ---------------------------------------------------------------- silence


def hold_the_interpreter(rank: int, who: int, seconds: float) -> int:
    channel = open_channel()
    channel.barrier()
    if rank == who:
        ctypes.PyDLL(None).usleep(int(1e6 * seconds))  # does not give the lock away
    return int(channel.barrier(1).total) + len(channel.gather(rank))


VERY_LONG = [pytest.param(who, 10.0, marks=pytest.mark.long) for who in (0, 1, 11)]


@pytest.mark.parametrize(("who", "seconds"), [(1, 4.5), *VERY_LONG])
def test_a_rank_in_a_long_call_fails_nobody(crowd: Workers, who: int, seconds: float) -> None:
    assert crowd.run(12, hold_the_interpreter, who, seconds) == [24] * 12


def end_at_once(rank: int, gone: tuple[int, ...]) -> str:
    channel = open_channel()
    channel.barrier()
    if rank in gone:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        ctypes.PyDLL(None).usleep(4_000_000)  # so that rank 9 hears from nobody
    return told(channel, channel.barrier, tells=False)[0]


def test_who_finds_several_ranks_gone_does_not_blame_one(crowd: Workers) -> None:
    text = crowd.outcomes(10, end_at_once, (2, 5))[9].value
    assert text.startswith("Rank 2 failed, so rank 9 cannot continue. Rank 2: its process is gone")
    assert "The same goes for rank 5, and any of them may have failed first." in text


def notice_late(rank: int, late: int) -> str:
    with on_host(str(rank)):
        channel = open_channel()
    channel.barrier()
    if rank == 0:
        neighbours(channel)[1].shutdown(socket.SHUT_RDWR)
    if rank == late:
        ctypes.PyDLL(None).usleep(700_000)
    # What was said before the first one may have come.
    return told(channel, channel.barrier, channel.barrier, tells=False)[0]


@pytest.mark.parametrize("late", [0, 1])
def test_who_notices_late_that_a_link_broke_takes_nobody_for_killed(crowd: Workers, late: int) -> None:
    for rank, text in enumerate(crowd.run(3, notice_late, late)):
        assert text.startswith(f"Rank {rank} cannot continue: the link between ranks 0 and 1 broke"), text


def wait_for_each_other(rank: int, cores: int) -> list[int]:
    with mock.patch.object(os, "cpu_count", return_value=cores):
        channel = open_channel(dist.new_group())
    assert is_linked(channel)
    counts = []
    for meet in (channel.gather, lambda _: channel.append(0, True) if rank == 0 else channel.follow()):
        with mock.patch.object(os, "sched_yield") as yields, awake_longer(50):
            if rank == 0:
                time.sleep(0.3)
            meet(None)
        counts.append(yields.call_count)
    channel.close(meets=True)
    return counts


@pytest.mark.parametrize("cores", [2, 3])
def test_a_core_stays_awake_for_a_record_where_each_rank_has_one(crowd: Workers, cores: int) -> None:
    """Others wait for its answer; in a meeting it waits for others, for which it is awake a twentieth of that."""
    _, *others = crowd.run(3, wait_for_each_other, cores)
    for meeting, record in others:
        assert 4 * meeting <= record  # others may have the core meanwhile
        assert (record > 0) == (meeting > 0) == (cores == 3)
