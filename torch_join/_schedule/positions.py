"""Where a rank stands in a loader: what it has trained on, whatever was read ahead; and how to go on from there.

A loader with a state of its own is given that back. Of another one, as many batches are skipped as were trained on: by
indices where these come from a sampler, so that no sample is read, else by reading. That takes the same order, so the
generators that may draw it are set, while this is done, to what they were as the loop began.

The contract relied on: a `DataLoader` draws its base seed, and then asks its sampler for indices; a sampler draws from
torch's, numpy's or Python's generator, or from one that is an attribute of the loader or of something that it holds.
"""

import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from torch_join._base.errors import JoinValueError
from torch_join._schedule.stateful import (
    begin_anew,
    check_order,
    epochs_of,
    is_finished,
    is_stateful,
    keeps_place,
    resumed_at,
    seed_of,
    shuffle_of,
)

# What `Position.place` returns: of plain types and tensors, if the loader's own state is. Whether it is `over`, so that
# what comes next is another loop, is set by whoever knows it of all ranks.
LoaderPlace = dict[str, Any]
_DEPTH = 3  # of objects in objects
_MOST = 64  # objects in a container
_SIMPLE = frozenset((bool, bytes, float, int, str, type(None)))
_CONTAINERS = frozenset((dict, list, tuple))
_OTHERS = (nn.Module, type, Tensor, FunctionType, ModuleType)  # that hold no order
_NAMES = "give each a name: `join.batches(loader, name=...)`."
_EVERY = 64  # reads, from one state of a loader that is read ahead to the next


