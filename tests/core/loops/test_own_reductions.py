"""Gradients of backwards under `no_sync`, which the loop reduces itself: weighted as DDP's own average would be."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from tests.support.small import Training, network, step_on, steps_of
from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join


def rows(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(1 + rank, 3, generator=generator, dtype=torch.float64)


def average(gradients: Sequence[Tensor], _: Any) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)


def average_one_tensor(gradients: Sequence[Tensor], _: Any) -> None:
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def average_copies(gradients: Sequence[Tensor], _: Any) -> None:
    for gradient in gradients:
        copy = gradient.clone()
        dist.all_reduce(copy, op=dist.ReduceOp.AVG)
        gradient.copy_(copy)


def add(gradients: Sequence[Tensor], join: Any) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


Reduce = Callable[[Sequence[Tensor], Any], None]


def train(rank: int, lengths: tuple[int, ...], weighting: str, reduce: Reduce, window: int) -> tuple[list[float], int]:
    training = Training(DistributedDataParallel)
    with warned("Divide by that number, not by") as found, Join(training.given, weighting=weighting) as join:
        for x in join.batches([rows(rank, step) for step in range(lengths[rank])]):
            if join.step % window == 0:
                training.optimizer.zero_grad()
            with training.model.no_sync():
                training.model(x).square().mean().backward()
            if join.step % window == window - 1:
                reduce([p.grad for p in training.net.parameters() if p.grad is not None], join)
                training.optimizer.step()
    return training.weight, len(found)


def alone(lengths: tuple[int, ...], weighting: str) -> list[float]:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for places in steps_of(lengths):
        samples = {rank: 1 + rank if weighting == "samples" else 1 for rank, _ in places}
        total = len(lengths) if weighting == "world" else sum(samples.values())
        step_on((net(rows(r, step)).square().mean() * samples[r] / total for r, step in places), optimizer)
    return net.weight.flatten().tolist()


@pytest.mark.covering(2)
@pytest.mark.parametrize("reduce", [average, average_one_tensor, average_copies, add], ids=lambda each: each.__name__)
@pytest.mark.parametrize("weighting", ["active", "samples"])
@pytest.mark.parametrize("lengths", [(1, 4), (3, 0, 5)])
def test_they_are_weighted_once(workers: Workers, lengths: tuple[int, ...], weighting: str, reduce: Reduce) -> None:
    for rank, (weight, warnings) in enumerate(workers.run(len(lengths), train, lengths, weighting, reduce, 1)):
        assert weight == pytest.approx(alone(lengths, weighting), abs=1e-12)
        assert warnings == (reduce is add and lengths[rank] > min(lengths))


def test_a_share_that_would_be_left_out_raises(workers: Workers) -> None:
    for outcome in workers.outcomes(2, train, (3, 6), "world", add, 2, timeout=3.0):
        assert "so this finished rank's share of it would be left out" in outcome.error
