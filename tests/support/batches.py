"""The batches of a `Recipe` as data sets, of the epoch in which one begins to read them."""

from collections.abc import Callable, Iterator

from torch.utils.data import Dataset, IterableDataset, Sampler

from tests.support.sharded import Batch, Recipe, Step


class Batches(Dataset[Batch]):
    """A rank's, by epoch and number."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.recipe, self.rank = recipe, rank

    def __getitem__(self, place: Step) -> Batch:
        epoch, index = place
        return self.recipe.batches(epoch, self.rank)[index]


class Places(Sampler[Step]):
    """Those of an epoch."""

    def __init__(self, data: Batches, epoch: Callable[[], int]) -> None:
        self.data, self.epoch = data, epoch

    def __len__(self) -> int:
        return self.data.recipe.lengths_in(self.epoch())[self.data.rank]

    def __iter__(self) -> Iterator[Step]:
        epoch = self.epoch()
        return iter([(epoch, index) for index in range(len(self))])


class Stream(IterableDataset[Batch]):
    """The same without a length."""

    def __init__(self, data: Batches, epoch: Callable[[], int]) -> None:
        self.data, self.epoch = data, epoch

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.data.recipe.batches(self.epoch(), self.data.rank))
