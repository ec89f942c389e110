"""What ranks hold of batches that are rebalanced: few more than they train on, however many there are."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.inside import counted_gifts, planned_rows
from tests.support.workers import Workers
from torch_join import Join

LONG = 40  # batches
SHAPES = {"small": (2, 4), "large": (5000, 4)}  # these are 80 kB


class Counted(Dataset[Tensor]):
    """Batches that count how many were read."""

    def __init__(self, length: int, shape: tuple[int, int]) -> None:
        self.length, self.shape, self.read = length, shape, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        return torch.full(self.shape, float(index))


class Stream(IterableDataset[Tensor]):
    def __init__(self, data: Counted) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Tensor]:
        return (self.data[index] for index in range(len(self.data)))


def train(rank: int, lengths: tuple[int, ...], loop: str, shape: str) -> Any:
    """Return how many batches had been read at each step, the gifts in memory, the most of these, those in the end."""
    data = Counted(lengths[rank], SHAPES[shape])
    loader: Any = DataLoader(data if loop == "sized" else Stream(data), batch_size=None)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    read, alive = [], []
    with counted_gifts() as donated, Join([model], rebalance=True) as join:
        for batch in join.batches(loader):
            model(batch).mean().backward()
            read.append(data.read)
            alive.append(donated.alive)
            del batch
        left = donated.alive
    assert donated.alive == 0
    return read, alive, donated.most_alive, left


def used(lengths: tuple[int, ...], loop: str) -> list[list[int]]:
    """By step and rank, how many of its batches have been trained on up to then."""
    rows = planned_rows(lengths, None if loop == "sized" else [None] * len(lengths))
    counts, at = [], [0] * len(lengths)
    for row in rows:
        for owner, _ in row.values():
            at[owner] += 1
        counts.append(list(at))
    return counts


def ahead_of(read: Sequence[int], used: Sequence[int]) -> int:
    return max(a - b for a, b in zip(read, used, strict=False))


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loop", ["sized", "stream"])
@pytest.mark.parametrize("lengths", [(1, LONG), (1, LONG, 1), (1, LONG, 1, 1), (3, LONG, 20, 1)])
def test_a_giver_reads_for_two_steps_ahead(workers: Workers, lengths: tuple[int, ...], loop: str, shape: str) -> None:
    found = workers.run(len(lengths), train, lengths, loop, shape)
    for rank, length in enumerate(lengths):
        mine = [counts[rank] for counts in used(lengths, loop)]
        most = max(now - before for now, before in zip(mine, [0, *mine], strict=False))  # that a step takes
        # One row besides the current one is planned, and what the next one may ask for is there; three before all.
        assert ahead_of(found[rank][0], mine) <= max(2 * most, 3), (rank, most)
        assert found[rank][0][-1] == length


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loop", ["sized", "stream"])
@pytest.mark.parametrize("lengths", [(0, LONG), (1, LONG, 1)])
def test_a_receiver_holds_two_gifts_in_a_step_and_none_after_the_loop(
    workers: Workers, lengths: tuple[int, ...], loop: str, shape: str
) -> None:
    found = workers.run(len(lengths), train, lengths, loop, shape)
    given = [len(alive) for _, alive, *_ in found]
    assert all(number >= LONG // len(lengths) for number in given)  # there were many gifts
    for rank, (_, alive, most, left) in enumerate(found):
        assert max(alive) <= 2, rank
        assert left == 0
        # Another one may come before what holds that of the step before has let go of it.
        assert most <= 3, rank
    assert not any(found[1][1]), "the giver has got something"
