"""Dataloaders and datasets with a state: how to resume in the middle of an epoch, and to start the next epoch.

Classes of other libraries are recognized by their attributes and modules, without importing these libraries. Seen in
torchdata 0.11, litdata 0.2.76, datasets 5.2 and webdataset 1.0.2.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

from torch.utils.data import BatchSampler, IterableDataset

from torch_join._base.errors import UnsupportedError


class SideBySide:
    """A loader that iterates over several loaders at once, each with its own place. Frameworks derive classes from it.

    Attributes:
        loaders: The loaders that it iterates over.
    """

    loaders: Sequence[Any]

    @property
    def problem(self) -> str:
        """Why the current order cannot be restored; empty if it can."""
        return ""


def loaders_in(loader: Any) -> Sequence[Any]:
    """Return the loaders that a loader iterates over side by side, or the loader itself."""
    return loader.loaders if isinstance(loader, SideBySide) else [loader]


def is_stateful(thing: Any) -> bool:
    """Whether an object has a state that can be saved and loaded."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def sampler_of(loader: Any) -> Any:
    """Return the sampler of a loader's indices, inside any batch samplers; `None` if there is no sampler."""
    sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if sampler is None else sampler  # not `or`: `len` may raise
    # One of Accelerate's batch samplers has no inner sampler.
    while isinstance(sampler, BatchSampler) and not is_stateful(sampler) and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return sampler


def has_place(loader: Any) -> bool:
    """Whether a loader's state restores its place; a shuffled Hugging Face `datasets` stream loses its buffer."""
    return is_stateful(loader) and not any(
        type(part).__name__ == "BufferShuffledExamplesIterable" for part in _stream_parts(loader)
    )


def _stream_parts(loader: Any) -> Iterator[Any]:
    """Yield the parts of a stream of Hugging Face's `datasets`."""
    dataset = getattr(loader, "dataset", None)
    parts = [getattr(dataset, "_ex_iterable", None)] if type(dataset).__module__.startswith("datasets.") else []
    while parts:
        if (part := parts.pop()) is not None:
            yield part
            parts += [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]


@contextmanager
def resumed_at(loaders: Sequence[Any], epochs: Sequence[Any], taken: int) -> Iterator[None]:
    """Wrap the creation of iterators, so that each loader starts at its loaded state, and none starts anew.

    Args:
        loaders: The loaders, whose states have been loaded.
        epochs: The result of `epochs_of` that was saved with these states.
        taken: How many batches had been taken.
    """
    for loader, epoch in zip(loaders, epochs, strict=True):
        if epoch is not None:
            # In a resumed epoch, Lightning skips `on_train_epoch_start`, where user code usually sets the epoch.
            loader.dataset.set_epoch(epoch)
        if _is_litdata(loader) and taken > 0:
            loader.restore = True  # LitData mistakes the end of an epoch for the start of the next one
    # A `torchdata.nodes.Loader` would start anew, if this rank has no batch in the rest of the epoch.
    restarting = [loader for loader in loaders if getattr(loader, "restart_on_stop_iteration", False)]
    states = [getattr(loader, "next_iter_state", None) for loader in loaders]
    yielded = [None if is_finished(state) else _yielded(state) for state in states]  # a finished one starts anew
    for loader in restarting:
        loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        for loader in restarting:
            loader.restart_on_stop_iteration = True
        for loader, count in zip(loaders, yielded, strict=True):
            iterator: Any = getattr(loader, "_iterator", None)
            if count is not None and hasattr(iterator, "_num_yielded"):
                iterator._num_yielded = count  # torchdata's iterator counts batches that it reads again twice
            if getattr(loader, "next_iter_state", None) is not None:
                loader.next_iter_state = None  # else torchdata's loader, if it has ended, would resume from it again


