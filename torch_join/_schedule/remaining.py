"""What a place in a loader needs: a description of the loader, and iterators over its rest and its next epoch."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from torch_join._base.attributes import setting
from torch_join._base.errors import JoinValueError
from torch_join._schedule.drawing import reuses_workers, walk
from torch_join._schedule.stateful import SideBySide, has_place, loaders_in, seed_of, shuffle_of


def describe(loader: Any, size: int, ended: bool = False) -> dict[str, int | str]:
    """Return the properties of a loader that must not change, or a number of windows or a state would lose its meaning.

    Raises:
        UnsupportedError: The loader's order cannot be reproduced, and the loop has not ended.
    """
    found: dict[str, int | str] = {} if size == 1 else {"batches in a window": size}
    if isinstance(loader, SideBySide):
        each = [describe(inner, 1, ended) for inner in loader.loaders]
        return {f"{what} of loader {number}": value for number, one in enumerate(each) for what, value in one.items()}
    if isinstance(loader, (list, tuple)):
        found["batches"] = len(loader)
    if isinstance(getattr(loader, "batch_size", None), int):
        found["samples in a batch"] = loader.batch_size
    if isinstance(loader, DataLoader):
        is_stream = _is_stream(loader)
        with suppress(TypeError, NotImplementedError):  # a dataset's `__len__` may raise
            if not is_stream and hasattr(loader.dataset, "__len__"):
                found["samples"] = len(loader.dataset)
        if is_stream or has_place(loader):
            found["workers"] = loader.num_workers
    if (shuffle := shuffle_of(loader)) is not None:
        found["the seed of its shuffle"] = shuffle
    for name, part in [] if has_place(loader) else walk(loader)[1]:
        if (seed := None if ended else seed_of(part)) is not None:
            found[f"the seed of {name}"] = seed
    return found


def differs_from(loader: Any, size: int, place: dict[str, Any]) -> str:
    """Return how the loader differs from the one in which a place was saved."""
    then, now = place["loader"], describe(loader, size, place["ended"])
    other = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"{name}: {then.get(name, 'unknown')} then, {now.get(name, 'unknown')} now" for name in other)


def check_same(loader: Any, size: int, place: dict[str, Any], advice: str = "") -> None:
    if differs := differs_from(loader, size, place):
        raise JoinValueError(
            f"The state was written in a loop over a different loader than this {type(loader).__name__} ({differs}),"
            " so its position does not apply. First resume the loop that wrote the state, with the same data and"
            f" seeds.{advice}"
        )


@contextmanager
def _without_seeds(loaders: Sequence[Any]) -> Iterator[None]:
    """Make new persistent workers draw no base seed from a source of the order, since reused workers drew none."""
    with ExitStack() as stack:
        for each in loaders:
            if reuses_workers(each, now=False):
                stack.enter_context(setting(each, generator=torch.Generator()))
        yield


def skip(loader: Any, taken: int, reuses: bool) -> Iterator[Any]:
    """Draw the order, and return an iterator over the batches after the first `taken` ones.

    Args:
        loader: The loader.
        taken: How many batches to skip.
        reuses: Whether the loader reused the workers of the previous epoch, and so drew no base seed.
    """
    if not _reads_by_index(loader):
        with _without_seeds(loaders_in(loader) if reuses else []):
            iterator: Iterator[Any] = iter(loader)
        # Read the first batch here, since some loaders draw the order only then.
        return read_past(iterator, taken) if taken else chain([*islice(iterator, 1)], iterator)
    rest = _Rest(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, taken)
    loader = copy(loader)
    # `DataLoader.__setattr__` refuses these.
    vars(loader).update({"sampler" if loader.batch_sampler is None else "batch_sampler": rest, "_iterator": None})
    if reuses:
        rest.start()
        loader.generator = None
    iterator = iter(loader)
    rest.start()
    return iterator


def begin_again(loader: Any, states: dict[str, Any]) -> Iterator[Any]:
    """Return an iterator over a loader's next epoch; new persistent workers draw no base seed, as reused ones do.

    Args:
        loader: The loader.
        states: The result of `drawing`; this function notes in it whether workers are reused.
    """
    states["reuses"] |= reuses_workers(loader, now=False)
    with _without_seeds(loaders_in(loader)):
        return iter(loader)


def read_past(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in islice(iterator, count):
        pass
    return iterator


def _reads_by_index(loader: Any) -> bool:
    """Whether only its sampler determines a loader's batches, as in torch's and torchdata's loaders."""
    if not isinstance(loader, DataLoader) or _is_stream(loader):
        return False
    iterates: Any = type(loader).__iter__
    return iterates is DataLoader.__iter__ or iterates.__module__.startswith("torchdata.")


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


class _Rest:
    """A sampler that skips the first indices, or batches of indices, of another sampler."""

    def __init__(self, sampler: Iterable[Any], skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped
        self._first: list[Any] | None = None

    def start(self) -> None:
        """Draw the order."""
        if self._first is None:
            # Do not read it to its end, where one of torch's samplers draws once more.
            self._indices = read_past(iter(self._sampler), self._skipped)
            self._first = [] if self._skipped else [*islice(self._indices, 1)]

    def __iter__(self) -> Iterator[Any]:
        self.start()
        yield from self._first or ()
        yield from self._indices

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._skipped)  # type: ignore[arg-type]
