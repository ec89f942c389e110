"""The channel between ranks, its failures and what it leaves behind."""

import gc
import math
import random
import re
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.core import threads
from tests.support.inside import keys_of, open_channel
from tests.support.workers import Workers, connect
from torch_join import JoinError, JoinTimeoutError, JoinValueError, PeerFailedError
from torch_join._control.codec import MAX_BYTES
from torch_join._control.reports import BarrierResult
from torch_join.integration import Channel


def test_a_world_of_one_needs_no_store() -> None:
    channel = open_channel()
    assert channel.barrier(3) == BarrierResult(3)
    assert channel.barrier(notice={"end": 2}) == BarrierResult(0, {0: {"end": 2}})
    assert channel.gather("x") == ["x"]
    channel.fail("no")
    assert channel.failure() is None


def test_the_largest_value_that_may_be_sent_comes() -> None:
    largest = "x" * (MAX_BYTES - 2)
    assert threads.run(2, lambda channel: channel.gather(largest, of=str)) == [[largest] * 2] * 2


def defer_reads(channel: Channel) -> list[BarrierResult]:
    said, heard = [], []
    channel.before_meeting = lambda: heard.append(channel.wait()) if len(heard) < len(said) else None
    for number in range(3):
        channel.arrive(channel.rank + number, {"from": channel.rank})
        said.append(number)
        if number < 2:
            assert channel.gather(channel.rank) == [0, 1]
    assert channel.barrier(5) == BarrierResult(10)
    return heard


def test_what_was_said_is_heard_before_all_meet_again() -> None:
    notices = {0: {"from": 0}, 1: {"from": 1}}
    assert threads.run(2, defer_reads) == [[BarrierResult(2 * number + 1, notices) for number in range(3)]] * 2


def add_up(channel: Channel, ranks: tuple[int, ...], together: threading.Barrier) -> list[Any]:
    """Add up without a wait; return what the first rank sees before all have, then what it comes to, and after that."""
    rank, found = channel.rank, list[Any]()
    for step in range(20):
        key = f"together/{step}"
        if rank == ranks[-1]:
            together.wait()
        if rank in ranks:
            channel.contribute(key, 2**32 - 1 - rank - step, ranks)
        if rank == ranks[0]:
            found.append(channel.contributed(key, ranks))
        if rank != ranks[-1]:
            together.wait()
    channel.gather(None)
    if rank == ranks[0]:
        found += [channel.contributed(f"together/{step}", ranks) for step in range(20)]
    return found


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2), (0, 2)])
def test_what_some_ranks_add_up_comes_to_the_first_of_them(ranks: tuple[int, ...]) -> None:
    found = threads.run(3, add_up, ranks, threading.Barrier(3))
    total = sum(2**32 - 1 - rank for rank in ranks)
    assert found[ranks[0]] == [None] * 20 + [total - len(ranks) * step for step in range(20)]
    assert [found[rank] for rank in range(3) if rank != ranks[0]] == [[], []]


def ask_each_other(channel: Channel) -> list[Any]:
    """Ask for what is kept late, and early."""
    rank, found = channel.rank, list[Any]()
    others = [other for other in range(3) if other != rank]
    for step in range(20):
        if step % 3 == rank:
            time.sleep(0.01)  # so that the others wait for it
        channel.keep(f"word/{step}", [rank, step])
        found.append(channel.ask(f"word/{step}", others, of=list[int]))
        channel.gather(None)
        found.append(channel.ask(f"word/{step // 2}", others, of=list[int]))
        channel.gather(None)
    return found


