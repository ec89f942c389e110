"""Forwards without collectives: joined ranks hear of them with a backward, or with another forward."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.run import difference
from tests.support.small import train_alone
from tests.support.workers import Workers
from torch_join import Join

SHORT = timedelta(seconds=10)
Apply = Callable[[Tensor], Tensor]


def network() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(3, 2).double()


def batches(rank: int, length: int) -> list[Tensor]:
    torch.manual_seed(10 + rank)
    return [torch.randn(2, 3, dtype=torch.float64) for _ in range(length)]


class Training:
    def __init__(self) -> None:
        self.ddp = DistributedDataParallel(network())
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)

    def step(self, losses: Iterator[Tensor]) -> None:
        self.optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        self.optimizer.step()

    @property
    def given(self) -> list[Any]:
        return [self.ddp, self.optimizer]

    @property
    def parameters(self) -> list[Tensor]:
        return [p.detach() for p in self.ddp.parameters()]


def warm_up(training: Training, join: Join, rank: int) -> None:
    """Train until DDP has rebuilt its buckets: its forwards issue no collective from then on."""
    for x in join.batches(batches(rank, 3)):
        training.step(iter([training.ddp(x).pow(2).mean()]))


# ---------------------------------------------------------------- no backward


def evaluate(rank: int, lengths: Sequence[int], how: str, seconds: float = 0.0) -> tuple[float, list[Tensor]]:
    training, total, length = Training(), 0.0, lengths[rank]
    timeout = timedelta(seconds=2) if seconds else SHORT
    with Join(training.given, may_break=how in ("heartbeat", "break"), timeout=timeout) as join:
        warm_up(training, join, rank)
        loader = batches(rank, length + 2 if how == "break" and length else length)
        # An evaluation that has forgotten no_grad.
        for step, x in enumerate(loader if how == "plain" else join.batches(loader), 1):
            total += training.ddp(x).sum().item()
            time.sleep(seconds)
            if how == "break" and step == length:
                break
    return total, training.parameters


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["sized", "heartbeat", "break", "plain"])
@pytest.mark.parametrize("lengths", [(3, 1, 6), (3, 1, 4), (6, 2, 6, 1), (4, 0, 1), (2, 1, 2)])
def test_ranks_may_leave_a_loop_of_forwards_without_no_grad(workers: Workers, lengths: Sequence[int], how: str) -> None:
    found = workers.run(len(lengths), evaluate, lengths, how)
    for rank, (total, parameters) in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(parameters, found[0][1], strict=True))
        model = network()
        model.load_state_dict(dict(zip(("weight", "bias"), parameters, strict=True)))
        assert total == pytest.approx(sum(model(x).sum().item() for x in batches(rank, lengths[rank])), rel=1e-10)


@pytest.mark.parametrize("how", ["sized", "heartbeat"])
def test_a_joined_rank_hears_of_forwards_that_no_backward_follows(workers: Workers, how: str) -> None:
    # The tail takes longer than the timeout.
    (_, first), (total, second) = workers.run(2, evaluate, (1, 18), how, 0.15)
    assert difference(first, second) == 0
    assert total != 0


def leave_after_a_forward(rank: int, stops: Sequence[int], then: str) -> list[Tensor]:
    training = Training()
    with Join(training.given, may_break=True, timeout=SHORT) as join:
        warm_up(training, join, rank)
        for step, x in enumerate(join.batches(batches(rank, 9)), 1):
            training.step(iter([training.ddp(x).pow(2).mean()]))
            training.ddp(x)  # to look at the output, say
            if step == stops[rank]:
                break
        if then == "loop":
            for x in join.batches(batches(20 + rank, rank)):
                training.step(iter([training.ddp(x).pow(2).mean()]))
    return training.parameters


@pytest.mark.parametrize("then", ["exit", "loop"])
@pytest.mark.parametrize("stops", [(2, 2, 2), (1, 3, 3), (3, 1, 2), (1, 2, 4)])
def test_a_loop_may_be_left_after_a_forward(workers: Workers, stops: Sequence[int], then: str) -> None:
    found = workers.run(3, leave_after_a_forward, stops, then)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loops = [[batches(r, 3) for r in range(3)], [batches(r, 9)[:stop] for r, stop in enumerate(stops)]]
    loops += [[batches(20 + r, r) for r in range(3)]] if then == "loop" else []
    for shards in loops:
        lengths = [*map(len, shards)]
        train_alone(optimizer, lengths, lambda rank, step, shards=shards: model(shards[rank][step]).pow(2).mean())  # type: ignore[misc]
    for parameters in found:
        assert all(torch.equal(a, b) for a, b in zip(parameters, found[0], strict=True))
    assert difference(found[0], [p.detach() for p in model.parameters()]) < 1e-10


# ---------------------------------------------------------------- a backward that another forward comes before


def losses(apply: Apply, x: Tensor, between: str, no_sync: Callable[[], Any]) -> Iterator[Tensor]:
    loss = apply(x).pow(2).mean()
    if between == "collective" and dist.is_initialized():
        dist.all_reduce(loss.detach().clone())
    with torch.no_grad() if between == "no_grad" else no_sync() if between == "no_sync" else nullcontext():
        other = apply(2 * x).pow(2).mean()
    yield loss if between in ("no_grad", "collective") else loss + other


def train(rank: int, lengths: Sequence[int], between: str, how: str) -> list[Tensor]:
    training = Training()
    with Join(training.given, may_break=how == "heartbeat", timeout=SHORT) as join:
        loader = batches(rank, lengths[rank])
        for x in loader if how == "plain" else join.batches(loader):
            training.step(losses(training.ddp, x, between, training.ddp.no_sync))
    return training.parameters


@pytest.mark.covering(2)
@pytest.mark.parametrize("how", ["sized", "heartbeat", "plain"])
@pytest.mark.parametrize("between", ["no_grad", "no_sync", "sync", "collective"])
@pytest.mark.parametrize("lengths", [(2, 7, 6), (6, 0, 3)])
def test_a_forward_may_come_between_one_and_its_backward(
    workers: Workers, lengths: Sequence[int], between: str, how: str
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shards = [batches(rank, length) for rank, length in enumerate(lengths)]
    for step in range(max(lengths)):
        optimizer.zero_grad()
        for shard in shards:
            for loss in losses(model, shard[step], between, nullcontext) if step < len(shard) else ():
                (loss / len(lengths)).backward()
        optimizer.step()
    for parameters in workers.run(len(lengths), train, lengths, between, how):
        assert difference(parameters, [p.detach() for p in model.parameters()]) < 1e-10
