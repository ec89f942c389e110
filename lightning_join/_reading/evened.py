"""The dataloaders with which Lightning sets up a loop: this rank's own, with the length of the longest rank's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_join._reading.loaders import Loaders, exchange
from torch_join.integration import setting


class EvenedLoader:
    """A stand-in for a dataloader: `isinstance` and access to attributes treat it as that dataloader."""

    def __init__(self, loader: Any, find_longest: Callable[[], int | float]) -> None:
        vars(self).update(own_loader=loader, find_longest=find_longest)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.own_loader)

    def __len__(self) -> int:
        longest = self.find_longest()
        if longest == float("inf"):
            raise TypeError("At least one rank's dataloader has no length.")
        return int(longest)

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing: a reader that is made in the setup must not start the dataloader."""
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.own_loader, name, value)


@contextmanager
def evened(loop: Any, check: Callable[[Sequence[Loaders]], None] | None = None) -> Iterator[None]:
    """Make Lightning set up a loop with the same lengths on all ranks; then the loop has this rank's dataloaders.

    Lightning takes all numbers of a loop from its dataloaders' lengths. When it reads the first length, all ranks
    exchange the lengths of all dataloaders that exist by then.

    If Lightning waits for all ranks in the setup, one rank's failure is reported to them.

    Args:
        loop: The loop, whose `measure` measures this rank's dataloaders.
        check: Called with each rank's measurement, before Lightning takes any number from it.

    Raises:
        DataloaderError: On all ranks, if the dataloaders of one cannot be run or their numbers differ.
    """
    loaders, longest, strategy = list[Any](), list[int | float](), loop.trainer.strategy
    process = strategy.process_dataloader

    def find_longest(place: int) -> int | float:
        """Return the largest number of batches of any rank; all ranks meet, unless they have met for this loader."""
        if place >= len(longest):
            everyone = exchange(strategy.channel, loop.measure(loaders))
            longest[:] = [max(lengths) for lengths in zip(*(each.lengths for each in everyone), strict=True)]
            if check is not None:
                check(everyone)
        return longest[place]

    def stand_in(loader: Any) -> EvenedLoader:
        loaders.append(process(loader))
        # Lightning's messages show the name of the dataloader that it stands for.
        named: type[EvenedLoader] = type(type(loaders[-1]).__name__, (EvenedLoader,), {})
        return named(loaders[-1], partial(find_longest, len(loaders) - 1))

    try:
        # Set on the object, since a strategy derived from ours may wrap the dataloader that ours returns.
        with setting(strategy, sets_up=True, process_dataloader=stand_in):
            yield
    finally:
        combined = loop._combined_loader
        if combined is not None and any(isinstance(part, EvenedLoader) for part in combined.flattened):
            combined.flattened = [part.own_loader for part in combined.flattened]