class Position:
    """Where this rank stands in one loop over a loader.

    Args:
        loader: What is gone through.
        place: Where to go on; by default at the begin.
        ahead: Whether batches are read before the one in hand is done with.
        after: Whether this is the next loop after one that has gone on at a place.

    Attributes:
        iterator: Of the batches that are left.
        first: How many were trained on before.
        keeps: Whether `keep` is to be called before each read.

    Raises:
        JoinValueError: The place is one in another loader.
    """

    def __init__(self, loader: Any, place: LoaderPlace | None = None, ahead: bool = False, after: bool = False) -> None:
        # Of `windows` the loader that these are made of, in windows of so many.
        self._windows: Any = loader if hasattr(type(loader), "over") else None
        self._size: int = 1 if self._windows is None else loader.size
        self._loader = loader = loader if self._windows is None else loader.loader
        self._stateful = keeps_place(loader)
        self.keeps = ahead and self._stateful
        # The last two, how many batches had been read before, and what its own generators were then.
        self._states: list[tuple[int, Any, Any]] = []
        self._at_end: LoaderPlace | None = None  # where it is, if nothing was left of it when it was resumed
        restored: list[Any] = [] if place is None else place.pop("restored", [])
        if place is None or place["over"]:
            self.first = 0
            if place is not None:
                if differs := self._differs(place):
                    warnings.warn(
                        f"The state was written after a loop over another loader than this {type(loader).__name__}"
                        f" ({differs}), whose order may be another one than without the interruption. Where an epoch"
                        f" has several loops, {_NAMES}",
                        stacklevel=2,
                    )
                self._end(place, restored)
            self._begun = _drawing(loader)
            iterator = _begin_again(loader) if after or place is not None else iter(loader)
        else:
            if differs := self._differs(place):
                raise JoinValueError(
                    f"The state was written in a loop over another loader than this {type(loader).__name__}"
                    f" ({differs}), in which its place would be another one. Resume the loop in which it was written"
                    f" first, with the same data and seeds. Where an epoch has several loops, {_NAMES}"
                )
            self.first, self._begun = place["taken"], place["begun"]
            iterator = self._resume(place)
        if place is not None:
            restored += [thing for _, thing in _parts(loader)]
        self.iterator: Iterator[Any] = iterator if self._windows is None else self._windows.over(iterator)

    def keep(self, read: int) -> None:
        """Keep the loader's state now and then, after so many reads: a place in it may be asked for after others."""
        if (read - self.first) % _EVERY == 0:
            try:
                state = deepcopy(self._loader.state_dict())
            except Exception as error:  # for whoever asks for a place
                state = error
            self._states = [*self._states[-1:], (read, state, _own(self._loader))]

    def place(self, taken: int, read: int, ended: bool) -> LoaderPlace:
        """Return where this rank stands: what can be given to another `Position`, in another process.

        Args:
            taken: How many batches have been trained on, since the loop began.
            read: How many have been read.
            ended: Whether there is none left.

        Raises:
            UnsupportedError: The order is drawn in a way that cannot be had again.
        """
        if self._at_end is not None:
            return self._at_end
        state, again, now = None, 0, _own(self._loader)
        if self._stateful and read > taken:
            read, state, now = next(found for found in reversed(self._states) if found[0] <= taken)
            again = taken - read
            if isinstance(state, Exception):
                raise state
        elif self._stateful:
            state = deepcopy(self._loader.state_dict())
        if not ended:
            check_order(self._loader, self._stateful, _parts(self._loader))
        return {
            "taken": taken,
            "ended": ended,
            "over": False,
            "loader": _describe(self._loader, self._size, ended),
            "begun": _saved(self._begun),
            "now": _saved(now),
            "epochs": epochs_of([self._loader]),
            "state": state,
            "again": again,  # how many batches to read after the state, and to leave out
        }

    def _differs(self, place: LoaderPlace) -> str:
        """Return in what the loader is another one than that of a place."""
        then, now = place["loader"], _describe(self._loader, self._size, place["ended"])
        other = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        return ", ".join(f"{name}: {then.get(name, 'unknown')} then, {now.get(name, 'unknown')} now" for name in other)

    def _resume(self, place: LoaderPlace) -> Iterator[Any]:
        loader, taken, state = self._loader, self.first * self._size, place["state"]
        if (state is not None) != self._stateful:
            raise JoinValueError(
                f"A loop is to go on {'with' if state is not None else 'without'} a state of this rank's loader, and"
                f" the {type(loader).__name__} {'takes none' if state is not None else 'needs one'}. Resume with a"
                " loader of the kind that there was when the state was written."
            )
        if state is not None and (place["ended"] or is_finished(state)):
            self._end(place, [])
            self._at_end = place
            return iter(())
        with _drawn_as(loader, place["begun"]):
            if state is None:
                return _skip(loader, taken, place["begun"]["reuses"])
            loader.load_state_dict(deepcopy(state))  # it may go on changing it
            with resumed_at([loader], place["epochs"], taken):
                iterator = iter(loader)
            _set_own(loader, place["now"])  # torchdata's draws no base seed here
            return _read_past(iterator, place["again"] * self._size)

    def _end(self, place: LoaderPlace, restored: Sequence[Any]) -> None:
        """Bring the loader to the end of an epoch, at which the place is: its next iterator is that of the next one.

        Args:
            place: The place.
            restored: Generators that it shares with loaders which have gone on, and may have drawn from them since.
        """
        loader = self._loader
        before, now = _own(loader), place["now"]
        # A dataset that applies its state in all iterators of an epoch would be at that end once more.
        if self._stateful and place["state"] is not None and place["epochs"] == [None]:
            with _drawn_as(loader, place["begun"]):
                loader.load_state_dict(deepcopy(place["state"]))
                if hasattr(loader, "next_iter_state"):
                    iter(loader)  # torchdata's begins anew at once
                else:
                    with resumed_at([loader], place["epochs"], place["taken"]):
                        _read_past(iter(loader), sys.maxsize)
        shared = {name for name, thing in _parts(loader) if any(thing is one for one in restored)}
        kept = {of: {name: state for name, state in before[of].items() if name in shared} for of in before}
        _set_own(loader, {of: {**now[of], **kept[of]} for of in kept})


def end_resumed(loader: Iterable[Any], place: LoaderPlace) -> None:
    """Prepare a loader for the first loop after one that has gone on at a place."""
    begin_anew([loader], place["epochs"])


# ------------------------------------------------------------ the loader


