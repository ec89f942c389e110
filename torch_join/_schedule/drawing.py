"""The random states from which a loop draws a loader's order: noted at the loop's start, saved, and restored.

These are the states of torch, numpy and Python generators, and of the loader's generators and objects with an epoch.
"""

import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from torch_join._schedule.stateful import SideBySide, has_place, is_stateful, sampler_of

_DEPTH = 3  # levels of nested objects
_MOST = 64  # objects in a container
_SAMPLERS = frozenset(("batch_sampler", "sampler", "_sampler"))  # names of attributes that are samplers
_OF_SAMPLERS = ("loader.batch_sampler.", "loader.sampler.")
_SIMPLE = frozenset((bool, bytes, float, int, str, type(None)))
_CONTAINERS = frozenset((dict, list, tuple))
_OTHERS = (nn.Module, type, Tensor, FunctionType, ModuleType)  # these do not determine an order


def drawing(loader: Any) -> dict[str, Any]:
    """Return the states of all sources of an order, in types that a checkpoint may hold."""
    return {**_global(), **own_drawing(loader), "reuses": reuses_workers(loader)}


def _global() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else tree_map_only(numpy.ndarray, _as_integers, numpy.random.get_state())
    return {"torch": torch.default_generator.get_state(), "python": random.getstate(), "numpy": of_numpy}


def own_drawing(loader: Any, parts: Sequence[tuple[str, Any]] | None = None) -> dict[str, Any]:
    """Return the states of the loader's own generators, and the epochs set on its samplers.

    Args:
        loader: The loader.
        parts: The result of `parts_of`, if known.
    """
    own, epochs = {}, {}
    for name, thing in parts_of(loader) if parts is None else parts:
        if (state := _state_of(thing)) is None:
            epochs[name] = thing.epoch
        else:
            own[name] = state
    return {"own": own, "told": epochs}


def told_epochs(loader: Any, states: dict[str, Any]) -> list[tuple[Any, int]]:
    """Return the samplers, and other objects with an epoch, with their epochs at the start of a loop."""
    return [(thing, states["told"][name]) for name, thing in parts_of(loader) if name in states["told"]]


@contextmanager
def drawn_as(loader: Any, states: dict[str, Any]) -> Iterator[None]:
    """Set all sources of an order to the states that `drawing` returned; on exit, restore the global generators."""
    with global_kept():
        for thing, epoch in told_epochs(loader, states):
            if has_epoch(thing):
                thing.set_epoch(epoch)
        set_drawing(loader, states)
        yield


def drawn_later(loader: Any, states: dict[str, Any]) -> set[str]:
    """Return the names of generators from which an order may still be drawn: their states equal those in `states`."""
    own = own_drawing(loader)["own"]
    return {
        name
        for name in own.keys() & states["own"].keys()
        if draws_order(name) and _are_same(own[name], states["own"][name])
    }


def keeps_place(loader: Any) -> bool:
    """Whether a loader continues at the same place after its state is loaded.

    torchdata's loader does not if a sampler without a state draws the order: it asks the sampler for the order more
    than once, and gets a new one each time. Its indices are then skipped, as in an ordinary `DataLoader`.
    """
    if not has_place(loader) or not hasattr(loader, "next_iter_state") or isinstance(loader.dataset, IterableDataset):
        return has_place(loader)
    sampler = sampler_of(loader)
    if is_stateful(loader.dataset) or is_stateful(sampler) or type(sampler).__module__.startswith("torchdata."):
        return True
    drawn = [name for name, thing in parts_of(loader) if _state_of(thing) is not None]
    return not (draws_globally(loader) or any(name.startswith(_OF_SAMPLERS) for name in drawn))


def loses_order(loader: Any) -> bool:
    """Whether torchdata resumes a loader in another order.

    A new iterator draws a base seed and then the sampler's order. One that resumes draws no base seed, so the order
    differs if both come from one generator.
    """
    sampler = sampler_of(loader)
    is_restored = has_epoch(sampler) or type(sampler).__module__.startswith("torchdata.")
    if is_restored or not hasattr(loader, "next_iter_state"):
        return False
    return getattr(sampler, "generator", sampler) is getattr(loader, "generator", None)


def draws_globally(loader: Any) -> bool:
    """Whether a loader's sampler draws from torch's default generator, as torch's samplers without a generator do."""
    sampler = sampler_of(loader)
    return getattr(sampler, "generator", sampler) is None


