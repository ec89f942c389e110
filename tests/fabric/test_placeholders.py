"""A finished rank runs the step itself: what Fabric reduces, gathers, logs and decides is of ranks with a batch."""

from typing import Any

import pytest
import torch
from lightning.fabric.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_join.fabric import DDPJoinStrategy
from tests.support.front_ends.fabric import fabric_of
from tests.support.workers import Workers

LENGTHS = (1, 4, 2)


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


class Log(CSVLogger):
    def __init__(self) -> None:
        self.values: list[float] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.values.append(metrics["loss"])


def train(rank: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    log = Log()
    fabric = fabric_of(3, DDPJoinStrategy(placeholder="last"), loggers=log)
    model, optimizer = fabric.setup(net := nn.Linear(4, 1).double(), torch.optim.SGD(net.parameters(), lr=0.1))
    data: Any = [rows_of(rank, step) for step in range(LENGTHS[rank])]
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=None), use_distributed_sampler=False)
    reduced, gathered, decided = [], [], []
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        value = torch.tensor(float(x[0, 0]), dtype=torch.float64)
        reduced.append(
            (fabric.all_reduce(value.clone()).item(), fabric.all_reduce(value.clone(), reduce_op="sum").item())
        )
        gathered.append(fabric.all_gather(value).tolist())
        decided.append(fabric.strategy.reduce_boolean_decision(rank == 0, all=False))
        fabric.log("loss", float(x[0, 0]))
    return log.values, reduced, gathered, decided, (fabric.strategy.joined, fabric.strategy.active_ranks)


def test_what_is_reduced_and_logged(workers: Workers) -> None:
    ranks = workers.run(3, train)
    firsts = [[float(rows_of(rank, s)[0, 0]) for rank, n in enumerate(LENGTHS) if s < n] for s in range(4)]
    assert ranks[0][0] == pytest.approx([each[0] for each in firsts])
    for _, reduced, gathered, decided, after in ranks:
        assert reduced == [pytest.approx((sum(each) / len(each), sum(each))) for each in firsts]
        assert gathered == [pytest.approx(each) for each in firsts]
        assert decided == [True, False, False, False]
        assert after == (False, (0, 1, 2))
