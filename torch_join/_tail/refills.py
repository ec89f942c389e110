"""Detects loaders that refill the same memory for each batch while batches are read ahead."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from torch_join._base.errors import JoinValueError
from torch_join._base.specs import flaw, raw_words

T = TypeVar("T")

# If none of this many batches shares memory with another, the loader allocates memory for each batch.
_CHECKS = 3
_SAMPLE = 64  # words of a tensor, or elements of an array
_DEPTH = 3  # levels of nested objects
_SIMPLE = frozenset((bytes, bool, int, float, complex, str))  # compared by value: each access may make a new object


class RefillGuard:
    """Raises when reading a batch changes an earlier batch that has not been used yet.

    Batches may share memory (a mask, for example), so the guard compares bytes: all bytes for a loop's first batches,
    and later too if these share memory. Otherwise, if batches go to other ranks, it compares a few bytes of the oldest
    batch: more batches are then read ahead, which may overrun a larger ring of buffers later.

    Args:
        loader: The loader of the batches.
        gives: Whether batches go to other ranks.
    """

    def __init__(self, loader: Iterable[Any], gives: bool) -> None:
        self._name = type(loader).__name__
        self._is_there = type(loader) in (list, tuple)
        self.gives = gives
        self._checks = _CHECKS
        self._shares = False
        self._places: deque[frozenset[int]] = deque()  # memory addresses of the batches read last

    def read(self, waiting: list[Any], read: Callable[[], T]) -> T:
        """Read a batch, and check that this does not change earlier batches.

        Args:
            waiting: The earlier batches that are not used yet, in order.
            read: Returns the next batch.

        Raises:
            JoinValueError: Reading has changed a batch in `waiting`.
        """
        if self._is_there:
            return read()
        compared = waiting if self._compares_all else waiting[:1] if self.gives else []  # the oldest is overrun first
        held = [_copy(self._content(leaf)) for leaf in _leaves(compared)]
        batch = read()
        if held and _have_changed(compared, held, self._content):
            raise self._error()
        self._checks = max(0, self._checks - 1)
        if not self._shares:
            while len(self._places) > len(waiting):
                self._places.popleft()
            places = _places(batch)
            self._shares = not all(map(places.isdisjoint, self._places))
            self._places.append(places)
        return batch

    @property
    def _compares_all(self) -> bool:
        return bool(self._checks) or self._shares

    def _content(self, leaf: Any, depth: int = _DEPTH) -> Any:
        """Return data that shows whether `leaf` has changed: some of its bytes, or `leaf` itself if it has none."""
        if depth and _is_array(leaf) and leaf.dtype.hasobject:  # its bytes are addresses, which may be reused
            return [self._content(part, depth - 1) for part in _leaves(leaf.reshape(-1).tolist(), depth - 1)]
        content = raw_words(leaf) if _is_tensor(leaf) else leaf.reshape(-1) if _is_array(leaf) else leaf
        if content is leaf:
            return leaf
        every = 1 if self._compares_all else max(1, len(content) // _SAMPLE)
        return content[::every] if isinstance(content, Tensor) else content[::every].tobytes()

    def _error(self) -> JoinValueError:
        return JoinValueError(
            f"The {self._name} reuses the memory of one batch for another, and "
            + ("rebalance=True reads batches ahead of the loop." if self.gives else "one is read ahead.")
            + " Copy each batch in the loader (`.clone()`)"
            + (", or train without rebalance=True." if self.gives else ".")
        )


def _have_changed(waiting: list[Any], held: list[Any], content: Callable[[Any], Any]) -> bool:
    now = [content(leaf) for leaf in _leaves(waiting)]
    if len(now) != len(held):
        return True
    if all(map(_are_same, now, held)):
        return False
    # A batch may compute a value at each access, with a new result every time: the loader has not changed it.
    current = [content(leaf) for leaf in _leaves(waiting)]
    return any(
        _are_same(*twice) and not _are_same(twice[0], was) for *twice, was in zip(now, current, held, strict=False)
    )


def _leaves(batch: Any, depth: int = _DEPTH) -> list[Any]:
    if isinstance(batch, Tensor) or type(batch) in _SIMPLE or _is_array(batch):
        return [batch]
    if not isinstance(batch, (tuple, list)):
        if not isinstance(batch, Mapping):
            return _inside(batch, depth) or [batch]
        batch = batch.values()
    return [leaf for part in batch for leaf in _leaves(part, depth)]


def _inside(thing: Any, depth: int) -> list[Any]:
    """Return the tensors and arrays inside an object of an unknown class."""
    if depth == 0 or isinstance(thing, (type, ModuleType, nn.Module, Dataset)):
        return []
    slots = [getattr(thing, name, None) for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ())]
    parts = [*slots, *getattr(thing, "__dict__", {}).values()]
    return [leaf for part in parts for leaf in _leaves(part, depth - 1) if _is_tensor(leaf) or _is_array(leaf)]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_nested and flaw(leaf) is None


def _is_array(leaf: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray)


def _copy(content: Any) -> Any:
    if isinstance(content, list):
        return [*map(_copy, content)]
    return content.clone() if _is_tensor(content) else content


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, Tensor) and _is_tensor(one) and _is_tensor(other):
        return torch.equal(one, other)
    return type(one) in _SIMPLE and bool(one == other)


def _places(batch: Any) -> frozenset[int]:
    return frozenset(map(_place, _leaves(batch))) - {0}


def _place(leaf: Any) -> int:
    """Return the memory address of `leaf`, or 0."""
    if isinstance(leaf, Tensor):
        try:
            return leaf.data_ptr()
        except (RuntimeError, ValueError):  # it has no memory, or not in one piece
            return 0
    return int(leaf.__array_interface__["data"][0]) if _is_array(leaf) else 0
