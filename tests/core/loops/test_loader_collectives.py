"""Loaders that do something with the other ranks' for each batch, and those that are read in another thread."""

import queue
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.support.workers import Workers
from torch_join import Join, JoinError


def longest(number: int) -> Tensor:
    """A batch of as many rows as the ranks agree on."""
    rows = torch.tensor(number)
    dist.all_reduce(rows, dist.ReduceOp.MAX)
    return torch.ones(int(rows), 3)


class Stream:
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Tensor]:
        return map(longest, self.numbers)


def train(rank: int, lengths: tuple[int, ...], sized: bool) -> Any:
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    numbers = [1 + step + rank for step in range(lengths[rank])]
    loader: Any = DataLoader(numbers, batch_size=None, collate_fn=longest) if sized else Stream(numbers)  # type: ignore[arg-type]
    rows = []
    with Join([ddp], timeout=timedelta(0, 20)) as join:
        for x in join.batches(loader):
            ddp(x).mean().backward()
            ddp.zero_grad()
            rows.append(len(x))
    return rows


@pytest.mark.parametrize(("lengths", "rows"), [((1, 3), [[2], [2, 3, 4]]), ((3, 1, 2), [[3, 4, 3], [3], [3, 4]])])
def test_a_collective_of_a_loader_of_certain_length_is_followed(
    workers: Workers, lengths: tuple[int, ...], rows: list[list[int]]
) -> None:
    assert workers.run(len(lengths), train, lengths, True) == rows


@pytest.mark.parametrize(("lengths", "sized"), [((1, 3), False), ((0, 2), True)])
def test_a_collective_of_another_loader_is_named(workers: Workers, lengths: tuple[int, ...], sized: bool) -> None:
    assert workers.run(2, train, (2, 2), sized) == [[2, 3], [2, 3]]
    for outcome in workers.outcomes(2, train, lengths, sized, timeout=6.0):
        assert (
            f"The loader of rank 1 called a torch.distributed collective to produce batch {lengths[0]}" in outcome.error
        )
        assert "waits for rank 0, which has finished" in outcome.error


def train_from_a_queue(rank: int, lengths: tuple[int, ...]) -> Any:
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    filled: queue.Queue[Any] = queue.Queue()

    def fill(batches: Any) -> None:
        try:
            for x in batches:
                filled.put(x)
            filled.put(None)
        except JoinError as error:
            filled.put(error)

    steps = 0
    with Join([ddp], timeout=timedelta(0, 20)) as join:
        batches = join.batches([torch.ones(2, 3)] * lengths[rank])
        threading.Thread(target=fill, args=(batches,)).start()
        while (x := filled.get()) is not None:
            if isinstance(x, JoinError):
                raise x
            ddp(x).mean().backward()
            ddp.zero_grad()
            steps += 1
    return steps


def test_a_loop_in_another_thread_raises_where_a_rank_runs_out(workers: Workers) -> None:
    assert workers.run(2, train_from_a_queue, (3, 3)) == [3, 3]
    for outcome in workers.outcomes(2, train_from_a_queue, (1, 3)):
        assert "iterates over join.batches in a different thread than its steps" in outcome.error


def ask_amid_a_backward(rank: int) -> list[float]:
    """The first backward waits until another thread has asked for the next batch, where ranks meet."""
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    batches: queue.Queue[Any] = queue.Queue()
    begun, asked = threading.Event(), threading.Event()

    def fill(source: Any) -> None:
        try:
            for index, x in enumerate(source):
                batches.put(x)
                if index == 0:
                    assert begun.wait(10)
                asked.set() if index == 1 else None
        finally:
            asked.set()
            batches.put(None)

    def wait(_: object) -> None:
        begun.set()
        assert asked.wait(10)

    losses = []
    with Join([ddp], may_break=True, timeout=timedelta(seconds=20)) as join:
        threading.Thread(target=fill, args=(join.batches([torch.ones(2, 3)] * 3),)).start()
        while (x := batches.get()) is not None:
            loss = ddp(x).mean()
            loss.register_hook(wait)
            loss.backward()
            losses.append(loss.item())
    return losses


def test_a_loop_in_another_thread_leaves_a_backward_alone(workers: Workers) -> None:
    assert [len(losses) for losses in workers.run(2, ask_amid_a_backward)] == [3, 3]
