"""What this package needs of `Join` besides its public names: the only file that knows what a `Join` is made of."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from accelerate_join._loaders import is_prepared
from torch_join import Join
from torch_join.integration import LoopDriver, Part, Reader, driver_of

T = TypeVar("T")
P = TypeVar("P", bound=Part)


class JoinHooks:
    """A `Join`, and what only an adapter may do with it.

    Args:
        joinables: As `Join` takes them.
        enable: As `Join` takes it.
        changes_freely: The joinable that a rank may change between a `break` and its next step with the other ranks.
        **options: What else `Join` takes.

    Attributes:
        join: What users get.
    """

    def __init__(self, joinables: Sequence[Any], enable: bool, changes_freely: object, **options: Any) -> None:
        self.join = _Join(joinables, enable, **options)
        self._driver = driver_of(self.join)
        self._driver.tails.changes_freely = changes_freely

    @property
    def reader(self) -> Reader[Any] | None:
        """What reads the loader of the current loop, or of the last one; `None` before the first."""
        return self._driver.reader

    @property
    def at_last_step(self) -> bool:
        """Whether no rank has a batch after this step, as far as the loaders can tell."""
        return self._driver.at_last_step

    def read(self, loader: Iterable[T], reader_of: Callable[[Iterable[T]], Reader[T]]) -> Iterator[T]:
        """Yield the batches of `loader` as `Join.batches` does, but begin at once, with a reader of another class."""
        return self._driver.go_through(loader, reader_of)

    def add_part(self, make: Callable[[LoopDriver, int], P]) -> P:
        """Add a part after all others, before the context is entered; `make` gets the driver and the part's index."""
        return self._driver.add(make)

    def hand_over_states(self) -> None:
        """Give all ranks the state of the lowest active rank, of everything that takes part; every rank calls this."""
        self._driver.tails.hand_over_states()


class _Join(Join):
    """The `Join` that users get; it has no public names besides those of `Join`."""

    def batches(self, loader: Any) -> Any:
        """Go through the batches of `loader`, as in `torch_join.Join`; a prepared loader is passed on as it is."""
        return loader if is_prepared(loader) else super().batches(loader)
