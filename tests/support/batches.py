"""The batches of a `Run` as data sets, of the epoch in which one begins to read them."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

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
