"""What ranks have computed, in the dataset's order, after loops of Fabric's."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_join.fabric import DDPJoinStrategy
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.rows import assert_same, rows_of
from tests.support.workers import Workers
from torch_join import JoinError


def gather(rank: int, samples: int, ranks: int, to: int | None) -> Any:
    fabric = fabric_of(ranks, DDPJoinStrategy())
    model = fabric.setup(nn.Linear(1, 1))
    data = TensorDataset(torch.arange(samples))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=True))
    rows, indices = [], []
    with torch.no_grad():
        for (index,) in loader:
            model(index.float()[:, None])
            rows.append(rows_of(index.tolist()))
            indices.append(index)
    strategy: Any = fabric.strategy
    with pytest.raises(JoinError, match="order='shards'"):
        strategy.gather_in_order(rows, rank=to)
    by_rank = strategy.gather_in_order(rows, rank=to, order="shards")
    assert by_rank is None or len(by_rank["x"]) == samples
    return strategy.gather_in_order(rows, indices, rank=to)


@pytest.mark.parametrize(("samples", "ranks", "to"), [(7, 2, None), (2, 3, 1)])
def test_each_sample_once(workers: Workers, samples: int, ranks: int, to: int | None) -> None:
    for rank, found in enumerate(workers.run(ranks, gather, samples, ranks, to)):
        assert_same(found, rows_of(range(samples)) if to in (None, rank) else None)


def gather_shards(rank: int, at: int | None) -> Any:
    fabric = fabric_of(2, DDPJoinStrategy())
    model = fabric.setup(nn.Linear(1, 1))
    data = TensorDataset(torch.arange(10 * rank, 10 * rank + 5 * rank))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2), use_distributed_sampler=False)
    rows: list[Any] = []
    strategy: Any = fabric.strategy
    for step, (index,) in enumerate(loader):
        model(index.float()[:, None]).sum().backward()
        rows.append(rows_of(index.tolist()))
        if step == at:
            strategy.gather_in_order(rows)
    return strategy.gather_in_order(rows)


def test_shards_and_a_step_that_some_rank_does_not_have(workers: Workers) -> None:
    for found in workers.run(2, gather_shards, None):
        assert_same(found, rows_of(range(10, 15)))
    _, second = workers.outcomes(2, to_the_end, gather_shards, 1)
    assert (
        "JoinError: fabric.strategy.gather_in_order was called in a step for which rank 0 had no batch" in second.error
    )
