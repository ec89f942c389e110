"""A Fabric dataloader whose loops serve other ranks, and whose position goes into a checkpoint."""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from lightning_join._reading.samplers import sharded_dataset
from torch_join.integration import LoaderPlace, Reader, Resuming, has_epoch, told_epochs

T = TypeVar("T")


class JoinedLoader(Generic[T]):
    """A loader that was set up. At its end, each loop over it serves the ranks that have more batches.

    Args:
        loader: The loader that Fabric itself would iterate over.
        joins: The strategy.
        number: The loader's number, equal on all ranks; 0 if not all ranks have set it up.

    Attributes:
        number: See above.
        positions: Starts the next loop over the loader at the position of a checkpoint.
        is_within: Whether the last loop over it was part of another iterable, such as a zip.
    """

    def __init__(self, loader: Iterable[T], joins: Any, number: int = 0) -> None:
        self.__dict__.update(getattr(loader, "__dict__", {}))  # as in Fabric's own wrapper, to find the sampler
        self._joined_loader, self._joins, self.number = loader, joins, number
        self.positions = Resuming(joins.global_rank, joins.world_size)
        self.is_within = False
        self._epochs_before = 0  # the epochs before this process, which Fabric does not count

    def __iter__(self) -> Iterator[T]:
        found: Iterator[T] = self._joins.go_through(self, self._joined_loader)
        return found

    def __len__(self) -> int:
        return len(self._joined_loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_joined_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._joined_loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return every rank's position, from which a loop can resume; all active ranks call this."""
        found: dict[str, Any] = self._joins.state_of_loader(self)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next loop over this loader where `state_dict` was called; all ranks call this."""
        self._joins.check_outside("A dataloader's state was loaded")
        self.positions.load(state)

    def open(self, loader: Iterable[T], place: LoaderPlace | None = None, after: bool = False) -> Reader[T]:
        """Return the reader for a loop over this loader."""
        self.positions.reader, self.is_within = _AheadReader(loader, place, after), False
        self.positions.reader.dealt = sharded_dataset(loader)
        return self.positions.reader

    def set_epochs(self, loader: Any) -> None:
        """Set the epoch of the loader's samplers: Fabric has set it, but counts epochs from 0 in each process."""
        place = self.positions.place
        epochs = [] if place is None else told_epochs(loader, place["begun"])
        for sampler in self._samplers(loader):
            for thing, epoch in epochs:
                if thing is sampler and place is not None:
                    self._epochs_before = epoch + place["over"] - sampler.epoch
            if self._epochs_before:
                sampler.set_epoch(sampler.epoch + self._epochs_before)

    def _samplers(self, loader: Any) -> list[Any]:
        of_batches = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        found = {id(one): one for one in (getattr(loader, "sampler", None), of_batches)}
        return [*filter(has_epoch, found.values())]


class _AheadReader(Reader[T]):
    """Prefetches one batch, to know which batch is the last."""

    dealer = "Fabric's sampler", "Pass setup_dataloaders(..., own_shards=True)"
    _reads_ahead = True

    @property
    def at_last(self) -> bool:
        return self.has_next() and not self.has_next(2)
