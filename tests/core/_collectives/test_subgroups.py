"""Collectives in process groups of which some active ranks are no members."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.front_ends.plain import Loop
from tests.support.joinables import Counter
from tests.support.run import difference, reference
from tests.support.workers import Workers
from torch_join import Join

PAIRS = ((1, 2), (0, 2), (0, 1))
Sums = dict[tuple[int, int], int]


def exchange(rank: int, groups: dict[tuple[int, int], Any], how: str, loss: Tensor) -> Sums:
    """Sum 10 ** rank in every pair that this rank is in, and run the backward."""
    values = {pair: torch.tensor([10.0**rank]) for pair in groups if rank in pair}
    if how == "async":  # in an order of its own
        order = sorted(values, reverse=rank == 1)
        works = [dist.all_reduce(values[pair], group=groups[pair], async_op=True) for pair in order]
        loss.backward()
        for work in works:
            assert work is not None
            work.wait()
    elif how == "objects":
        for pair, value in values.items():
            objects: list[Any] = [None, None]
            dist.all_gather_object(objects, value.item(), group=groups[pair])
            value[0] = sum(number for number in objects if number is not None)
        loss.backward()
    else:
        if how == "after":
            loss.backward()
        for pair, value in values.items():
            dist.all_reduce(value, group=groups[pair])
        if how == "before":
            loss.backward()
    return {pair: int(value.item()) for pair, value in values.items()}


def train_in_pairs(rank: int, lengths: tuple[int, ...], may_break: bool, how: str) -> tuple[Any, list[Tensor]]:
    groups = {pair: dist.new_group(list(pair)) for pair in PAIRS}
    for pair in PAIRS:  # NCCL's are connected by the first collective, which is to be one of the same pair on both
        if rank in pair:
            dist.all_reduce(torch.ones(1), group=groups[pair])
    models = Loop(lengths).build()
    ddp = DistributedDataParallel(models)
    optimizer = torch.optim.Adam(models.parameters(), lr=0.05)
    found = []
    with Join([ddp, optimizer], timeout=timedelta(seconds=20), may_break=may_break) as join:
        for epoch in range(2):
            for x, y in join.batches(Loop(lengths).batches(rank, epoch)):
                optimizer.zero_grad()
                sums = exchange(rank, groups, how, (ddp(x) - y).pow(2).mean())
                optimizer.step()
                found.append((sums, join.active_ranks))
    return found, [p.detach() for p in models.parameters()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["before", "after", "async", "objects"])
@pytest.mark.parametrize(
    ("lengths", "may_break"),
    [((4, 4, 1), False), ((1, 3, 5), False), ((5, 2, 4), True), ((5, 0, 2), False), ((0, 3, 3), True)],
)
def test_pairs_sum_over_their_active_members(
    workers: Workers, lengths: tuple[int, ...], may_break: bool, how: str
) -> None:
    results = workers.run(3, train_in_pairs, lengths, may_break, how, deadline=30.0)
    expected = reference(Loop(lengths, epochs=2))
    for rank, (found, parameters) in enumerate(results):
        assert len(found) == 2 * lengths[rank]
        for sums, active in found:
            assert sums == {pair: sum(10**r for r in pair if r in active) for pair in PAIRS if rank in pair}
        assert difference(parameters, expected.parameters) < 1e-10


class PairCounter(Counter):
    """Counts in this rank's pairs and in the world."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        groups = {pair: dist.new_group(list(pair)) for pair in PAIRS}
        self.groups = [*(groups[pair] for pair in PAIRS if rank in pair), None]

    def add(self, number: int) -> int:
        totals = [torch.tensor(number) for _ in self.groups]
        for group, total in zip(self.groups, totals, strict=True):
            dist.all_reduce(total, group=group)
        return sum(map(int, totals))


def count_in_pairs(rank: int, lengths: tuple[int, ...]) -> int:
    counter = PairCounter(rank)
    with Join([counter], timeout=timedelta(seconds=20)) as join:
        for _ in join.batches(range(lengths[rank])):
            counter.count()
    return counter.total


@pytest.mark.parametrize("lengths", [(1, 3, 5), (4, 2, 0), (3, 5, 4)])
def test_main_hooks_take_part_in_pairs(workers: Workers, lengths: tuple[int, ...]) -> None:
    for rank, total in enumerate(workers.run(3, count_in_pairs, lengths, deadline=20.0)):
        expected = 0
        for step in range(lengths[rank]):
            active = [r for r, length in enumerate(lengths) if length > step]
            expected += sum(len(set(pair) & set(active)) for pair in PAIRS if rank in pair) + len(active)
        assert total == expected