def draws_order(part: str) -> bool:
    """Whether a part of a loader may determine its order; parts of a dataset only change samples, on each rank."""
    return re.match(r"loader(\.\d+)?\.dataset", part) is None


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return bool(one == other)


def set_drawing(loader: Any, states: dict[str, Any]) -> None:
    """Set all sources of an order to the states that `drawing` returned, except epochs that have a `set_epoch`."""
    set_own(loader, states)
    set_global(states)


@contextmanager
def global_kept() -> Iterator[None]:
    """On exit, restore torch's, numpy's and Python's generators."""
    before = _global()
    try:
        yield
    finally:
        set_global(before)


def set_global(states: dict[str, Any]) -> None:
    """Set torch's, numpy's and Python's generators to the states that `drawing` returned."""
    torch.set_rng_state(states["torch"].cpu())
    random.setstate(_as_given(states["python"]))
    if states["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(_as_given(states["numpy"]))


def set_own(loader: Any, states: dict[str, Any]) -> None:
    for name, thing in parts_of(loader):
        if name in states["own"]:
            _set_state(thing, states["own"][name])
        elif name in states["told"] and not has_epoch(thing):
            thing.epoch = states["told"][name]  # this object counts its epochs itself


def reuses_workers(loader: Any, now: bool = True) -> bool:
    """Whether the workers of the last epoch read the next one: `now`, or only if that epoch had run in this process."""
    if isinstance(loader, SideBySide):
        return any(reuses_workers(each, now) for each in loader.loaders)
    is_persistent = isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers > 0
    return is_persistent and not is_stateful(loader) and (loader._iterator is not None) is now


def _as_integers(array: Any) -> Tensor:
    """Return an array of a numpy generator's state as a checkpoint may hold it: a tensor of 64-bit integers."""
    return torch.from_numpy(array.astype("int64"))


def _as_given(state: Any) -> Any:
    """Return a state in the form that the generator accepts: an array as a tuple of numbers."""
    if isinstance(state, dict):
        return {name: _as_given(part) for name, part in state.items()}
    if isinstance(state, (list, tuple)):
        return tuple(map(_as_given, state))
    # In the checkpoint's tensors, unsigned 64-bit numbers may be negative.
    return tuple(number % 2**64 for number in state.tolist()) if isinstance(state, Tensor) else state


def parts_of(loader: Any) -> list[tuple[str, Any]]:
    """Return the generators, and the objects with an epoch, in a loader, by name."""
    return walk(loader)[0]


def walk(loader: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the result of `parts_of`, and all other parts of a loader by name."""
    found: list[tuple[str, Any]] = []
    others: list[tuple[str, Any]] = []
    level, seen = [("loader", loader)], {id(loader)}
    if isinstance(loader, SideBySide):
        level = [(f"loader.{number}", each) for number, each in enumerate(loader.loaders)]
        seen.update(id(each) for each in loader.loaders)
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
                if kind in _CONTAINERS:  # the stages of a pipeline, for example
                    within = part.items() if kind is dict else enumerate(part)
                    parts += [(f"{key}.{place}", one) for place, one in within] if len(part) <= _MOST else []
                elif _state_of(part) is not None:
                    found.append((f"{name}.{key}", part))
                elif not isinstance(part, _OTHERS):
                    # Samplers stay at this level, however deeply frameworks wrap them in their own.
                    (level if key in _SAMPLERS else deeper).append((f"{name}.{key}", part))
        others += level
        level = deeper
    return found, others


def has_epoch(thing: Any) -> bool:
    """Whether an object, such as a sampler, has a `set_epoch`."""
    return callable(getattr(type(thing), "set_epoch", None)) and isinstance(getattr(thing, "epoch", None), int)


def _state_of(thing: Any) -> Any:
    """Return the state of a generator; `None` for anything else."""
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, random.Random):
        return None if isinstance(thing, random.SystemRandom) else thing.getstate()
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(thing, numpy.random.RandomState):
        return tree_map_only(numpy.ndarray, _as_integers, thing.get_state())
    if isinstance(thing, numpy.random.Generator):
        return tree_map_only(numpy.ndarray, _as_integers, thing.bit_generator.state)
    return None


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(_as_given(state))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _as_given(state)
    else:
        generator.set_state(_as_given(state))
