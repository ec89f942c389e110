"""Who is left when a rank fails hears of the first cause, soon, wherever it is."""

import gc
import os
import re
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.core._control.hearing import a_hole, told
from tests.support.inside import open_channel
from tests.support.workers import Workers, connect, sum_and_read
from torch_join import Join, JoinError, PeerFailedError
from torch_join._collectives.tap import CollectiveTap
from torch_join._compat.groups import is_gone
from torch_join.integration import telling_failures

# ---------------------------------------------------------------- killed in the tail


def probe_under_a_tap(rank: int) -> bool:
    dist.barrier()
    if rank == 1:
        os._exit(1)
    tap = CollectiveTap(lambda call: None, lambda rank: True)
    tap.install()
    try:
        end = time.monotonic() + 10
        while not (gone := is_gone(dist.group.WORLD, 1)) and time.monotonic() < end:  # type: ignore[arg-type]
            time.sleep(0.1)
        return gone
    finally:
        tap.remove()
        dist.destroy_process_group()


def test_a_process_that_has_ended_is_seen_from_a_tail_too(workers: Workers) -> None:
    assert workers.outcomes(2, probe_under_a_tap)[0].value is True


# ---------------------------------------------------------------- the host of the store


def host_raises(rank: int, where: str) -> str:
    connect()
    channel = open_channel()
    waits: dict[str, Callable[[], object]] = {"collective": sum_and_read, "elsewhere": partial(time.sleep, 5)}
    text, _ = told(channel, a_hole if rank == 0 else waits.get(where, channel.barrier), channel.barrier)
    if rank == 0:
        os._exit(1)  # and the store with it
    return text


@pytest.mark.parametrize("where", ["barrier", "collective", "elsewhere"])
def test_the_words_of_the_stores_host_are_heard(workers: Workers, where: str) -> None:
    outcomes = workers.outcomes(3, host_raises, where)
    cause = "" if where != "collective" else " <- (RuntimeError|DistBackendError)" if workers.device == "cpu" else ".*"
    for rank in (1, 2):
        says = f"Rank 0 failed, so rank {rank} cannot continue. Rank 0: KeyError: 'a hole'{cause}"
        assert re.fullmatch(says, outcomes[rank].value), outcomes


def host_sees_a_collective_break(rank: int) -> str:
    connect()
    channel = open_channel()

    def see() -> None:
        while channel.failure() is None:
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")  # as gloo says of a rank that has left

    act = (see, a_hole, partial(time.sleep, 1))[rank]
    text, _ = told(channel, act, channel.barrier)
    if rank == 0:
        os._exit(1)  # and the store with it
    return text


def test_the_stores_host_stays_until_all_have_heard(workers: Workers) -> None:
    outcomes = workers.outcomes(3, host_sees_a_collective_break)
    assert outcomes[2].value == "Rank 1 failed, so rank 2 cannot continue. Rank 1: KeyError: 'a hole'", outcomes


def hear_of_another_channel(rank: int) -> str:
    channel = open_channel()

    def hear() -> None:
        raise PeerFailedError("Rank 1 failed, so rank 0 cannot continue. Rank 1: it is ill", 1, "it is ill")

    return told(channel, hear if rank == 0 else channel.barrier)[0]


def test_what_another_channel_knows_is_told(workers: Workers) -> None:
    _, ill, other = workers.run(3, hear_of_another_channel)
    assert ill == "The other ranks continued or exited without rank 1: it is ill"
    assert other == "Rank 1 failed, so rank 2 cannot continue. Rank 1: it is ill"


def host_notices(rank: int) -> tuple[str, float]:
    connect()
    channel = open_channel(timeout=timedelta(seconds=40))
    channel.barrier()
    dist.barrier()
    if rank == 2:
        os._exit(1)
    # Which nobody can set in place of rank 0.
    found = told(channel, channel.barrier if rank == 0 else partial(channel.read, "never"))
    if rank == 0:
        os._exit(3)
    return found


def test_survivors_blame_the_first_cause(workers: Workers) -> None:
    outcomes = workers.outcomes(4, host_notices)
    for rank in (1, 3):
        text, seconds = outcomes[rank].value
        assert re.search(r"[Rr]ank 2 (is gone|failed)", text), outcomes
        assert seconds < 20, outcomes


def breaks_without_a_word(rank: int) -> str:
    connect()
    channel = open_channel(timeout=timedelta(seconds=30))
    try:
        with telling_failures(channel):
            if rank == 1:
                os._exit(1)
            if rank == 0:
                sum_and_read()
            time.sleep(4.5)
            # It comes here when rank 0 has found out, and long before a wait looks for processes that have ended.
            start = time.monotonic()
            try:
                channel.barrier()
            finally:
                assert time.monotonic() - start < 3
    except PeerFailedError as error:
        time.sleep(3)
        dist.destroy_process_group()
        return str(error)
    return ""


