"""Schedules over a rank's own number of batches are noticed where it joins; others are left alone."""

from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from tests.support.front_ends.accelerate import accelerator_of
from tests.support.small import Training, batch, batches_of, loss, network, steps_of
from tests.support.workers import Workers
from torch_join import Join

EPOCHS = 2


def schedule(optimizer: Any, total: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))


def train(rank: int, lengths: tuple[int, ...], kind: str, own: bool, how: str) -> list[float]:
    """Train with a schedule over this rank's own length, or over the longest; `how` sets the learning rate."""
    batches = batches_of(rank, lengths)
    total = EPOCHS * (max(len(batches), 1) if own else max(lengths))
    lr = torch.tensor(0.1, dtype=torch.float64) if how == "tensor" else 0.1
    training = Training(DistributedDataParallel, lr)
    (group,) = training.optimizer.param_groups
    scheduler = schedule(training.optimizer, total)
    given = [*training.given, *([] if how == "by hand" else [scheduler])]
    steps, rates = 0, []

    def step_on(x: Tensor) -> None:
        nonlocal steps
        if how == "by hand":  # at the top of a step
            group["lr"] = 0.1 * (1 - steps / total)
        steps += 1
        rates.append(float(group["lr"]))
        training.step(x)
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
        return training.weight
    with Join(given, may_break=kind == "heartbeat") as join:
        for epoch in range(EPOCHS):
            for x in join.batches(iter(batches) if kind == "stream" else batches):
                step_on(x)
                if kind == "left" and len(rates) == (epoch + 1) * len(batches):
                    break
            if how == "epoch":
                scheduler.step()
            steps = (epoch + 1) * max(lengths)  # as the longest rank counts
    return training.weight


KINDS = ("sized", "stream", "heartbeat", "plain", "left")


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(3, 7), (5, 2), (4, 2, 1)])
def test_a_schedule_over_its_own_length_is_named(workers: Workers, kind: str, lengths: tuple[int, ...]) -> None:
    outcomes = workers.outcomes(len(lengths), train, lengths, kind, True, "step")
    for outcome in outcomes:
        assert "The ranks' optimizers differ in the same step: lr of Adam is " in outcome.error
        assert "LambdaLR, which sets it, depends on a value that differs between ranks" in outcome.error
        assert "usually len(loader) or a step counter" in outcome.error
        assert outcome.seconds < 20


@pytest.mark.parametrize("how", ["tensor", "by hand"])
@pytest.mark.parametrize("kind", ["sized", "heartbeat"])
def test_a_learning_rate_that_is_set_in_another_way_is_named(workers: Workers, how: str, kind: str) -> None:
    for outcome in workers.outcomes(2, train, (3, 7), kind, True, how):
        assert "lr of Adam is " in outcome.error


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["step", "epoch", "tensor", "by hand"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(3, 7), (4, 0, 2)])
def test_the_longest_ranks_schedule_is_exact(workers: Workers, how: str, kind: str, lengths: tuple[int, ...]) -> None:
    if how == "by hand" and kind == "plain":
        pytest.skip("a schedule set by hand counts steps only in the other kinds of loops")
    if how == "epoch" and kind == "left" and 0 in lengths:
        pytest.skip("who left by break steps it before the loop's end, and the empty rank after it")
    training, total = Training(), EPOCHS * max(lengths)
    scheduler = schedule(training.optimizer, total)
    for number, places in enumerate(EPOCHS * steps_of(lengths), 1):
        training.step(*(batch(*place) for place in places), share=1 / len(lengths))
        if how == "by hand":
            training.optimizer.param_groups[0]["lr"] = 0.1 * (1 - number / total)
        elif how != "epoch" or number % max(lengths) == 0:
            scheduler.step()
    for weight in workers.run(len(lengths), train, lengths, kind, False, how):
        assert weight == pytest.approx(training.weight, abs=1e-12)


def accelerated(rank: int, lengths: tuple[int, ...], own: bool) -> list[float]:
    with accelerator_of(rank) as accelerator:
        loader = DataLoaderShard(batches_of(rank, lengths), batch_size=None)  # type: ignore[arg-type]
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
        return net.weight.flatten().tolist()


def accelerate_gather(lengths: list[int]) -> list[int]:
    from accelerate.utils import gather_object

    return gather_object(lengths)  # type: ignore[no-any-return]


@pytest.mark.parametrize("lengths", [(3, 7), (5, 2)])
def test_with_accelerate(workers: Workers, lengths: tuple[int, ...]) -> None:
    for outcome in workers.outcomes(2, accelerated, lengths, True):
        assert "LambdaLR, which sets it, depends on a value that differs between ranks" in outcome.error
    training = Training()
    scheduler = schedule(training.optimizer, EPOCHS * max(lengths) * 2)
    for places in EPOCHS * steps_of(lengths):
        training.step(*(batch(*place) for place in places), share=1 / 2)
        scheduler.step()
        scheduler.step()
    for weight in workers.run(2, accelerated, lengths, False):
        assert weight == pytest.approx(training.weight, abs=1e-12)
