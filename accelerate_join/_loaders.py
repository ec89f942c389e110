"""Accelerate's loaders inside the context: loops over them go through `Join`.

It relies on this contract: a prepared loader's `__iter__` is a generator that prefetches one batch, and sets
`end_of_dataloader` before it yields its last batch. So this module need not prefetch. (A loader's class cannot be
exchanged: its `__class__` is a property that returns the wrapped loader's class.)
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain, islice
from typing import Any, TypeAlias, get_args

import accelerate
import torch
from accelerate import PartialState
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    prepare_data_loader,
)
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from accelerate_join import _compat
from accelerate_join._prepared import PreparedLoader
from torch_join import JoinDataWarning, JoinError, UnsupportedError
from torch_join.integration import (
    Begin,
    Count,
    Dealer,
    Dealt,
    LoaderPlace,
    Reader,
    dealt,
    draws_exactly,
    in_turn,
    refuse_position,
    setting,
)
from torch_join.integration import dealer_of as dealer_of_own

DEALER = "Accelerate"
_KINDS = get_args(PreparedLoader)
Iterate: TypeAlias = Callable[[Any], Iterator[Any]]


class PreparedReader(Reader[Any]):
    """Reads a prepared loader, which knows for each batch whether it is the last.

    Args:
        own_iter: Accelerate's own `__iter__` of the loader's class.
        counts: Whether to count batches before Accelerate places them on a device.
        is_at_end: Whether this rank has no batch left in the resumed epoch.
        loader: The loader.

    Attributes:
        prepared: The loader.
    """

    _gives: Reader[Any] | None = None  # reads this rank's own batches, if other ranks may train on them
    dealer = DEALER, "Do not prepare these loaders, and loop over join_batches(loader)"

    def __init__(self, own_iter: Iterate, counts: bool, is_at_end: bool, loader: PreparedLoader) -> None:
        self.prepared, self.dealt = loader, dealt_by_processes(loader)
        # Dispatched batches are already on a device when they arrive, except on the main process.
        self._unplaced: deque[Any] | None = deque() if counts and type(loader) is not DataLoaderDispatcher else None
        self._own = own_iter(loader)
        own = self._without_batches() if is_at_end else self._own
        super().__init__(own if self._unplaced is None or is_at_end else self._keeping(self._unplaced))

    def _without_batches(self) -> Iterator[Any]:
        with _compat.batches_replaced(self.prepared, lambda: iter(())):
            yield from self._own  # Accelerate communicates with all processes at the start of a loop

    def _keeping(self, unplaced: deque[Any]) -> Iterator[Any]:
        own_iter, skipped = self.prepared.base_dataloader.__iter__, getattr(self.prepared, "skip_batches", 0)

        def batches() -> Iterator[Any]:
            for index, batch in enumerate(own_iter()):
                if index >= skipped:
                    unplaced.append(batch)
                yield batch

        with _compat.batches_replaced(self.prepared, batches):
            first = [*islice(self._own, 1)]
        yield from chain(first, self._own)

    def count(self, count: Count) -> float:
        return super().count(count) if self._unplaced is None else count(self._unplaced.popleft())

    def place(self) -> LoaderPlace:
        raise UnsupportedError(
            "join.state_dict() was called in a loop over a loader that Accelerate has prepared, whose position Join"
            " does not track. Use accelerator.save_state and load_state, or iterate over an unprepared loader with"
            " `join.batches(loader)`."
        )

    @property
    def trained_on(self) -> int:
        return self.taken if self._gives is None else self._gives.trained_on

    def certain_length(self) -> int | None:
        return certain_length(self.prepared)

    def _rebalanced(self, begin: Begin) -> Iterator[Any]:
        own = _OwnBatches(self.prepared)
        reader = begin(own) or own
        self._gives = None if reader is own else own
        while reader.has_next():
            batch = reader.take()
            if reader is own and self._unplaced is not None:  # otherwise a plan counts it
                self._unplaced.append(batch)
            yield batch

    def rebalanced(self, begin: Begin) -> Reader[Any]:
        loader = self.prepared
        if type(loader) is DataLoaderDispatcher:
            return self  # it gives all processes the same number of batches by design
        refuse_position(loader.base_dataloader)
        if getattr(loader, "skip_batches", 0):
            raise UnsupportedError(
                "rebalance=True cannot be combined with a loader that skips the first batches of an iterable dataset:"
                " it would skip batches that other ranks send. Start the dataset where training resumes."
            )
        # Batches are taken before Accelerate places them on a device, and returned when it reads the next one.
        self._iterator = self._own
        with _compat.batches_replaced(loader, lambda: self._rebalanced(begin)):
            self.has_next()
        return self

    @property
    def goes_on(self) -> bool:
        return not self.prepared.end_of_dataloader

    def leave(self) -> None:
        if self.prepared.end_of_dataloader:  # else Accelerate would not count the epoch
            self.has_next()

    @property
    def at_last(self) -> bool:
        return self.has_next() and bool(self.prepared.end_of_dataloader)


class _OwnBatches(Reader[Any]):
    """Reads the batches of a prepared loader before they are placed on a device."""

    lead = 2  # Accelerate prefetches one batch

    def __init__(self, loader: PreparedLoader) -> None:
        super().__init__(loader.base_dataloader)
        self._prepared = loader

    def certain_length(self) -> int | None:
        return certain_length(self._prepared)


def certain_length(loader: PreparedLoader) -> int | None:
    """Return the number of batches of this rank's `loader` if it is certain, else `None`.

    It is certain if batches of a fixed size are drawn from a sampler of torch or Accelerate. Otherwise `len` is
    unreliable: with `split_batches`, it counts batches that are empty on this rank; with `skip_first_batches`, it may
    be negative; and a resumed loader has fewer batches left.
    """
    if type(loader) is not DataLoaderShard or loader.skip_batches or loader.use_stateful_dataloader:
        return None
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler = batch_sampler(loader)
    if type(sampler) is BatchSamplerShard:
        if sampler.split_batches:
            return None
        sampler = sampler.batch_sampler
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return len(loader) if type(inner) is SeedableRandomSampler or draws_exactly(sampler) else None


def is_prepared(loader: object) -> bool:
    """Whether `loader` is a prepared loader, whose loops go through `Join`."""
    return issubclass(type(loader), _KINDS)


def goes_through_join(loader: object) -> bool:
    """Whether a `join_batches` loop over `loader` goes through `Join`; a user class may have its own `__iter__`."""
    own: Any = type(loader)
    return not is_prepared(loader) or any(own.__iter__ is kind.__iter__ for kind in _KINDS)


def prepare_own(
    accelerator: accelerate.Accelerator, loader: Any, place: bool | None = None, seedable: bool | None = None
) -> Any:
    """Prepare a loader over this process's own data as Accelerate does in a single process.

    Args:
        accelerator: The accelerator.
        loader: A plain loader.
        place: Whether to place batches on the device; `None` takes the accelerator's choice.
        seedable: Whether to draw a random order from a seed; `None` takes the accelerator's choice.
    """
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if accelerator.use_stateful_dataloader and type(sampler) is RandomSampler and sampler.generator is None:
        # From torch's global generator, which the loader draws from too, torchdata would resume in another order.
        sampler.generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement if place is None else place,
        rng_types=None,
        dispatch_batches=False,
        use_seedable_sampler=accelerator.use_seedable_sampler if seedable is None else seedable,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )


def deals_out(loader: PreparedLoader) -> bool:
    """Whether `loader` gives each process a part of a dataset that is the same on all processes."""
    shards = (BatchSamplerShard, IterableDatasetShard)
    return _dispatches(loader) or isinstance(_not_skipping(loader), shards) or isinstance(loader.dataset, shards)


def refuse_own_shards(accelerator: accelerate.Accelerator) -> None:
    """Raise if the running loop is over a loader of which each process has its own, as Accelerate gathers equal parts.

    It drops rows of the last step that it takes for repeated ones, and needs the same number of rows from all.
    """
    loader, prepared = accelerator.gradient_state.active_dataloader, _compat.loaders(accelerator)
    if loader is None or accelerator.num_processes == 1 or _dispatches(loader) or deals_out(loader):
        return
    known = known_as(loader, prepared)
    if _compat.is_own(known) or all(each is not known for each in prepared):
        raise JoinError(
            "gather_for_metrics was called in a loop over a loader that reads each process's own data, outside"
            " join_batches and join_uneven_inputs. There Accelerate takes the same number of rows from each process,"
            " and drops rows of the last batch. Write `for batch in accelerator.join_batches(loader)`, which gathers"
            " each row once, or sum on each process and call accelerator.reduce after the loop."
        )


def dealt_by_processes(loader: PreparedLoader) -> Dealt | None:
    """Describe the dataset if each process reads its share from its own copy; else return `None`."""
    if not deals_out(loader) or _dispatches(loader):
        return None
    dataset = loader.dataset
    return dealt(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset)


def remainder(loader: PreparedLoader) -> int:
    """Return the number of new samples in the last step, without repeated ones, as Accelerate does.

    0 means that all are new, -1 that the number is unknown.
    """
    sampler, dataset = _not_skipping(loader), loader.dataset
    if isinstance(sampler, BatchSamplerShard):
        # Accelerate loses this number after skip_first_batches, and ignores that a sampler may draw only a part.
        samples = getattr(sampler.batch_sampler, "sampler", dataset)
        return _samples_in_last_round(samples, sampler) if sampler.even_batches and not sampler.drop_last else 0
    if isinstance(dataset, IterableDatasetShard):
        # Accelerate mistakes this process's share for the whole.
        return _samples_in_last_round(dataset.dataset, dataset) if not dataset.drop_last else 0
    return int(loader.remainder) if _dispatches(loader) else 0


def _samples_in_last_round(samples: Any, shard: Any) -> int:
    try:
        return int(len(samples) % (shard.batch_size * (1 if shard.split_batches else shard.num_processes)))
    except TypeError:  # no length, or no batch size
        return -1


@contextmanager
def loops_replaced(
    iterate: Callable[[Iterate, PreparedLoader], Iterator[Any]], note_epoch: Callable[[Any], None]
) -> Iterator[None]:
    """In this context, each loop over an Accelerate loader goes through `iterate`, even if it is created later.

    Args:
        iterate: Called with Accelerate's own `__iter__` of a loader's class, and the loader.
        note_epoch: Called with any other loader, before a loop over it.
    """

    def iterates(own_iter: Iterate) -> Iterate:
        def __iter__(loader: PreparedLoader) -> Iterator[Any]:  # noqa: N807
            if type(loader) is DataLoaderDispatcher:
                refuse_distributed_sampler(loader.batch_sampler, loader.state.num_processes)
            return iterate(own_iter, loader)

        return __iter__

    own_plain = DataLoader.__iter__

    def noting(loader: Any) -> Iterator[Any]:
        note_epoch(loader)
        return own_plain(loader)

    with ExitStack() as stack:
        stack.enter_context(setting(DataLoader, __iter__=noting))
        for kind in _KINDS:
            stack.enter_context(setting(kind, __iter__=iterates(_compat.without_none(kind.__iter__))))
        stack.enter_context(shards_checked())
        for skipping in (SkipBatchSampler, SkipDataLoader):  # the length would be negative if more were skipped
            stack.enter_context(setting(skipping, __len__=lambda loader, own=skipping.__len__: max(0, own(loader))))
        yield


@contextmanager
def even_batches_set(accelerator: accelerate.Accelerator, value: bool | None) -> Iterator[None]:
    """Override `even_batches` of all prepared loaders that have it, as Accelerate does, and restore it."""
    with ExitStack() as stack:
        if value is not None:
            stack.enter_context(setting(accelerator, even_batches=value))  # for loaders prepared in the context
            loaders = _compat.loaders(accelerator)
            for loader in loaders:
                shard = batch_sampler(loader)
                if isinstance(shard, BatchSamplerShard):
                    stack.enter_context(setting(shard, even_batches=value))
            if any(isinstance(loader.dataset, IterableDataset) or _dispatches(loader) for loader in loaders):
                JoinDataWarning.warn(
                    "Overriding even_batches is only supported for map-style datasets, yet some dataloaders given"
                    " were iterable, or are dispatched from the main process, so they repeat samples to fill their"
                    " last batches. To train on each sample once, give each process its own part of the stream,"
                    " unprepared. To silence this warning, pass even_batches=None."
                )
        yield


def _dispatches(loader: PreparedLoader) -> bool:
    return type(loader) is DataLoaderDispatcher


def batch_sampler(loader: PreparedLoader) -> Any:
    """Return the object that makes the batches of `loader`: its batch sampler, or a sampler in that role."""
    sampler = loader.batch_sampler
    return loader.sampler if sampler is None else sampler


def _not_skipping(loader: PreparedLoader) -> Any:
    """Return the batch sampler that `skip_first_batches` has wrapped, or that of a loader which skips none."""
    sampler = batch_sampler(loader)
    while isinstance(sampler, SkipBatchSampler):
        sampler = sampler.batch_sampler
    return sampler


def drawn_from(loader: PreparedLoader) -> DataLoader[Any]:
    """Return a loader that draws in the same order as `loader`, without its sharding and skipping."""
    own: DataLoader[Any] = copy.copy(loader.base_dataloader)
    sampler, dataset = batch_sampler(loader), loader.dataset
    while isinstance(sampler, (BatchSamplerShard, SkipBatchSampler)):
        sampler = sampler.batch_sampler
    if isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    name = "sampler" if own.batch_sampler is None else "batch_sampler"
    # `DataLoader.__setattr__` refuses these. A loader that skips has no `batch_size`.
    vars(own).update({"dataset": dataset, name: sampler, "batch_size": getattr(sampler, "batch_size", own.batch_size)})
    return own


class _ShardDealer(Dealer):
    """Accelerate's shards: the batches of one order go to the ranks in turn, or all to a single process."""

    def __init__(self, batches: Any) -> None:
        self._sampler, self._batches, self.batch = batches, None, 1
        self.rank, self.world = 0, 1
        if type(batches) is BatchSamplerShard:
            self._sampler, self.rank, self.world = batches.batch_sampler, batches.process_index, batches.num_processes

    def order(self, world: int, drawn: Callable[[], Any]) -> tuple[Sequence[Any], torch.Tensor, torch.Tensor]:
        with drawn():
            return in_turn([*self._sampler], world)


