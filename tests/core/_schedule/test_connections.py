"""The connections over which batches travel: made, shared and kept, whatever else goes on."""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.support.inside import counted_gifts, exchange_threads
from tests.support.workers import Workers, connect
from torch_join import Join

NUMBER = 11  # batches of the rank that gives


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(1, 1))


def interleave(rank: int) -> list[tuple[float, float]]:
    """Go through two loops at once; return what came, and what should have."""
    models = ddp(), ddp()
    length = (1, NUMBER)[rank]
    ours, theirs = ([torch.full((9,), 1000.0 * which + 100 * rank + i) for i in range(length)] for which in (1, 2))
    found = []
    with (
        counted_gifts(0.01 * rank + 0.005),
        Join([models[0]], rebalance=True) as a,
        Join([models[1]], rebalance=True) as b,
    ):
        for pair in zip(a.batches(ours), b.batches(theirs), strict=True):
            for which, (join, batch, model) in enumerate(zip((a, b), pair, models, strict=True), 1):
                model(batch[:1, None] * 1e-3).sum().backward()
                assert join.batch_owner is not None
                assert join.owner_batch_idx is not None
                found.append((batch[0].item(), 1000.0 * which + 100 * join.batch_owner + join.owner_batch_idx))
    return found


def test_two_loops_at_once(workers: Workers) -> None:
    for found in workers.run(2, interleave):
        assert len(found) == NUMBER + 1  # half of all batches of each loop
        assert all(came == expected for came, expected in found), found


class Refilled(Dataset[Tensor]):
    """Few large buffers, of which the next batch takes the oldest."""

    def __init__(self, length: int, buffers: int) -> None:
        self.length = length
        self.memory = [torch.zeros(2**22) for _ in range(buffers if length else 0)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.memory[index % len(self.memory)].fill_(float(index))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(self.length))


def train_without_sync(rank: int, buffers: int, sized: bool) -> list[tuple[float, float, float]]:
    data = Refilled((0, NUMBER)[rank], buffers)
    model, found = ddp(), []
    loader: Any = DataLoader(data, batch_size=None, collate_fn=itself) if sized else iter(data)
    with counted_gifts(0.03), Join([model], rebalance=True) as join:
        for batch in join.batches(loader):
            with model.no_sync():
                model(torch.ones(1, 1)).sum().backward()
            assert join.owner_batch_idx is not None
            found.append((join.owner_batch_idx, batch.min().item(), batch.max().item()))
    return found


def itself(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("buffers", [1, 3, 4, 8])
def test_a_gift_on_its_way_is_not_overwritten(workers: Workers, buffers: int, sized: bool) -> None:
    outcomes = workers.outcomes(2, train_without_sync, buffers, sized)
    if any(outcome.error for outcome in outcomes):
        assert buffers < 5
        assert all("reuses the memory" in outcome.error for outcome in outcomes), outcomes
        return
    found = sorted(each for outcome in outcomes for each in outcome.value)
    assert found == [(index, index, index) for index in range(NUMBER)]


def train_badly_connected(rank: int, who: int) -> None:
    connect()
    model = ddp()
    before = os.environ["GLOO_SOCKET_IFNAME"]
    try:
        if rank == who:
            os.environ["GLOO_SOCKET_IFNAME"] = "nothing0"
        with Join([model], rebalance=True, timeout=timedelta(seconds=20)) as join:
            for batch in join.batches([torch.ones(1, 1)] * (1, 9)[rank]):
                model(batch).sum().backward()
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = before
        assert exchange_threads() == []


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_be_connected_is_named(workers: Workers, who: int) -> None:
    outcomes = workers.outcomes(2, train_badly_connected, who)
    for rank, outcome in enumerate(outcomes):
        assert "a gloo process group, which cannot be created" in outcome.error, outcomes
        assert rank == who or f"Rank {who}: " in outcome.error, outcomes
        assert outcome.seconds < 5, outcomes
