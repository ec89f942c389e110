"""Schedules over a rank's own number of batches are noticed where it joins; others are left alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from tests.support.accelerated import accelerator_of
from tests.support.workers import Workers
from torch_join import Join

EPOCHS = 2


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def schedule(optimizer: Any, total: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))


class Stream:
    """Without a length."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.batches


def train(rank: int, lengths: tuple[int, ...], kind: str, own: bool, how: str) -> tuple[list[float], list[float]]:
    """Train with a schedule over this rank's own length, or over the longest.

    Args:
        rank: This rank.
        lengths: The numbers of batches.
        kind: Of loop.
        own: Whether the schedule is of this rank's own length.
        how: What sets the learning rate, and where.
    """
    batches = [batch(rank, step) for step in range(lengths[rank])]
    total = EPOCHS * (max(len(batches), 1) if own else max(lengths))
    net = network()
    ddp = DistributedDataParallel(net)
    lr = torch.tensor(0.1, dtype=torch.float64) if how == "tensor" else 0.1
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    scheduler = schedule(optimizer, total)
    given = [ddp, optimizer] if how == "by hand" else [ddp, optimizer, scheduler]
    steps, rates = 0, []

    def step_on(x: Tensor) -> None:
        nonlocal steps
        if how == "by hand":  # at the top of a step
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (1 - steps / total)
        steps += 1
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        loss(ddp, x).backward()
        optimizer.step()
        if how in ("step", "tensor"):
            scheduler.step()

    if kind == "plain":
        for _ in range(EPOCHS):
            with Join(given) as join:
                for x in batches:
                    step_on(x)
                if how == "epoch":
                    scheduler.step()
            steps = EPOCHS * max(lengths) // 2
        return rates, net.weight.flatten().tolist()  # type: ignore[union-attr, operator]
    with Join(given, heartbeat=kind == "heartbeat") as join:
        for epoch in range(EPOCHS):
            loader: Any = Stream(batches) if kind == "stream" else batches
            for x in join.batches(loader):
                step_on(x)
                if kind == "left" and len(rates) == (epoch + 1) * len(batches):
                    break
            if how == "epoch":
                scheduler.step()
            steps = (epoch + 1) * max(lengths)  # as the longest rank counts
    return rates, net.weight.flatten().tolist()  # type: ignore[union-attr, operator]


KINDS = ("sized", "stream", "heartbeat", "plain", "left")


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(3, 7), (5, 2), (4, 2, 1)])
def test_a_schedule_over_its_own_length_is_named(workers: Workers, kind: str, lengths: tuple[int, ...]) -> None:
    outcomes = workers.outcomes(len(lengths), train, lengths, kind, True, "step")
    for outcome in outcomes:
        assert "The ranks' optimizers differ in a step that they make together: lr of Adam is " in outcome.error
        assert "LambdaLR, which sets it, goes by something that is each rank's own" in outcome.error
        assert "len(loader)" in outcome.error
        assert outcome.seconds < 20


@pytest.mark.parametrize("how", ["tensor", "by hand"])
@pytest.mark.parametrize("kind", ["sized", "heartbeat"])
def test_a_learning_rate_that_is_set_in_another_way_is_named(workers: Workers, how: str, kind: str) -> None:
    for outcome in workers.outcomes(2, train, (3, 7), kind, True, how):
        assert "lr of Adam is " in outcome.error


def test_a_third_rank_that_joins_later_is_compared(workers: Workers) -> None:
    """Of three ranks the first to join has the leader's schedule."""
    for outcome in workers.outcomes(3, later):
        assert "lr of Adam is 0.09 on rank 0, 0.08 on rank 1" in outcome.error


def later(rank: int) -> None:
    net = network()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
    with Join([ddp, optimizer]) as join:
        for step, x in enumerate(join.batches([batch(rank, i) for i in range((4, 2, 1)[rank])])):
            loss(ddp, x).backward()
            optimizer.step()
            if step == 1:  # after the last rank has left
                optimizer.param_groups[0]["lr"] = 0.09 if rank == 0 else 0.08


@pytest.mark.covering(2)
@pytest.mark.parametrize("how", ["step", "epoch", "tensor", "by hand"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(3, 7), (4, 0, 2)])
def test_the_longest_ranks_schedule_is_exact(workers: Workers, how: str, kind: str, lengths: tuple[int, ...]) -> None:
    if how == "by hand" and kind == "plain":
        pytest.skip("its count of steps is of the other loops")
    if how == "epoch" and kind == "left" and 0 in lengths:
        pytest.skip("who left by break steps it before the loop's end, and the empty rank after it")
    outcomes = workers.run(len(lengths), train, lengths, kind, False, how)
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = schedule(optimizer, EPOCHS * max(lengths))
    for epoch in range(EPOCHS):
        for step in range(max(lengths)):
            if how == "by hand":
                optimizer.param_groups[0]["lr"] = 0.1 * (1 - (epoch * max(lengths) + step) / (EPOCHS * max(lengths)))
            optimizer.zero_grad()
            for rank, length in enumerate(lengths):
                if step < length:
                    (loss(net, batch(rank, step)) / len(lengths)).backward()
            optimizer.step()
            if how in ("step", "tensor"):
                scheduler.step()
        if how == "epoch":
            scheduler.step()
    for _, weights in outcomes:
        assert weights == pytest.approx(net.weight.flatten().tolist(), abs=1e-12)  # type: ignore[union-attr, operator]


def accelerated(rank: int, lengths: tuple[int, ...], own: bool) -> list[float]:
    with accelerator_of(rank) as accelerator:
        loader = DataLoaderShard([batch(rank, step) for step in range(lengths[rank])], batch_size=None)  # type: ignore[arg-type]
        net = network()
        adam = torch.optim.Adam(net.parameters(), lr=0.1)
        # As docs/accelerate.md has it.
        longest = len(loader) if own else max(accelerate_gather([len(loader)]))
        scheduler: Any = schedule(adam, EPOCHS * longest * accelerator.num_processes)
        model, optimizer, scheduler = accelerator.prepare(net, adam, scheduler)
        with accelerator.join_uneven_inputs():
            for _ in range(EPOCHS):
                for x in loader:
                    accelerator.backward(loss(model, x))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        return net.weight.flatten().tolist()  # type: ignore[union-attr, operator, no-any-return]


def accelerate_gather(lengths: list[int]) -> list[int]:
    from accelerate.utils import gather_object

    return gather_object(lengths)  # type: ignore[no-any-return]


@pytest.mark.parametrize("lengths", [(3, 7), (5, 2)])
def test_with_accelerate(workers: Workers, lengths: tuple[int, ...]) -> None:
    for outcome in workers.outcomes(2, accelerated, lengths, True):
        assert "LambdaLR, which sets it, goes by something that is each rank's own" in outcome.error
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = schedule(optimizer, EPOCHS * max(lengths) * 2)
    for _ in range(EPOCHS):
        for step in range(max(lengths)):
            for rank in range(2):
                if step < lengths[rank]:
                    (loss(net, batch(rank, step)) / 2).backward()
            optimizer.step()
            scheduler.step()
            scheduler.step()
            optimizer.zero_grad()
    for weights in workers.run(2, accelerated, lengths, False):
        assert weights == pytest.approx(net.weight.flatten().tolist(), abs=1e-12)  # type: ignore[union-attr, operator]