def _describe(loader: Any, size: int, ended: bool = False) -> dict[str, int | str]:
    """Return what must be the same for a number of windows of this size, or a state, to mean the same.

    Raises:
        UnsupportedError: Its order cannot be had again, and the loop has not ended.
    """
    found: dict[str, int | str] = {} if size == 1 else {"batches in a window": size}
    if isinstance(loader, (list, tuple)):
        found["batches"] = len(loader)
    if isinstance(getattr(loader, "batch_size", None), int):
        found["samples in a batch"] = loader.batch_size
    if isinstance(loader, DataLoader):
        is_stream = _is_stream(loader)
        if not is_stream and hasattr(loader.dataset, "__len__"):
            found["samples"] = len(loader.dataset)
        if is_stream or keeps_place(loader):
            found["workers"] = loader.num_workers
    if (shuffle := shuffle_of(loader)) is not None:
        found["the seed of its shuffle"] = shuffle
    for name, part in [] if keeps_place(loader) else _walk(loader)[1]:
        if (seed := None if ended else seed_of(part)) is not None:
            found[f"the seed of {name}"] = seed
    return found


def _skip(loader: Any, taken: int, reuses: bool) -> Iterator[Any]:
    """Return an iterator over the batches after the first ones, whose order is drawn here.

    Args:
        loader: The loader.
        taken: How many are left out.
        reuses: Whether its workers were those of the epoch before, so that it drew no base seed.
    """
    own: Any = type(loader)
    if not isinstance(loader, DataLoader) or own.__iter__ is not DataLoader.__iter__ or _is_stream(loader):
        return _read_past(iter(loader), taken)
    rest = _Rest(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, taken)
    loader = copy(loader)
    # `DataLoader.__setattr__` refuses these.
    vars(loader).update({"sampler" if loader.batch_sampler is None else "batch_sampler": rest, "_iterator": None})
    if reuses:
        rest.start()
        loader.generator = None
    iterator: Iterator[Any] = iter(loader)
    rest.start()
    return iterator


def _begin_again(loader: Any) -> Iterator[Any]:
    """Return an iterator over a loader's next epoch; new workers that stay draw no base seed, as the old ones did."""
    generator = getattr(loader, "generator", None)
    if generator is None or not _reuses(loader, now=False):
        return iter(loader)
    before = torch.default_generator.get_state()
    loader.generator = None
    try:
        return iter(loader)
    finally:
        loader.generator = generator
        torch.default_generator.set_state(before)


def _reuses(loader: Any, now: bool = True) -> bool:
    """Whether a loader's next epoch is read by the workers of the one before, `now` or where these were of this job."""
    stays = isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers > 0
    return stays and not is_stateful(loader) and (loader._iterator is not None) is now


