"""The number of batches in every rank's dataloaders: the ranks exchange them, and all decide from the same numbers.

Lightning sets up a loop with this rank's own dataloaders, with the length of the longest rank's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import BatchSampler, DataLoader

from lightning_join._compat import parse_num_batches, sized_len
from lightning_join._reading.samplers import sharded_dataset
from torch_join import JoinDataWarning, JoinValueError
from torch_join.integration import Channel, Dealt, closed, dealt_again, is_length_certain, name_ranks, setting


class DataloaderError(JoinValueError, MisconfigurationException):
    """The dataloaders of some rank cannot be run; also the error that Lightning raises for them."""


@closed("loaders")
@dataclass(frozen=True)
class Loaders:
    """One rank's dataloaders.

    Attributes:
        limits: The number of batches to run per dataloader, infinite if unknown.
        lengths: The numbers of batches without a limit.
        error: Why they cannot be run, if they cannot.
        certain: Whether a dataloader surely has as many batches as it reports.
        planned: Whether a dataloader may report another number once it is iterated, since it plans its batches anew.
        full: The size of a dataloader's batches, and how many of them surely have it; `None` if unknown.
        sharded: Each one's dataset, if Lightning's sampler takes this rank's share of it.
    """

    limits: list[int | float]
    lengths: list[int | float] = field(default_factory=list)
    error: str | None = None
    certain: list[bool] = field(default_factory=list)
    planned: list[bool] = field(default_factory=list)
    full: list[tuple[int, int] | None] = field(default_factory=list)
    sharded: list[Dealt | None] = field(default_factory=list)


def measure(stage: RunningStage, loaders: Sequence[Any], limit: int | float) -> Loaders:
    """Measure this rank's dataloaders; an error is a result too, since all ranks must learn of it."""
    limits: list[int | float] = []
    lengths: list[int | float] = []
    planned: list[bool] = []
    error = None
    for loader in loaders:
        length = sized_len(loader)
        planned.append(length is not None and not is_length_certain(loader))
        try:
            lengths.append(float("inf") if length is None else length)
            limits.append(parse_num_batches(stage, lengths[-1], limit))
        except MisconfigurationException as why:
            limits.append(int(planned[-1]))  # not known yet
            error = error or str(why)
    sharded = [sharded_dataset(loader) for loader in loaders]
    certain = [isinstance(each, (DataLoader, Sequence)) and not has_iterable_dataset(each) for each in loaders]
    return Loaders(limits, lengths, error, certain, planned, [_full_batches(loader) for loader in loaders], sharded)


def _full_batches(loader: Any) -> tuple[int, int] | None:
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    size, samples = loader.batch_sampler.batch_size, sized_len(loader.batch_sampler.sampler)
    return (size, samples // size) if is_length_certain(loader) and samples is not None else None


def steps_alike(all_loaders: Sequence[Loaders], places: Sequence[int]) -> int:
    """Return the number of steps, from an epoch's start, in which all ranks surely have batches of one size."""
    steps: list[int] = []
    for place in places:
        full = [each.full[place] for each in all_loaders]
        known = [each for each in full if each is not None]
        if len(known) < len(full) or len({size for size, _ in known}) > 1:
            return 0
        steps += [count for _, count in known]
    return min(steps, default=0)


def warn(all_loaders: Sequence[Loaders]) -> None:
    """Warn about dataloaders that run, but probably not as the user intended."""
    for place in range(len(all_loaders[0].sharded)):
        remedy = "Pass own_shards=True to the strategy (or use_distributed_sampler=False to Trainer)"
        datasets = [each.sharded[place] for each in all_loaders]
        if (text := dealt_again(datasets, "Lightning's sampler", remedy, f" of dataloader {place}")) is not None:
            rank_zero_only(JoinDataWarning.warn)(text)


def check_cycled(loader: CombinedLoader, own: Loaders) -> Loaders:
    """Add the error to this rank's measurement if one of the dataloaders would be cycled and is empty."""
    empty = [place for place, n in enumerate(own.limits) if n == 0 and not own.planned[place]]
    if loader._mode == "max_size_cycle" and own.error is None and empty and sum(own.limits) > 0:
        what = f"Dataloader {empty[0]} of a CombinedLoader(mode='max_size_cycle') is empty"
        remedy = "cannot be cycled, and the other dataloaders' batches would be lost. Use mode='max_size'"
        own = replace(own, error=f"{what}, so it {remedy}.")
    return own


def exchange(channel: Channel, own: Loaders) -> list[Loaders]:
    """Exchange all ranks' measurements.

    Raises:
        DataloaderError: On all ranks, if the dataloaders of one cannot be run or their numbers differ.
    """
    all_loaders = channel.gather(own, of=Loaders)
    check(all_loaders)
    return all_loaders


def check(all_loaders: Sequence[Loaders]) -> None:
    """Raise the errors of `exchange` for measurements that all ranks have exchanged otherwise."""
    errors = {rank: loaders.error for rank, loaders in enumerate(all_loaders) if loaders.error}
    if errors:
        rank, error = next(iter(errors.items()))
        raise DataloaderError(f"The dataloaders of {name_ranks(errors)} cannot be used. Rank {rank}: {error}")
    counts = [len(loaders.limits) for loaders in all_loaders]
    if len(set(counts)) > 1:
        raise DataloaderError(
            f"Every rank needs the same number of dataloaders, but they have {counts} (by rank). Give a rank"
            " without data an empty dataloader."
        )


def total_length(loader: CombinedLoader, limits: Sequence[int | float]) -> int | float:
    """Return the number of batches of a loader that reads its parts side by side: that of the shortest or longest."""
    return (min if loader._mode == "min_size" else max)(limits, default=0)


def warn_of_missing(rank: int, claimed: int, end: int) -> None:
    """Warn that a rank has fewer batches than its dataloader had reported."""
    rank_zero_only(JoinDataWarning.warn)(
        f"The train dataloader of rank {rank} reported {claimed} batches but yielded only {end}, and then the rank"
        " finished; training continues with the other ranks' batches. Fix or remove its `__len__`."
    )


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
            all_loaders = exchange(strategy.channel, loop.measure(loaders))
            longest[:] = [max(lengths) for lengths in zip(*(each.lengths for each in all_loaders), strict=True)]
            if check is not None:
                check(all_loaders)
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
