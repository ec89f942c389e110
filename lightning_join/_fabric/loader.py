"""Loaders whose loops serve, and what reads them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch_join.integration import Reader

T = TypeVar("T")


class AheadReader(Reader[T]):
    """Reads one batch ahead, so that it knows which one is the last."""

    @property
    def at_last(self) -> bool:
        return self.has_next() and not self.has_next(2)


class JoinedLoader(Generic[T]):
    """A loader that was set up; each loop over it serves, in its end, ranks that have more batches.

    Args:
        loader: What Fabric would go through.
        go_through: Goes through it on all ranks.
    """

    def __init__(self, loader: Iterable[T], go_through: Callable[[Iterable[T]], Iterator[T]]) -> None:
        self.__dict__.update(getattr(loader, "__dict__", {}))  # as Fabric's own wrapper, which looks for the sampler
        self._joined_loader, self._goes_through = loader, go_through

    def __iter__(self) -> Iterator[T]:
        return self._goes_through(self._joined_loader)

    def __len__(self) -> int:
        return len(self._joined_loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_joined_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._joined_loader, name)