def test_what_ranks_keep_is_told_to_those_who_ask() -> None:
    for rank, found in enumerate(threads.run(3, ask_each_other)):
        others = [other for other in range(3) if other != rank]
        for step in range(20):
            assert found[2 * step] == {other: [other, step] for other in others}
            assert found[2 * step + 1] == {other: [other, step // 2] for other in others}


def ask_a_rank_that_fails(channel: Channel) -> str:
    if channel.rank == 1:
        time.sleep(0.3)
        channel.fail("ValueError: no")
        return ""
    with pytest.raises(PeerFailedError) as error:
        channel.ask("word", [1])
    return str(error.value)


def test_a_question_to_a_rank_that_fails_ends() -> None:
    assert "Rank 1: ValueError: no" in threads.run(2, ask_a_rank_that_fails)[0]


def count_keys(channel: Channel) -> list[int]:
    counts = []
    for step in range(100):
        channel.barrier(notice={"x": 1} if step % 3 == 0 else None)
        channel.keep(f"word/{step}", step)
        channel.gather(None)
        if step in (10, 99):
            counts.append(keys_of(channel))
    return counts


def test_what_has_been_read_is_deleted() -> None:
    for early, late in threads.run(3, count_keys):
        assert late <= early + 2


def say_and_fail(channel: Channel) -> str:
    channel.barrier()
    if channel.rank == 1:
        time.sleep(0.2)
        channel.post("verdict", "all the same")
        channel.fail("it has read the verdict")
        return ""
    text: str = channel.read("verdict", lambda: time.sleep(0.5), str)  # looks, and then both come
    with pytest.raises(PeerFailedError):
        channel.barrier()
    return text


def test_what_was_said_before_a_failure_is_heard() -> None:
    assert threads.run(3, say_and_fail) == ["all the same", "", "all the same"]


def go_on_without_rank_1(channel: Channel, together: threading.Barrier) -> str:
    channel.barrier()
    if channel.rank == 0:
        channel.fail("its process was stopped by a signal.", 1)
    together.wait()
    if channel.rank != 1:
        return ""
    with pytest.raises(PeerFailedError) as error:
        channel.barrier()
    return str(error.value)


def test_a_rank_that_others_have_given_up_is_told() -> None:
    told = threads.run(3, go_on_without_rank_1, threading.Barrier(3))[1]
    assert told == "The other ranks continued or exited without rank 1: its process was stopped by a signal."


def fail_in_turn(channel: Channel, together: threading.Barrier) -> str:
    for rank, word in enumerate(("first", "second")):
        if channel.rank == rank:
            channel.fail(word)
        together.wait()
    return str(channel.failure())


def test_the_first_failure_counts() -> None:
    assert threads.run(3, fail_in_turn, threading.Barrier(3))[2].endswith("Rank 0: first")


def wait_after_a_failure(channel: Channel) -> str:
    if channel.rank == 1:
        return ""
    channel.fail(ValueError("no"))
    with pytest.raises(JoinError) as error:
        channel.barrier()
    return str(error.value)


def test_who_has_failed_waits_for_nobody() -> None:
    assert threads.run(2, wait_after_a_failure)[0].endswith("has already reported its failure to them: ValueError: no")


def wait_in_vain(rank: int) -> str:
    connect()
    channel = open_channel(timeout=timedelta(seconds=1))
    if rank == 2:
        time.sleep(3.5)
        return ""
    with pytest.raises(JoinTimeoutError) as error:
        channel.barrier()
    time.sleep(1.5)
    return str(error.value)


def test_a_timeout_names_who_is_missing(workers: Workers) -> None:
    for rank, text in enumerate(workers.run(3, wait_in_vain)[:2]):
        assert f"Rank {rank} waited 1 s" in text
        assert re.search(r"rank(s [01],)? 2 did not reach it\.", text), text


def add_fractions(channel: Channel) -> list[float]:
    """Add up numbers of which no float is the sum, in whatever order the ranks come."""
    found = []
    for step in range(50):
        time.sleep(0.001 * random.random())
        found.append(channel.barrier([0.1, 1e17, 0.2, 1.0, 2.5e-320][channel.rank] * (1 + step)).total)
    return found


def test_sums_are_exact_and_the_same_in_any_order() -> None:
    expected = [math.fsum(count * (1 + step) for count in (0.1, 1e17, 0.2, 1.0, 2.5e-320)) for step in range(50)]
    assert threads.run(5, add_fractions) == [expected] * 5


@pytest.mark.parametrize("count", [-1, math.nan, math.inf])
def test_counts_out_of_range_are_refused(count: float) -> None:
    with pytest.raises(JoinValueError, match=f"takes a finite number of at least 0 from each rank, not {count}"):
        Channel().barrier(count)


def drop(rank: int) -> tuple[int, bool]:
    gc.disable()
    try:
        open_channel()  # the first one has the ranks connected
        gc.collect()
        before = threading.active_count()
        channel = open_channel()
        channel.barrier()
        dropped = weakref.ref(channel)
        dist.barrier()
        del channel
        until = time.monotonic() + 1.0  # the thread has yet to wake up
        while threading.active_count() > before and time.monotonic() < until:
            time.sleep(0.01)
        return max(0, threading.active_count() - before), dropped() is None
    finally:
        gc.enable()
        dist.barrier()


def test_a_dropped_channel_ends_its_thread_at_once(workers: Workers) -> None:
    assert workers.run(2, drop) == [(0, True)] * 2