def dealer_of(loader: PreparedLoader) -> Dealer | None:
    """Return the dealer that knows the batches, or samples, of `loader` on all processes; `None` if there is none."""
    if type(loader) is not DataLoaderShard or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.use_stateful_dataloader or loader.batch_sampler is None:
        return None
    batches = _not_skipping(loader)
    if type(batches) is BatchSamplerShard:
        return None if batches.split_batches else _ShardDealer(batches)
    found, job = dealer_of_own(drawn_from(loader)), PartialState()
    if found is None:
        return _ShardDealer(batches) if job.num_processes == 1 else None
    return found if (found.rank, found.world) == (job.process_index, job.num_processes) else None


def with_rest(loader: PreparedLoader, dealer: Dealer, rest: Sequence[Any]) -> PreparedLoader:
    """Return a loader like `loader`, with the remaining batches of this process."""
    result = accelerate.skip_first_batches(loader, 0)
    # `DataLoader.__setattr__` refuses it.
    vars(result.base_dataloader).update(batch_sampler=dealer.of(rest), generator=None)
    vars(result)["_join_known"] = loader
    return result


def skipped_in(loader: PreparedLoader) -> int:
    """Return how many batches of a loader `skip_first_batches` skips."""
    skipped, sampler = int(getattr(loader, "skip_batches", 0)), batch_sampler(loader)
    while isinstance(sampler, SkipBatchSampler):
        skipped, sampler = skipped + sampler.skip_batches, sampler.batch_sampler
    return skipped


