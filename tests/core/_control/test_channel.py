"""The channel between ranks, its failures and what it leaves in the store."""

import gc
import os
import re
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.inside import keys_of, open_channel
from tests.support.workers import Workers, connect, sum_and_read
from torch_join import JoinTimeoutError, JoinValueError, PeerFailedError
from torch_join._control.codec import MAX_BYTES
from torch_join._control.said import Beat
from torch_join.integration import Channel, telling_failures


def test_a_world_of_one_needs_no_store() -> None:
    channel = open_channel()
    assert channel.barrier(3) == Beat(3)
    assert channel.barrier(notice={"end": 2}) == Beat(0, {0: {"end": 2}})
    assert channel.gather("x") == ["x"]
    channel.fail("no")
    assert channel.failure() is None


def gather_the_most(rank: int) -> int:
    said = open_channel().gather("x" * (MAX_BYTES - 2), of=str)
    assert said[0] == said[1]
    return len(said[0])


def test_the_largest_value_that_may_be_sent_is_one_that_the_store_takes(workers: Workers) -> None:
    assert workers.run(2, gather_the_most) == [MAX_BYTES - 2] * 2


def put_off(rank: int) -> list[Beat]:
    channel = open_channel()
    said, heard = [], []
    channel.before_meeting = lambda: heard.append(channel.wait()) if len(heard) < len(said) else None
    for number in range(3):
        channel.arrive(rank + number, {"from": rank})
        said.append(number)
        if number < 2:
            assert channel.gather(rank) == [0, 1]
    assert channel.barrier(5) == Beat(10)
    return heard


def test_what_was_said_is_heard_before_all_meet_again(workers: Workers) -> None:
    notices = {0: {"from": 0}, 1: {"from": 1}}
    assert workers.run(2, put_off) == [[Beat(2 * number + 1, notices) for number in range(3)]] * 2


def beat_and_gather(rank: int) -> list[Any]:
    channel = open_channel()
    seen: list[Any] = []
    for step in range(200):
        notice = {"end": step} if step % 50 == rank else None
        beat = channel.barrier(count=rank + step, notice=notice)
        seen.append((beat.total, beat.notices))
        if step % 70 == 0:
            seen.append(channel.gather((rank, step)))
    dist.barrier()  # the first rank may be serving the store
    return seen


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_beats_add_up_and_carry_notices(workers: Workers, world_size: int, store: str) -> None:
    outcomes = workers.outcomes(world_size, beat_and_gather, store=store)
    expected: list[Any] = []
    for step in range(200):
        notices = {rank: {"end": step} for rank in range(world_size) if step % 50 == rank}
        expected.append((sum(rank + step for rank in range(world_size)), notices))
        if step % 70 == 0:
            expected.append([(rank, step) for rank in range(world_size)])
    for outcome in outcomes:
        assert outcome.value == expected, outcome.error


def add_up(rank: int, ranks: tuple[int, ...]) -> list[Any]:
    """Add up without a wait; return what the first rank sees before all have, then what it comes to, and after that."""
    channel = open_channel()
    found: list[Any] = []
    for step in range(20):
        key = f"together/{step}"
        if rank == ranks[-1]:
            dist.barrier()
        if rank in ranks:
            channel.contribute(key, 2**32 - 1 - rank - step, ranks)
        if rank == ranks[0]:
            found.append(channel.contributed(key, ranks))
        if rank != ranks[-1]:
            dist.barrier()
    channel.gather(None)
    if rank == ranks[0]:
        found += [channel.contributed(f"together/{step}", ranks) for step in range(20)]
    channel.close(meets=True)
    return found


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2), (0, 2)])
def test_what_some_ranks_add_up_comes_to_the_first_of_them(workers: Workers, ranks: tuple[int, ...]) -> None:
    found = workers.run(3, add_up, ranks)
    total = sum(2**32 - 1 - rank for rank in ranks)
    assert found[ranks[0]] == [None] * 20 + [total - len(ranks) * step for step in range(20)]
    assert [found[rank] for rank in range(3) if rank != ranks[0]] == [[], []]


