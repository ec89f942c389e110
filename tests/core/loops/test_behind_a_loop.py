"""What a rank does with others behind its loop, which others go on with: it finishes the loop first, or all raise."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.small import Training, alone, batches_of, steps_of
from tests.support.workers import Workers
from torch_join import Join

EPOCHS = 2


def exact(lengths: Sequence[int]) -> Any:
    return pytest.approx(alone(len(lengths), EPOCHS * steps_of(lengths)), abs=1e-12)


def do_with_others(what: str, counted: Tensor) -> None:
    if what == "barrier":
        dist.barrier()
    elif what == "reduce":
        dist.all_reduce(counted)
        assert counted == dist.get_world_size()
    elif what == "objects":
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, dist.get_rank())
        assert found == [*range(dist.get_world_size())]


def train(rank: int, lengths: Sequence[int], how: str, what: str, streams: bool, within: bool) -> Any:
    training, mine = Training(DistributedDataParallel), batches_of(rank, lengths)
    total = torch.zeros(1)
    with Join(training.given, timeout=timedelta(seconds=20)) as join:
        for _ in range(EPOCHS):
            iterator = iter(join.batches(iter(mine) if streams else mine))
            for _ in range(len(mine)):
                training.step(next(iterator))
                if within:
                    dist.all_reduce(total)
            if how == "break":
                del iterator
            elif how == "end":
                assert next(iterator, None) is None
            do_with_others(what, torch.ones(1))
    return training.weight


@pytest.mark.covering(2)
@pytest.mark.parametrize("what", ["barrier", "reduce", "objects"])
@pytest.mark.parametrize("lengths", [(7, 3), (3, 7), (3, 7, 5)])
@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_that_was_left_is_finished_first(workers: Workers, lengths: Any, what: str, streams: bool) -> None:
    for weight in workers.run(len(lengths), train, lengths, "break", what, streams, what == "reduce"):
        assert weight == exact(lengths)


@pytest.mark.covering(1)
@pytest.mark.parametrize("what", ["barrier", "reduce", "objects"])
@pytest.mark.parametrize("lengths", [(7, 3), (3, 7), (3, 7, 5), (5, 7, 5), (7, 5, 3)])
def test_a_loop_that_nobody_knows_to_be_over_raises_at_once(workers: Workers, lengths: Any, what: str) -> None:
    outcomes = workers.outcomes(len(lengths), train, lengths, "next", what, False, what == "reduce", timeout=2.0)
    assert all("after its last batch" in outcome.error and "without that call" in outcome.error for outcome in outcomes)
    assert max(outcome.seconds for outcome in outcomes) < 8.0


@pytest.mark.parametrize("what", ["barrier", ""])
def test_what_is_done_in_the_step_or_after_the_end_is_right(workers: Workers, what: str) -> None:
    for lengths in ((3, 7), (0, 3, 5)):
        for weight in workers.run(len(lengths), train, lengths, "end" if what else "next", what, False, True):
            assert weight == exact(lengths)


def leave_together(rank: int, what: str) -> list[float]:
    """All ranks leave at one step, which is the last one of rank 1."""
    training = Training(DistributedDataParallel)
    with Join(training.given, timeout=timedelta(seconds=20)) as join:
        for _ in range(EPOCHS):
            for index, x in enumerate(join.batches(batches_of(rank, (7, 3)))):
                training.step(x)
                if index == 2:
                    break
            do_with_others(what, torch.ones(1))
    return training.weight


@pytest.mark.parametrize("what", ["barrier", "objects"])
def test_all_may_leave_at_the_last_step_of_one(workers: Workers, what: str) -> None:
    first, second = workers.run(2, leave_together, what)
    assert first == second


def send_between(rank: int) -> int:
    """In a last step: what another rank has to hear of before it can come to the same collective."""
    steps = 0
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    with Join([ddp], timeout=timedelta(seconds=20)) as join:
        for step, _ in enumerate(join.batches([0] * (2 + 2 * rank))):
            if step < 2:
                word, total = torch.ones(1), torch.ones(1)
                if rank == 0:
                    work = dist.all_reduce(total, async_op=True)
                    dist.send(word, 1)
                    work.wait()
                else:
                    dist.recv(word, 0)
                    dist.all_reduce(total)
                steps += int(total)
    return steps


def test_what_another_rank_waits_for_is_not_held_back(workers: Workers) -> None:
    assert workers.run(2, send_between) == [4, 4]
