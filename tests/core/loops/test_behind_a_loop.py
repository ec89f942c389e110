"""What a rank does with others behind its loop, which others go on with: it finishes the loop first, or all raise."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.workers import Workers
from torch_join import Join

EPOCHS = 2


def rows(rank: int, length: int) -> Tensor:
    return torch.randn(2 * length, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


def exact(lengths: Sequence[int]) -> list[list[float]]:
    net = network()
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    batches = [rows(rank, length).split(2) if length else () for rank, length in enumerate(lengths)]
    for _ in range(EPOCHS):
        for step in range(max(lengths)):
            losses = [net(mine[step]).pow(2).mean() for mine in batches if step < len(mine)]
            (sum(losses) / len(lengths)).backward()  # type: ignore[union-attr]
            adam.step()
            adam.zero_grad()
    return net.weight.tolist()  # type: ignore[no-any-return]


class Unsized:
    """Batches whose number is not certain."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


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
    net = network()
    ddp, adam = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
    mine = rows(rank, lengths[rank]).split(2) if lengths[rank] else ()
    loader: Any = Unsized(mine) if streams else list(mine)
    total = torch.zeros(1)
    with Join([ddp, adam], timeout=timedelta(seconds=20)) as join:
        for _ in range(EPOCHS):
            iterator = iter(join.batches(loader))
            for _ in range(len(mine)):
                ddp(next(iterator)).pow(2).mean().backward()
                adam.step()
                adam.zero_grad()
                if within:
                    dist.all_reduce(total)
            if how == "break":
                del iterator
            elif how == "end":
                assert next(iterator, None) is None
            do_with_others(what, torch.ones(1))
    return net.weight.tolist()


@pytest.mark.parametrize("what", ["barrier", "reduce", "objects"])
@pytest.mark.parametrize("lengths", [(7, 3), (3, 7), (3, 7, 5)])
@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_that_was_left_is_finished_first(workers: Workers, lengths: Any, what: str, streams: bool) -> None:
    for weights in workers.run(len(lengths), train, lengths, "break", what, streams, what == "reduce"):
        assert torch.tensor(weights) == pytest.approx(torch.tensor(exact(lengths)), abs=1e-12)


@pytest.mark.parametrize("what", ["barrier", "reduce", "objects"])
@pytest.mark.parametrize("lengths", [(7, 3), (3, 7), (3, 7, 5), (5, 7, 5), (7, 5, 3)])
def test_a_loop_that_nobody_knows_to_be_over_raises_at_once(workers: Workers, lengths: Any, what: str) -> None:
    outcomes = workers.outcomes(len(lengths), train, lengths, "next", what, False, what == "reduce", timeout=2.0)
    assert all("after its last batch" in outcome.error and "without it" in outcome.error for outcome in outcomes)
    assert max(outcome.seconds for outcome in outcomes) < 8.0


@pytest.mark.parametrize("what", ["barrier", ""])
def test_what_is_done_in_the_step_or_after_the_end_is_right(workers: Workers, what: str) -> None:
    for lengths in ((3, 7), (0, 3, 5)):
        for weights in workers.run(len(lengths), train, lengths, "end" if what else "next", what, False, True):
            assert torch.tensor(weights) == pytest.approx(torch.tensor(exact(lengths)), abs=1e-12)


def leave_together(rank: int, what: str) -> list[list[float]]:
    """All ranks leave at one step, which is the last one of rank 1."""
    net = network()
    ddp, adam = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
    with Join([ddp, adam], timeout=timedelta(seconds=20)) as join:
        for _ in range(EPOCHS):
            for index, x in enumerate(join.batches(list(rows(rank, (7, 3)[rank]).split(2)))):
                ddp(x).pow(2).mean().backward()
                adam.step()
                adam.zero_grad()
                if index == 2:
                    break
            do_with_others(what, torch.ones(1))
    return net.weight.tolist()  # type: ignore[no-any-return]


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
