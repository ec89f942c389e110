"""Ranks that wait for each other for ever are told of, with their places; slow ones are not."""

import inspect
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.inside import RECORDED, deadlock_seconds, issued_collectives, stuck_ranks, where
from tests.support.workers import Workers
from torch_join import Join, JoinError

records = pytest.mark.skipif(not RECORDED, reason="this torch's flight recorder knows nothing of gloo")


def made(rank: int, lengths: tuple[int, ...], buffers: bool = False) -> tuple[Any, Any, list[Any]]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8)] if buffers else [nn.Linear(4, 8)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(8, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(2, 4) for _ in range(lengths[rank])]


def step(model: Any, optimizer: Any, batch: Any) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def breaks(rank: int) -> None:
    model, optimizer, batches = made(rank, (6, 4))
    with Join([model, optimizer]) as join:
        for number, batch in enumerate(join.batches(batches)):
            if (rank, number) == (1, 2):
                break
            step(model, optimizer, batch)


def skips(rank: int) -> None:
    model, optimizer, batches = made(rank, (4, 4), buffers=True)
    with Join([model, optimizer]) as join:
        for number, batch in enumerate(join.batches(iter(batches))):
            if (rank, number) == (0, 1):
                continue
            step(model, optimizer, batch)


def skips_certain(rank: int) -> None:
    """Until the loop's end, each of a rank's backwards meets another step's."""
    model, optimizer, batches = made(rank, (4, 5))
    with Join([model, optimizer]) as join:
        for number, batch in enumerate(join.batches(batches)):
            if (rank, number) != (1, 1):
                step(model, optimizer, batch)


def reduces_alone(rank: int) -> None:
    model, optimizer, batches = made(rank, (5, 5, 2))
    with Join([model, optimizer]) as join:
        for number, batch in enumerate(join.batches(iter(batches))):
            step(model, optimizer, batch)
            if (rank, number) == (1, 1):
                dist.all_reduce(torch.ones(1))


def gathers_apart(rank: int) -> None:
    """Nobody is in a meeting: one rank is in a backward, and the other in another collective."""
    model, optimizer, batches = made(rank, (6, 6))
    with Join([model, optimizer]) as join:
        for number, batch in enumerate(join.batches(batches)):
            step(model, optimizer, batch)
            if (rank, number) == (1, 1):
                dist.barrier()


def begins_alone(rank: int) -> None:
    """Rank 1 goes through one loop less, and waits for the other outside of any, where its log alone says so."""
    model, optimizer, batches = made(rank, (2, 3))
    for _ in range(2 - rank):
        with Join([model, optimizer]) as join:
            for batch in join.batches(batches):
                step(model, optimizer, batch)
    with mock.patch.object(logging.getLogger("torch_join"), "error") as logged:
        try:
            dist.barrier()
        except RuntimeError as error:
            raise JoinError(logged.call_args.args[1]) from error


def told(rank: int, program: Callable[[int], None]) -> tuple[str, str, float]:
    start = time.monotonic()
    with deadlock_seconds(0.3):
        try:
            program(rank)
        except JoinError as error:
            found = type(error).__name__, str(error), time.monotonic() - start
            end_together(rank)
            return found
    return "", "", 0.0


def end_together(rank: int) -> None:
    store = dist.PrefixStore("end", dist.distributed_c10d._get_default_store())
    store.set(str(rank), "")  # collectives are broken
    store.wait([str(each) for each in range(dist.get_world_size())], timedelta(seconds=20))
    dist.destroy_process_group()


@records
@pytest.mark.parametrize(
    ("program", "world_size", "said"),
    [
        (breaks, 2, ["rank 0 is in a backward (all_reduce) at", "may_break=True"]),
        (skips, 2, ["rank 1 is in DDP's broadcast of buffers", "ddp.module(x)", "join.batches(good(loader))"]),
        (skips_certain, 2, ["Rank 1 did not sync gradients in step 1 of the loop, but rank 0 did. Since then"]),
        (reduces_alone, 3, ["rank 1 is in all_reduce at", "only some ranks call"]),
        (gathers_apart, 2, ["rank 0 is in a backward (all_reduce) at", "rank 1 is in barrier at", "different orders"]),
        (begins_alone, 2, ["rank 0 is in a meeting of all ranks", "rank 1 is in barrier at", "count epochs"]),
    ],
)
def test_all_ranks_are_told(workers: Workers, program: Any, world_size: int, said: list[str]) -> None:
    outcomes = workers.run(world_size, told, program, timeout=300.0, deadline=40.0)
    first, last = inspect.getsourcelines(program)[1], inspect.getsourcelines(program)[1] + 20
    for name, text, seconds in outcomes:
        assert name == "JoinError"
        assert text == outcomes[0][1]
        assert text.startswith("Deadlock: these ranks wait for each other: rank")
        assert all(each in text for each in said)
        assert seconds < 20
    lines = [int(part.split(",")[0].split(" ")[0]) for part in outcomes[0][1].split(f"{__file__}:")[1:]]
    assert lines
    assert {line for line in lines if not first <= line <= last} <= {inspect.getsourcelines(step)[1] + 1}


def raises_alone(rank: int) -> None:
    model, optimizer, batches = made(rank, (4, 4, 1))
    with Join([model, optimizer]) as join:
        for number, batch in enumerate(join.batches(iter(batches))):
            if (rank, number) == (0, 2):
                raise OSError("no such image")
            step(model, optimizer, batch)


def raises_in_a_chain(rank: int) -> None:
    """Rank 2 waits for rank 1 alone, which waits for rank 0, which has raised; by groups with torch's own timeout."""
    model, optimizer, batches = made(rank, (2, 2, 2))
    groups = [dist.new_group(pair) for pair in ([0, 1], [1, 2])]
    with Join([model, optimizer]) as join:
        for batch in join.batches(batches):
            step(model, optimizer, batch)
            if rank == 0:
                raise OSError("no such image")
            dist.all_reduce(torch.ones(1), group=groups[rank - 1])


def ended(rank: int, program: Callable[[int], None]) -> tuple[str, float]:
    start = time.monotonic()
    with deadlock_seconds(0.3), pytest.raises((JoinError, OSError)) as caught:
        program(rank)
    seconds = time.monotonic() - start
    end_together(rank)
    return str(caught.value), seconds


@records
@pytest.mark.parametrize("program", [raises_alone, raises_in_a_chain])
def test_whoever_waits_for_a_rank_that_has_raised_is_told(workers: Workers, program: Any) -> None:
    (own, _), *others = workers.run(3, ended, program, timeout=300.0, deadline=40.0)
    assert own == "no such image"
    for text, seconds in others:
        assert "Rank 0 failed" in text
        assert seconds < 20


def slow_to_raise(rank: int) -> list[str]:
    """All raise together; rank 1 waits for a slow one long after rank 0 has gone, which has given its part."""
    model, optimizer, batches = made(rank, (2, 2, 2))
    with deadlock_seconds(0.1), pytest.raises(OSError, match="no more"), Join([model, optimizer]) as join:
        for batch in join.batches(batches):
            step(model, optimizer, batch)
            time.sleep(2.5 if rank == 2 else 0.0)
            dist.reduce(torch.ones(1), 1)
            raise OSError("no more")
    dist.barrier()
    return []


def slow(rank: int) -> list[str]:
    """Each rank takes its time somewhere, and has issued what others have not: nobody waits for ever."""
    torch.manual_seed(0)
    model, optimizer, batches = made(rank, (3, 4, 5), buffers=True)
    some = dist.new_group([1, 2])

    def hook(gradient: Any) -> None:
        time.sleep(1.2 if rank == 1 else 0.0)

    with deadlock_seconds(0.1), Join([model, optimizer]) as join:
        for number, batch in enumerate(join.batches(iter(batches))):
            if (number, rank) == (1, 0):
                time.sleep(1.2)
            work = dist.all_reduce(torch.ones(1), async_op=True) if number == 0 else None
            if number == 1 and rank > 0:
                time.sleep(0.6 * rank)
                dist.all_reduce(torch.ones(1), group=some)
            if number == 2 and rank < 2:
                (dist.send if rank else dist.recv)(torch.ones(1), 1 - rank)
            handle = next(model.parameters()).register_hook(hook) if number == 2 else None
            step(model, optimizer, batch)
            if handle is not None:
                handle.remove()
            if work is not None:
                time.sleep(0.5)
                work.wait()
        time.sleep(0.6 * rank)
    return []


def saves_in_a_thread(rank: int) -> list[str]:
    """Each rank saves in a thread, which meets the others' threads in its own group; rank 0's disk is slow."""
    model, optimizer, batches = made(rank, (3, 3, 3))
    saves, pair = dist.new_group(), dist.new_group([1, 2])
    other = DistributedDataParallel(nn.Linear(4, 1), process_group=pair) if rank else None

    def save() -> None:
        time.sleep(2.5 if rank == 0 else 0.0)
        dist.barrier(group=saves)

    saving = threading.Thread(target=save)
    with deadlock_seconds(0.1), Join([model, optimizer]) as join:
        for number, batch in enumerate(join.batches(iter(batches))):
            if number == 1:
                saving.start()
                time.sleep(1.5 if rank == 2 else 0.2)
                if other is not None:
                    other(batch).sum().backward()
            step(model, optimizer, batch)
    saving.join()
    return []


def begins_in_another_order(rank: int) -> list[str]:
    """Ranks 0 and 1 begin works of two groups in another order, around a backward in which both wait for rank 2."""
    model, optimizer, batches = made(rank, (2, 2, 2))
    groups = [dist.new_group() for _ in range(2)]
    first, second = reversed(groups) if rank == 1 else groups
    with deadlock_seconds(0.1), Join([model, optimizer]) as join:
        for batch in join.batches(batches):
            before = dist.all_reduce(torch.ones(1), group=first, async_op=True)
            time.sleep(1.5 if rank == 2 else 0.0)
            step(model, optimizer, batch)
            after = dist.all_reduce(torch.ones(1), group=second, async_op=True)
            before.wait()
            after.wait()
    return []


@pytest.mark.parametrize("program", [slow, slow_to_raise, saves_in_a_thread, begins_in_another_order])
def test_slow_ranks_are_not_accused(workers: Workers, program: Any) -> None:
    assert workers.run(3, program, timeout=300.0, deadline=60.0) == [[]] * 3


def computes(rank: int) -> list[str]:
    """A long backward is none that waits, though what it began before is not done: the other one begins it after."""
    model, optimizer, batches = made(rank, (2, 2))
    group, weight = dist.new_group([0, 1]), torch.eye(500, dtype=torch.float64)
    with deadlock_seconds(0.2), Join([model, optimizer]) as join:
        for number, batch in enumerate(join.batches(batches)):
            loss = model(batch).square().mean()
            product = torch.zeros(500, 500, dtype=torch.float64, requires_grad=True)
            for _ in range(400 if rank == number == 0 else 0):
                product = product @ weight
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True) if rank == 0 else None
            (loss + product.sum()).backward()  # of the product first
            work = work or dist.all_reduce(torch.ones(1), group=group, async_op=True)
            work.wait()
            optimizer.step()
            optimizer.zero_grad()
    return []


