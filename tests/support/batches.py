"""The batches of a `Run` as data sets, of the epoch in which one begins to read them."""

import random
from collections.abc import Callable, Iterator, Sized
from operator import itemgetter
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tests.support.run import Batch, Place, Run


class Batches(Dataset[Batch]):
    """A rank's, by epoch and number."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank = run, rank

    def __getitem__(self, place: Place) -> Batch:
        return self.run.batch(self.rank, *place)


class Places(Sampler[Place]):
    """Those of an epoch."""

    def __init__(self, data: Batches, epoch: Callable[[], int]) -> None:
        self.data, self.epoch = data, epoch

    def __len__(self) -> int:
        return self.data.run.lengths_in(self.epoch())[self.data.rank]

    def __iter__(self) -> Iterator[Place]:
        epoch = self.epoch()
        return iter([(epoch, index) for index in range(len(self))])


class Stream(IterableDataset[Batch]):
    """The same without a length."""

    def __init__(self, data: Batches, epoch: Callable[[], int]) -> None:
        self.data, self.epoch = data, epoch

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.data.run.batches(self.data.rank, self.epoch()))


def loader_of(run: Run, rank: int, epoch: Callable[[], int], iterable: bool, make: Any = DataLoader) -> Any:
    """Return a loader of a rank's batches."""
    data = Batches(run, rank)
    if iterable:
        return make(Stream(data, epoch), batch_size=None)
    return make(data, batch_size=1, sampler=Places(data, epoch), collate_fn=itemgetter(0))


class Drawn(Sampler[int]):
    """An order that is drawn from numpy's generator, and from one that the sampler holds.

    Args:
        data: What the order is of.
        rank: What the sampler's own generator begins with.
        eagerly: Whether all of it is drawn where the iterator is made.
    """

    def __init__(self, data: Sized, rank: int, eagerly: bool = False) -> None:
        self.count, self.own, self.eagerly = len(data), random.Random(rank), eagerly

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(self._draw()) if self.eagerly else self._lazily()

    def _draw(self) -> list[int]:
        return self.own.sample(np.random.permutation(self.count).tolist(), self.count)

    def _lazily(self) -> Iterator[int]:
        yield from self._draw()