def _read_past(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in islice(iterator, count):
        pass
    return iterator


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


class _Rest:
    """A sampler of what another one has left after its first indices, or batches of these."""

    def __init__(self, sampler: Iterable[Any], skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped
        self._first: list[Any] | None = None

    def start(self) -> None:
        """Draw the order."""
        if self._first is None:
            self._indices = islice(self._sampler, self._skipped, None)
            self._first = [*islice(self._indices, 1)]

    def __iter__(self) -> Iterator[Any]:
        self.start()
        yield from self._first or ()
        yield from self._indices

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._skipped)  # type: ignore[arg-type]


# ------------------------------------------------------------ what draws an order


def _drawing(loader: Any) -> dict[str, Any]:
    """Return the states of all that an order may be drawn from; numpy's as it gives it."""
    return {**_global(), **_own(loader), "reuses": _reuses(loader)}


def _global() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    return {"torch": torch.default_generator.get_state(), "python": random.getstate(), "numpy": of_numpy}


def _own(loader: Any) -> dict[str, Any]:
    """Return the states of the loader's own generators, and the epochs that its samplers are told."""
    own, told = {}, {}
    for name, thing in _parts(loader):
        if (state := _state_of(thing)) is None:
            told[name] = thing.epoch
        else:
            own[name] = state
    return {"own": own, "told": told}


def told_epochs(loader: Any, begun: dict[str, Any]) -> list[tuple[Any, int]]:
    """Return the samplers, and whatever else has an epoch, and which one that was as a loop began."""
    return [(thing, begun["told"][name]) for name, thing in _parts(loader) if name in begun["told"]]


@contextmanager
def _drawn_as(loader: Any, begun: dict[str, Any]) -> Iterator[None]:
    """Set within, for all that an order may be drawn from, what was returned by `_drawing`."""
    before = _global()
    for thing, epoch in told_epochs(loader, begun):
        if has_epoch(thing):
            thing.set_epoch(epoch)
    _set_own(loader, begun)
    _set_global(begun)
    try:
        yield
    finally:
        _set_global(before)


def _set_global(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"].cpu())
    random.setstate(_as_given(states["python"]))
    if states["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(_as_given(states["numpy"]))


def _set_own(loader: Any, states: dict[str, Any]) -> None:
    for name, thing in _parts(loader):
        if name in states["own"]:
            _set_state(thing, states["own"][name])
        elif name in states["told"] and not has_epoch(thing):
            thing.epoch = states["told"][name]  # which it counts itself


def _saved(begun: dict[str, Any]) -> dict[str, Any]:
    """Return what was drawn from in types that a checkpoint may have: tensors, of integers of 64 bits, for arrays."""

    def save(state: Any) -> Any:
        if isinstance(state, dict):
            return {name: save(part) for name, part in state.items()}
        if type(state) is tuple and len(state) < _MOST:
            return tuple(map(save, state))
        return torch.from_numpy(state.astype("int64")) if hasattr(state, "astype") else state

    return {name: save(state) for name, state in begun.items()}


def _as_given(state: Any) -> Any:
    """Return a generator's state as it takes it: what was an array may be numbers in a tuple."""
    if isinstance(state, dict):
        return {name: _as_given(part) for name, part in state.items()}
    if isinstance(state, (list, tuple)):
        return tuple(map(_as_given, state))
    # What was of 64 bits without a sign may be negative.
    return tuple(number % 2**64 for number in state.tolist()) if isinstance(state, Tensor) else state


def _parts(loader: Any) -> list[tuple[str, Any]]:
    """Return the generators, and what has an epoch, among what a loader holds, by name."""
    return _walk(loader)[0]


def _walk(loader: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return, by name, what `_parts` does, and all else that a loader holds."""
    found: list[tuple[str, Any]] = []
    others: list[tuple[str, Any]] = []
    level, seen = [("loader", loader)], {id(loader)}
    for _ in range(_DEPTH + 1):
        deeper: list[tuple[str, Any]] = []
        for name, thing in level:
            held = getattr(thing, "__dict__", {})
            if type(held.get("epoch")) is int or (hasattr(thing, "set_epoch") and has_epoch(thing)):
                found.append((name, thing))
            parts = [*held.items()]
            for key, part in parts:
                kind = type(part)
                if kind in _SIMPLE or id(part) in seen:
                    continue
                seen.add(id(part))
                if kind in _CONTAINERS:  # the stages of a pipeline, say
                    within = part.items() if kind is dict else enumerate(part)
                    parts += [(f"{key}.{place}", one) for place, one in within] if len(part) <= _MOST else []
                elif _state_of(part) is not None:
                    found.append((f"{name}.{key}", part))
                elif not isinstance(part, _OTHERS):
                    deeper.append((f"{name}.{key}", part))
        others += level
        level = deeper
    return found, others


def has_epoch(thing: Any) -> bool:
    """Whether something, such as a sampler, is told which epoch it is."""
    return callable(getattr(type(thing), "set_epoch", None)) and isinstance(getattr(thing, "epoch", None), int)


def _state_of(thing: Any) -> Any:
    """Return the state of a generator; `None` of anything else."""
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, random.Random):
        return None if isinstance(thing, random.SystemRandom) else thing.getstate()
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(thing, numpy.random.RandomState):
        return thing.get_state()
    return thing.bit_generator.state if isinstance(thing, numpy.random.Generator) else None


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(_as_given(state))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _as_given(state)
    else:
        generator.set_state(_as_given(state))