def test_who_computes_is_not_accused(workers: Workers) -> None:
    assert workers.run(2, computes, timeout=300.0, deadline=60.0) == [[]] * 2


def recorded(rank: int) -> tuple[int, dict[str, str], tuple[str, int, str] | None]:
    """What torch's flight recorder says of a collective that is not done; the names that are relied on."""
    dist.all_reduce(torch.ones(1))
    (dist.send if rank else dist.recv)(torch.ones(1), 1 - rank)
    dist.barrier()
    work = dist.all_gather([torch.ones(1)] * 2, torch.ones(1), async_op=True) if rank == 0 else None
    time.sleep(0.2)
    found, store = issued_collectives(), dist.PrefixStore("found", dist.distributed_c10d._get_default_store())
    if rank == 0:
        store.set("0", "")
    else:
        store.wait(["0"])
        work = dist.all_gather([torch.ones(1)] * 2, torch.ones(1), async_op=True)
    work.wait()
    return found


@records
def test_the_recorder_is_as_it_was(workers: Workers) -> None:
    (count, last, pending), (others, _, nothing) = workers.run(2, recorded)
    assert nothing is None
    assert pending == ("0:gloo", count, "all_gather")
    assert count == others + 1
    assert [last[str(count - 2)], last[str(count - 1)], last[str(count)]] == ["all_reduce", "barrier", "all_gather"]