def known_as(loader: PreparedLoader, loaders: Sequence[PreparedLoader]) -> PreparedLoader:
    """Return the entry of `loaders` that `loader` is, or whose rest it is: see `skip_first_batches`, `with_rest`."""
    loader = vars(loader).get("_join_known", loader)
    if any(each is loader for each in loaders):
        return loader
    return next((each for each in loaders if _source(each) is _source(loader)), loader)


def _source(loader: PreparedLoader) -> Any:
    own = drawn_from(loader)
    return own.dataset if isinstance(own.dataset, IterableDataset) else batch_sampler(own)


def shards_checked() -> AbstractContextManager[None]:
    """In this context, a loader raises if Accelerate would drop samples when it splits the loader."""
    own_iter: Iterate = BatchSamplerShard.__iter__

    def __iter__(shard: Any) -> Iterator[Any]:  # noqa: N807
        refuse_distributed_sampler(shard.batch_sampler, shard.num_processes)
        if shard.batch_size is not None and type(shard.batch_sampler) is not BatchSampler:
            shard = copy.copy(shard)
            shard.batch_sampler = _SizeCheckingSampler(shard)
        return own_iter(shard)

    return setting(BatchSamplerShard, __iter__=__iter__)


def refuse_distributed_sampler(batches: Any, processes: int) -> None:
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) and min(sampler.num_replicas, processes) > 1:
        raise JoinError(
            f"The sampler of a prepared loader is {type(sampler).__name__}, which already gives this process 1 of"
            f" every {sampler.num_replicas} samples. Accelerate would split these again among {processes} processes,"
            " so most samples would never be used. Remove this sampler, or use join_batches(loader) without prepare."
        )


class _SizeCheckingSampler:
    """The batch sampler of a shard; raises if the shard would leave out batches silently.

    A shard yields a round of batches, one per process, only if the round's last batch has the sampler's `batch_size`.
    It splits a batch only if the batch has that size.
    """

    def __init__(self, shard: Any) -> None:
        self._sampler, self.batch_size = shard.batch_sampler, shard.batch_size
        self._batches_per_round = 1 if shard.split_batches else shard.num_processes

    def __iter__(self) -> Iterator[Any]:
        unequal = -1  # the index of a batch with another size
        for index, batch in enumerate(self._sampler):
            if unequal >= 0:
                raise JoinError(
                    f"{type(self._sampler).__name__} has batch_size={self.batch_size}, but its batch {unequal}, which"
                    " is not the last one, has a different size, so Accelerate would silently drop batches. If the"
                    " batch sampler's batches vary in size, delete its `batch_size` attribute or set it to None."
                )
            if (index + 1) % self._batches_per_round == 0 and len(batch) != self.batch_size:
                unequal = index
            yield batch