def _yielded(state: dict[str, Any] | None) -> int | None:
    """Return how many batches were read before a state of torchdata's `StatefulDataLoader` was saved."""
    if state is None:
        return None
    if "_snapshot" in state:
        return int(state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"])
    return state.get("_num_yielded")


def is_finished(state: Any) -> bool:
    """Whether a state of torchdata's `StatefulDataLoader` was saved at the end: the loader then starts anew from it."""
    return isinstance(state, dict) and bool(state.get("_iterator_finished"))


def epochs_of(loaders: Sequence[Any]) -> list[Any]:
    """Return, by loader, the epoch of a dataset that applies a loaded state in all iterators of that epoch, or `None`.

    Hugging Face `datasets` streams do this.
    """
    datasets = [getattr(loader, "dataset", None) for loader in loaders]
    bound = [is_stateful(each) and callable(getattr(each, "set_epoch", None)) for each in datasets]
    return [getattr(each, "epoch", None) if is_bound else None for each, is_bound in zip(datasets, bound, strict=True)]


def begin_anew(loaders: Sequence[Any], epochs: Sequence[Any]) -> None:
    """Prepare for the first epoch after one that was resumed from states saved in `epochs`.

    Raises:
        UnsupportedError: A dataset would start at its loaded state again.
    """
    for loader, saved, now in zip(loaders, epochs, epochs_of(loaders), strict=False):
        if _is_litdata(loader):
            # LitData notices an epoch's end only when read past it, which does not happen to a loader with a length.
            loader.restore = False
        # The state of a dataset's copy in a worker ends with the worker.
        in_worker = getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "persistent_workers", False)
        if now is None or now != saved or in_worker:
            continue
        if _is_hugging_face(loader) and not loader.num_workers:
            forget_states([loader])
        else:
            raise UnsupportedError(
                f"The {type(loader.dataset).__name__} of a train dataloader was resumed in the middle of an epoch,"
                f" and would start there again in the next epoch, because its epoch is still {now}. Call the"
                " dataset's `set_epoch(epoch)` before each epoch (in Lightning, in `on_train_start` and"
                " `on_train_epoch_start`), or resume from the end of an epoch."
            )


def shuffle_of(loader: Any) -> int | None:
    """Return a checksum of a Hugging Face `datasets` stream's shuffling; `None` if the stream is not shuffled."""
    generators = [generator for part in _stream_parts(loader) if (generator := getattr(part, "generator", None))]
    return crc32(repr([each.bit_generator.state for each in generators]).encode()) if generators else None


def check_order(loader: Any, stateful: bool, parts: Sequence[tuple[str, Any]]) -> None:
    """Raise if a loop's order cannot be reproduced.

    Args:
        loader: The loader.
        stateful: Whether the loader resumes from its own state.
        parts: The loader's parts from which an order may be drawn, by name.

    Raises:
        UnsupportedError: The order cannot be reproduced.
    """
    if isinstance(loader, SideBySide):
        if loader.problem:
            raise UnsupportedError(loader.problem)
        for number, each in enumerate(loader.loaders):
            prefix = f"loader.{number}"
            own = [(f"loader{name.removeprefix(prefix)}", thing) for name, thing in parts if name.startswith(prefix)]
            check_order(each, has_place(each) or stateful, own)
        return
    name = type(loader).__name__
    if getattr(loader, "in_order", True) is False and getattr(loader, "num_workers", 0) > 0:
        raise UnsupportedError(
            f"The position in a {name} with in_order=False is unknown, because PyTorch does not record which samples"
            " it has yielded. Use in_order=True."
        )
    if not stateful and isinstance(loader, Iterator):
        raise UnsupportedError(
            f"The position in a {name} is unknown: it is an iterator, which can be read only once and hides the source"
            " of its order. Loop over an object that has the loaders as attributes and an `__iter__` that reads them."
        )
    in_worker = getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0) > 0
    draws = [part for part, thing in parts if part.startswith("loader.dataset") and not hasattr(thing, "set_epoch")]
    if in_worker and draws and not stateful and isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            f"The position in a {name} with persistent workers is unknown: the stream's order is drawn from"
            f" {draws[0]}, and each worker's copy of it continues from epoch to epoch. Use persistent_workers=False,"
            " or derive the order from the epoch in the dataset's `set_epoch`."
        )


def seed_of(part: Any) -> int | str | None:
    """Return the seed of a part of a loader, if it has one.

    Raises:
        UnsupportedError: The part shuffles with a seed from the clock.
    """
    held = getattr(part, "__dict__", {})
    if type(part).__module__.partition(".")[0] == "webdataset":
        if "pipeline" in held:
            return None  # its stages have the seeds
        if getattr(held.get("f"), "__name__", "") == "_shuffle":
            if held["kw"].get("seed") is None and held["kw"].get("rng") is None:
                raise UnsupportedError(
                    "The position in a WebDataset that shuffles without a seed is unknown: the clock seeds its"
                    " shuffling. Pass the same seed in each job: `.shuffle(size, seed=...)`, or `WebDataset(...,"
                    " shardshuffle=..., seed=...)`."
                )
            held = held["kw"]
    seed = held.get("seed")
    return seed if type(seed) in (int, str) else None


def forget_states(loaders: Sequence[Any]) -> None:
    """Make datasets that apply a loaded state in all iterators of an epoch start anew in further iterators.

    Call this when the iterators that resume from the state have started. Copies in workers have their own states.
    """
    for loader in filter(_is_hugging_face, loaders):
        loader.dataset.load_state_dict({})


def _is_hugging_face(loader: Any) -> bool:
    dataset = getattr(loader, "dataset", None)
    return type(dataset).__module__.partition(".")[0] == "datasets" and is_stateful(dataset)


def _is_litdata(loader: Any) -> bool:
    return type(loader).__module__.partition(".")[0] == "litdata"
