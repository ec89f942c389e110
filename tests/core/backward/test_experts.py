"""Experts that the ranks share out among them: a rank that has joined owns some, and computes nothing."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.needs import needs
from tests.support.workers import Workers
from torch_join import Join, JoinError


class Exchange(torch.autograd.Function):
    """Sends tokens to the experts' ranks."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        received = torch.empty_like(tokens)
        dist.all_to_all_single(received, tokens.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Exchange.forward(ctx, gradient)


class Scatter(Exchange):
    """Gathers the tokens of all ranks, and adds up their outputs."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        mine = torch.empty_like(tokens[:2])
        dist.reduce_scatter(mine, [*tokens.reshape(2, *mine.shape)])
        return mine.repeat(2, 1)


class Mixture(nn.Module):
    def __init__(self, exchange: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.expert = nn.Linear(3, 3), nn.Linear(3, 3)
        self.exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.exchange.apply(self.expert(self.exchange.apply(self.first(x))))
        return out


def train(rank: int, exchange: Any, owned: bool, hands_over: bool | None = None) -> Any:
    net = Mixture(exchange).double()
    if owned:
        names = [f"expert.{name}" for name, _ in net.expert.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    ddp = DistributedDataParallel(net)
    batches = [torch.ones(4, 3, dtype=torch.float64)] * (1 if rank == 0 else 3)
    try:
        with Join([ddp], timeout=timedelta(seconds=20), hand_over_ignored=hands_over) as join:
            for x in join.batches(batches):
                ddp(x).mean().backward()
                ddp.zero_grad()
    except JoinError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("exchange", [Exchange, pytest.param(Scatter, marks=needs("gloo's reduce_scatter"))])
def test_an_exchange_with_experts_of_joined_ranks_raises(workers: Workers, exchange: Any) -> None:
    for error in workers.run(2, train, exchange, True):
        assert "after rank 0 has finished" in error
        assert "does not average expert.weight (2 parameters in all)" in error


@pytest.mark.parametrize(("owned", "hands_over"), [(False, None), (True, True)])
def test_an_exchange_of_replicas_is_followed(workers: Workers, owned: bool, hands_over: bool | None) -> None:
    assert workers.run(2, train, Exchange, owned, hands_over) == ["trained", "trained"]
