"""What the other modules of this package ask of the context they work in."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader

PreparedLoader: TypeAlias = DataLoaderShard | DataLoaderDispatcher | SkipDataLoader


class JoinContext(Protocol):
    """The context of one `join_uneven_inputs`, from its beginning to its end."""

    @property
    def loader(self) -> PreparedLoader | None:
        """The prepared loader that this rank iterates over, or did last; `None` if that is another kind of loader."""

    @property
    def at_last_step(self) -> bool:
        """Whether no rank has a batch after this step, as far as the loaders can tell."""

    def iterate(self, loader: PreparedLoader, own_iter: Callable[[PreparedLoader], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of `loader`; all ranks leave the loop together, in one common state.

        Args:
            loader: The loader.
            own_iter: Accelerate's own `__iter__` of its class.
        """

    def note_epoch(self, loader: Any) -> None:
        """Note that this rank's own code begins to go through a loader that is none of Accelerate's."""