def ask_each_other(rank: int) -> list[Any]:
    """Ask for what is kept late, and early."""
    channel, others = open_channel(), [other for other in range(3) if other != rank]
    found: list[Any] = []
    for step in range(20):
        if step % 3 == rank:
            time.sleep(0.01)  # so that the others wait for it
        channel.keep(f"word/{step}", [rank, step])
        found.append(channel.ask(f"word/{step}", others, of=list[int]))
        channel.gather(None)
        found.append(channel.ask(f"word/{step // 2}", others, of=list[int]))
        channel.gather(None)
    channel.close(meets=True)
    return found


def test_what_ranks_keep_is_told_to_those_who_ask(workers: Workers) -> None:
    for rank, found in enumerate(workers.run(3, ask_each_other)):
        others = [other for other in range(3) if other != rank]
        for step in range(20):
            assert found[2 * step] == {other: [other, step] for other in others}
            assert found[2 * step + 1] == {other: [other, step // 2] for other in others}


def ask_a_rank_that_fails(rank: int) -> str:
    channel = open_channel()
    if rank == 1:
        time.sleep(0.3)
        channel.fail("ValueError: no")
        return ""
    with pytest.raises(PeerFailedError) as error:
        channel.ask("word", [1])
    return str(error.value)


def test_a_question_to_a_rank_that_fails_ends(workers: Workers) -> None:
    assert "Rank 1: ValueError: no" in workers.run(2, ask_a_rank_that_fails)[0]


def count_keys(rank: int) -> list[int]:
    counts = []
    channel = open_channel()
    for step in range(100):
        channel.barrier(notice={"x": 1} if step % 3 == 0 else None)
        channel.keep(f"word/{step}", step)
        channel.gather(None)
        if step in (10, 99):
            counts.append(keys_of(channel))
    return counts


def test_what_has_been_read_is_deleted(workers: Workers) -> None:
    for early, late in workers.run(3, count_keys):
        assert late <= early + 2


def close_a_channel(rank: int) -> int:
    channel = open_channel()
    dist.barrier()  # what the ranks were connected over is gone
    before = keys_of(channel)
    dist.barrier()
    for step in range(5):
        channel.barrier(notice={"x": step})
        channel.gather(step)
    dist.barrier()
    channel.close()
    dist.barrier()
    left = keys_of(channel) - before
    dist.barrier()
    return int(left)


def test_a_closed_channel_leaves_nothing(workers: Workers) -> None:
    assert workers.run(3, close_a_channel) == [0] * 3


def two_channels(rank: int) -> list[int]:
    first, second = open_channel(), open_channel()
    totals = [first.barrier(rank).total, second.barrier(10 * rank).total, first.barrier(1).total]
    dist.barrier()
    return totals


def test_channels_do_not_meet(workers: Workers) -> None:
    assert workers.run(2, two_channels) == [[1, 10, 2]] * 2


def a_group_of_two(rank: int) -> int:
    group = dist.new_group([0, 2])
    channel = open_channel(group) if rank != 1 else Channel()
    total = channel.barrier(rank).total if rank != 1 else 0
    dist.barrier()
    return total


def test_a_channel_of_a_group(workers: Workers) -> None:
    assert workers.run(3, a_group_of_two) == [2, 0, 2]


def fail_before(rank: int, what: str) -> tuple[str, float]:
    channel = open_channel()
    channel.barrier()
    start = time.monotonic()
    if rank == 1:
        with pytest.raises(KeyError), telling_failures(channel):
            raise KeyError("a hole")
        time.sleep(0.5)
        return "", 0.0
    with pytest.raises(PeerFailedError) as error:
        channel.barrier() if what == "beat" else channel.gather(None)
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize("what", ["beat", "gather"])
def test_a_failure_ends_the_wait_at_once(workers: Workers, what: str) -> None:
    for rank, (text, seconds) in enumerate(workers.run(3, fail_before, what)):
        if rank != 1:
            assert text == f"Rank 1 failed, so rank {rank} cannot go on. Rank 1: KeyError: 'a hole'"
            assert seconds < 2


def say_and_fail(rank: int) -> str:
    channel = open_channel()
    channel.barrier()
    if rank == 1:
        time.sleep(0.2)
        channel.post("verdict", "all the same")
        channel.fail("it has read the verdict")
        return ""
    text: str = channel.read("verdict", lambda: time.sleep(0.5), str)  # looks, and then both come
    with pytest.raises(PeerFailedError):
        channel.barrier()
    return text


def test_what_was_said_before_a_failure_is_heard(workers: Workers) -> None:
    assert workers.run(3, say_and_fail) == ["all the same", "", "all the same"]


def go_on_without_rank_1(rank: int) -> str:
    channel = open_channel()
    channel.barrier()
    if rank == 0:
        channel.fail("its process is stopped: by a signal.", 1)
    dist.barrier()
    found = ""
    if rank == 1:
        with pytest.raises(PeerFailedError) as error:
            channel.barrier()
        found = str(error.value)
    dist.barrier()
    return found


def test_a_rank_that_others_have_given_up_is_told(workers: Workers) -> None:
    told = workers.run(3, go_on_without_rank_1)[1]
    assert told == "The others go on, or end, without rank 1: its process is stopped: by a signal."


def the_first_failure_counts(rank: int) -> str:
    channel = open_channel()
    if rank == 0:
        channel.fail("first")
    dist.barrier()
    if rank == 1:
        channel.fail("second")
    dist.barrier()
    failure = str(channel.failure())
    dist.barrier()
    return failure


def test_the_first_failure_counts(workers: Workers) -> None:
    assert workers.run(3, the_first_failure_counts)[2].endswith("Rank 0: first")


def broken_collective(rank: int) -> str:
    channel = open_channel()
    try:
        with telling_failures(channel):
            if rank == 1:
                raise KeyError("a hole")
            dist.barrier()
    except PeerFailedError as error:
        channel.close()  # the store's host stays until the others have heard, too
        dist.destroy_process_group()
        return f"{error} <- {type(error.__cause__).__name__}"
    except KeyError:
        channel.close()  # the store's host stays until the others have heard, too
        dist.destroy_process_group()
        time.sleep(1.5)
    return ""


def test_a_broken_collective_is_explained(workers: Workers) -> None:
    text = workers.outcomes(2, broken_collective)[0].value
    assert re.search("Rank 1: KeyError: 'a hole' <- (RuntimeError|DistBackendError)", text)


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
        assert re.search(r"rank(s [01],)? 2 at work elsewhere\.", text), text


def killed_peer(rank: int) -> tuple[str, float]:
    channel = open_channel()
    channel.barrier()
    dist.barrier()
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        channel.barrier()
    except PeerFailedError as error:
        channel.close()  # the store's host stays until the others have heard, too
        dist.destroy_process_group()
        return str(error), time.monotonic() - start
    return "", 0.0


def test_a_killed_rank_is_named_within_seconds(workers: Workers) -> None:
    outcomes = workers.outcomes(3, killed_peer, timeout=60.0)
    assert outcomes[1].error == "the process ended"
    for outcome in (outcomes[0], outcomes[2]):
        text, seconds = outcome.value
        # Whoever notices says so, and the others hear it.
        assert re.search("process of rank 1 is gone: killed|Rank 1: its process is gone: killed", text)
        assert seconds < 12


def broken_by_a_kill(rank: int) -> str:
    channel = open_channel()
    try:
        with telling_failures(channel):
            if rank == 1:
                os._exit(1)
            sum_and_read()
    except PeerFailedError as error:
        channel.close()  # the store's host stays until the others have heard, too
        dist.destroy_process_group()
        return str(error)
    return ""


def test_a_collective_broken_by_a_kill_names_who_is_silent(workers: Workers) -> None:
    outcomes = workers.outcomes(2, broken_by_a_kill, timeout=60.0)
    assert re.search("rank 1 did not answer since|Rank 1: its process is gone", outcomes[0].value), outcomes[0]


def slow_peer(rank: int) -> int:
    channel = open_channel()
    if rank == 1:
        time.sleep(2.0)
    found = channel.barrier(1).total + len(channel.gather(None))
    dist.barrier()
    return found


def test_a_slow_rank_is_waited_for(workers: Workers) -> None:
    assert workers.run(2, slow_peer) == [4, 4]


def test_counts_out_of_range_are_refused() -> None:
    with pytest.raises(JoinValueError, match="adds from 0 to 1073741824 on each, not -1"):
        Channel().barrier(-1)


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
        return threading.active_count() - before, dropped() is None
    finally:
        gc.enable()
        dist.barrier()


def test_a_dropped_channel_ends_its_thread_at_once(workers: Workers) -> None:
    assert workers.run(2, drop) == [(0, True)] * 2