def test_a_rank_that_is_gone_is_named_by_all(workers: Workers) -> None:
    outcomes = workers.outcomes(3, breaks_without_a_word)
    for rank in (0, 2):
        assert f"Rank 1 failed, so rank {rank} cannot continue. Rank 1: its process is gone" in outcomes[rank].value


# ---------------------------------------------------------------- what a failure leaves


def fail(rank: int, group: dist.ProcessGroup) -> None:
    channel = open_channel(group, timeout=timedelta(seconds=30))
    try:
        with telling_failures(channel):
            if rank == 1:
                raise KeyError("a hole")
            channel.barrier()
    except (KeyError, PeerFailedError):
        channel.close()


def fail_and_leave(rank: int) -> bool:
    gc.collect()
    gc.disable()
    try:
        fail(rank, dist.distributed_c10d._get_default_group())
        group = weakref.ref(dist.distributed_c10d._get_default_group())
        dist.destroy_process_group()
        return group() is None
    finally:
        gc.enable()


def test_a_failure_leaves_no_cycle_around_the_process_group(workers: Workers) -> None:
    """A process that is forked, for a DataLoader, may collect it; and torch waits for ever for its threads there."""
    assert workers.run(3, fail_and_leave) == [True] * 3


# ---------------------------------------------------------------- ranks by their number in the whole job


def amiss_in_a_smaller_group(rank: int, what: str) -> str:
    connect()
    group = dist.new_group([1, 2])
    text = ""
    if rank:
        is_last = rank == 2
        model = DistributedDataParallel(torch.nn.Linear(5, 1), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.2 if is_last and what == "rates" else 0.1)
        things = [optimizer, model] if is_last and what == "order" else [model, optimizer]
        try:
            with Join(things, timeout=timedelta(seconds=20), may_break=what == "raises") as join:
                for step, x in enumerate(join.batches([torch.ones(2, 5)] * (2 + rank))):
                    if is_last and step == 1 and what == "raises":  # the other one waits at its next step
                        raise KeyError("a hole")
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except (JoinError, KeyError) as error:
            text = str(error)
        dist.destroy_process_group(group)
    dist.barrier()
    return text


@pytest.mark.parametrize(
    ("what", "said", "by"),
    [
        ("order", "to Join: rank 1: DistributedDataParallel, SGD; rank 2: SGD, DistributedDataParallel.", (1, 2)),
        ("rates", "0.1 on rank 1, 0.2 on rank 2", (1, 2)),
        ("raises", "Rank 2 failed, so rank 1 cannot continue. Rank 2: KeyError", (1,)),
    ],
)
def test_ranks_of_a_smaller_group_have_their_own_names(
    workers: Workers, what: str, said: str, by: tuple[int, ...]
) -> None:
    texts = workers.run(3, amiss_in_a_smaller_group, what)
    for rank in by:
        assert said in texts[rank], texts


# ---------------------------------------------------------------- quiet waits, and few connections


def slow(rank: int) -> int:
    connect()
    channel = open_channel()
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            if rank == 1:
                time.sleep(6)
            channel.barrier()
            channel.gather(rank)
        finally:
            os.dup2(before, 2)
        file.seek(0)
        found = file.read()
    dist.barrier()
    assert not found, found
    return channel.barrier(1).total


def test_a_healthy_wait_is_quiet(workers: Workers) -> None:
    assert workers.run(3, slow) == [3] * 3


# ---------------------------------------------------------------- the end of the interpreter

ROOT = Path(__file__).parents[3]
END = """
import atexit, os, sys, tempfile
atexit.register(sum, range(6_000_000))  # in C: it does not let go of the interpreter's lock
import torch, torch.distributed as dist
from tests.support.inside import EXIT_GUARD_PLACE, asks_at_exit
from torch_join.integration import open_channel
calls = []
drain = getattr(*EXIT_GUARD_PLACE)
setattr(*EXIT_GUARD_PLACE, lambda: (calls.append(1), drain()))
atexit.register(lambda: calls.append(0))
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
assert asks_at_exit().currsize == 0
open_channel(), open_channel()
assert asks_at_exit().currsize == 1
atexit.register(lambda: (dist.all_reduce(torch.ones(1000)), calls.append(0)))
atexit._run_exitfuncs()
print(calls)
"""


def test_the_interpreter_waits_for_gloos_threads_after_other_handlers() -> None:
    found = subprocess.run([sys.executable, "-c", END], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[0, 0, 1]"