CASES: dict[str, tuple[list[Any], dict[int, set[int]]]] = {
    "a barrier that one has not come to, in a collective that waits for the other": (
        [where("collective", issued=(5, True, "all_reduce")), where("meeting", ("barrier", 7), issued=(4, False, ""))],
        {0: {1}, 1: {0}},
    ),
    "one is elsewhere": (
        [where("collective", issued=(5, True, "all_reduce")), where("elsewhere", issued=(4, False, ""))],
        {},
    ),
    "another operation": (
        [where("collective", issued=(5, True, "barrier")), where("backward", issued=(5, True, "all_reduce"))],
        {0: {1}, 1: {0}},
    ),
    "the same one": (
        [where("collective", issued=(5, True, "all_reduce")), where("backward", issued=(5, True, "all_reduce"))],
        {},
    ),
    "nobody knows what the other has issued": (
        [where("collective", issued=(5, True, "all_reduce")), where("meeting", ("barrier", 7), most=9)],
        {},
    ),
    "one has come to the meeting, and waits in the next": (
        [where("meeting", ("gather", 3), passed=(0, 4, 0)), where("meeting", ("barrier", 7), passed=(7, 4, 0))],
        {},
    ),
    "a record that is written": (
        [where("meeting", ("record", 3), passed=(0, 0, 3)), where("meeting", ("barrier", 7), passed=(7, 0, 4))],
        {},
    ),
    "a third one waits for these": (
        [
            where("meeting", ("gather", 3), passed=(0, 4, 0), issued=(0, False, "")),
            where("meeting", ("barrier", 7), passed=(7, 3, 0), issued=(0, False, "")),
            where("backward", issued=(1, True, "all_reduce")),
        ],
        {0: {1, 2}, 1: {0, 2}, 2: {0, 1}},
    ),
    "two meetings": (
        [where("meeting", ("gather", 3), passed=(0, 4, 0)), where("meeting", ("barrier", 7), passed=(7, 3, 0))],
        {0: {1}, 1: {0}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_waits_for_whom(case: str) -> None:
    places, expected = CASES[case]
    assert stuck_ranks(places) == expected
