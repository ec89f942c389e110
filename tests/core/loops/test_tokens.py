"""Each token counts the same, today: what docs/accelerate.md and docs/plain-loops.md have of it is exact."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.support.front_ends.accelerate import accelerator_of
from tests.support.small import step_on, steps_of
from tests.support.workers import Workers
from torch_join import Join

EPOCHS, CLASSES = 2, 3


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Sequences with padding, whose labels do not count."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (2, 5), generator=generator)
    labels[:, 1 + (rank + step) % 4 :] = -100
    return x, labels


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, CLASSES).double()


def loss_sum(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(x).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def alone(lengths: tuple[int, ...]) -> list[float]:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for places in EPOCHS * steps_of(lengths):
        batches = [batch(*place) for place in places]
        count = sum(int((labels != -100).sum()) for _, labels in batches)
        step_on([loss_sum(net, *one) / count for one in batches], optimizer)
    return net.weight.flatten().tolist()


def plain(rank: int, lengths: tuple[int, ...]) -> list[float]:
    net = network()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
    with Join([ddp, optimizer]) as join:
        for _ in range(EPOCHS):
            for x, labels in join.batches([batch(rank, step) for step in range(lengths[rank])]):
                n_tokens = (labels != -100).sum()
                dist.all_reduce(n_tokens)
                loss = loss_sum(ddp, x, labels) * dist.get_world_size() / n_tokens
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return net.weight.flatten().tolist()


def accelerated(rank: int, lengths: tuple[int, ...]) -> list[float]:
    with accelerator_of(rank) as accelerator:
        net = network()
        model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
        data: Any = [batch(rank, step) for step in range(lengths[rank])]
        loader = DataLoaderShard(data, batch_size=None)
        with accelerator.join_uneven_inputs():
            for _ in range(EPOCHS):
                for x, labels in loader:
                    n_tokens = accelerator.gather((labels != -100).sum()).sum()
                    loss = loss_sum(model, x, labels) * accelerator.num_processes / n_tokens
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return net.weight.flatten().tolist()


@pytest.mark.parametrize("lengths", [(3, 7), (5, 2), (4, 4), (0, 3)])
@pytest.mark.parametrize("how", ["plain", "accelerate"])
def test_each_token_counts_the_same(workers: Workers, lengths: tuple[int, ...], how: str) -> None:
    for weights in workers.run(2, plain if how == "plain" else accelerated, lengths):
        assert weights == pytest.approx(alone(lengths), abs=1e-12)
