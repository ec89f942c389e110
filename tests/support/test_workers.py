"""The harness itself: a worker that returns, raises, hangs, exits."""

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.workers import DeadlineError, WorkerError, Workers


@pytest.fixture
def own() -> Iterator[Workers]:
    pool = Workers(2)
    yield pool
    pool.close()


def add_up(rank: int, start: int) -> float:
    total = torch.tensor([float(rank + start)])
    dist.all_reduce(total)
    return float(total)


def raise_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("no luck")
    dist.barrier()


def hang_on_one(rank: int) -> None:
    while rank == 1:
        time.sleep(0.1)


def exit_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(3)


def process(rank: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_results_come_by_rank(own: Workers, store: str) -> None:
    outcomes = own.outcomes(2, add_up, 10, store=store)
    assert [o.value for o in outcomes] == [21.0, 21.0]


def test_workers_are_reused(own: Workers) -> None:
    assert own.run(2, process) == own.run(2, process)


def test_an_error_is_brought_home_and_frees_the_others(own: Workers) -> None:
    with pytest.raises(WorkerError, match="ValueError: no luck") as caught:
        own.run(2, raise_on_one)
    assert "raise_on_one" in str(caught.value), "the traceback is missing"
    assert own.run(2, add_up, 0) == [1.0, 1.0]


def test_a_deadline_prints_stacks_and_replaces_the_workers(own: Workers) -> None:
    before = own.run(2, process)
    with pytest.raises(DeadlineError, match="hang_on_one") as caught:
        own.run(2, hang_on_one, deadline=1.0)
    assert "rank 0" in str(caught.value)
    assert not set(before) & set(own.run(2, process))


def test_a_process_that_ends_is_an_error(own: Workers) -> None:
    outcomes = own.outcomes(2, exit_on_one, timeout=5.0)
    assert outcomes[1].error == "the process ended"
    assert "exit code 3" in outcomes[1].trace
    assert own.run(2, add_up, 0) == [1.0, 1.0]


def test_too_many_ranks_are_refused(own: Workers) -> None:
    with pytest.raises(ValueError, match="2 workers, not 3"):
        own.run(3, add_up, 0)
