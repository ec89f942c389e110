"""What Lightning sets a loop up with: this rank's dataloaders, but for a length that is the longest rank's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_join._reading.loaders import Loaders, exchange
from torch_join.integration import setting


class EvenedLoader:
    """Stands for a dataloader: `isinstance` takes it for one, and whoever sets or gets attributes for the same."""

    def __init__(self, loader: Any, find_longest: Callable[[], int | float]) -> None:
        vars(self).update(own_loader=loader, find_longest=find_longest)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.own_loader)

    def __len__(self) -> int:
        longest = self.find_longest()
        if longest == float("inf"):
            raise TypeError("The dataloader of some rank has no length.")
        return int(longest)

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing: a reader that is made in the set-up is not gone through, and must not begin anything."""
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.own_loader, name, value)


@contextmanager
def evened(
    loop: Any,
    measure: Callable[[Sequence[Any]], Loaders],
    check: Callable[[Sequence[Loaders]], None] | None = None,
) -> Iterator[None]:
    """Have Lightning set a loop up with lengths that all ranks have; then the loop has this rank's own dataloaders.

    Lightning takes all numbers of a loop from its dataloaders' lengths. The first time that one is asked for, all
    ranks exchange theirs, of all dataloaders that there are by then.

    Where Lightning waits for all ranks in the set-up, a failure of one is heard of.

    Args:
        loop: The loop.
        measure: Measures this rank's dataloaders.
        check: Called with what each rank has measured, before Lightning takes any number from it.

    Raises:
        DataloaderError: On all ranks, if the dataloaders of one cannot be run or their numbers differ.
    """
    loaders, longest, strategy = list[Any](), list[int | float](), loop.trainer.strategy
    process = strategy.process_dataloader

    def find_longest(place: int) -> int | float:
        """Return the number of batches on the rank that has most; all ranks meet, unless they have for this loader."""
        if place >= len(longest):
            everyone = exchange(strategy.channel, measure(loaders))
            longest[:] = [max(lengths) for lengths in zip(*(each.lengths for each in everyone), strict=True)]
            if check is not None:
                check(everyone)
        return longest[place]

    def stand_in(loader: Any) -> EvenedLoader:
        loaders.append(process(loader))
        # In messages of Lightning's it has the name of what it stands for.
        named: type[EvenedLoader] = type(type(loaders[-1]).__name__, (EvenedLoader,), {})
        return named(loaders[-1], partial(find_longest, len(loaders) - 1))

    try:
        # On the object: a strategy that is derived from ours may put a dataloader of its own around what ours returns.
        with setting(strategy, sets_up=True, process_dataloader=stand_in):
            yield
    finally:
        combined = loop._combined_loader
        if combined is not None and any(isinstance(part, EvenedLoader) for part in combined.flattened):
            combined.flattened = [part.own_loader for part in combined.flattened]
