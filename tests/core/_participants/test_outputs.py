"""Models with outputs that are of no common kind, and what a look at outputs must not do."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.run import difference
from tests.support.small import train_alone
from tests.support.workers import Workers
from torch_join import Join

LENGTHS = (7, 2)
WINDOW = 3


def batch(rank: int, step: int) -> Tensor:
    return torch.arange(6, dtype=torch.float64).view(2, 3) / (1 + rank + step)


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Net(nn.Module):
    def __init__(self, pack: Callable[["Net", Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(3, 2).double()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self, x)

    def loss(self, x: Tensor) -> Tensor:
        return self.predict(x).pow(2).mean()

    def predict(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


PACKS: dict[str, tuple[Callable[[Net, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (Net.predict, lambda output: output),
    "own class": (lambda net, x: Box(net.predict(x)), lambda output: output.value),
    "another output first": (lambda net, x: (net.predict(x + 1), net.predict(x)), lambda output: output[1]),
    "a parameter first": (lambda net, x: (net.scale, net.predict(x)), lambda output: output[1]),
}


def in_windows(rank: int, pack: str) -> list[Tensor]:
    """A plain `for`, in whose first window rank 1 runs out."""
    make, take = PACKS[pack]
    ddp = DistributedDataParallel(Net(make))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp, optimizer]):
        for step in range(LENGTHS[rank]):
            if step % WINDOW == 0:
                optimizer.zero_grad()
            syncs = step % WINDOW == WINDOW - 1
            with nullcontext() if syncs else ddp.no_sync():
                take(ddp(batch(rank, step))).pow(2).mean().backward()
            if syncs:
                optimizer.step()
    return [p.detach() for p in ddp.parameters()]


@pytest.mark.parametrize("pack", PACKS)
def test_gradients_are_told_apart_whatever_a_model_returns(workers: Workers, pack: str) -> None:
    net = Net(Net.predict)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    expected = train_alone(optimizer, LENGTHS, lambda *place: net.loss(batch(*place)), WINDOW)
    for parameters in workers.run(2, in_windows, pack):
        assert difference(parameters, expected) < 1e-12
