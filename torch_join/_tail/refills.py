"""Loaders that refill the same memory for each batch, where batches are read ahead."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_join._base.errors import JoinValueError
from torch_join._base.raw import raw_bytes
from torch_join._base.specs import flaw

# If the memory of none of these is that of another, the loader makes each batch anew.
_LOOKS = 3
_SIMPLE = frozenset((bytes, bool, int, float, complex, str))  # made when asked for, they are alike and not the same


class RefillGuard:
    """Raises when reading a batch changes one that has been read before and not been used yet.

    Sharing memory is no mistake: each batch may hold one and the same mask. So the bytes decide. They are
    compared for the first batches of a loop, and later only where these share memory.

    Args:
        loader: Whose batches they are.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._name = type(loader).__name__
        # The batches of a list are there already.
        self._looks = 0 if isinstance(loader, (list, tuple)) else _LOOKS
        self._shares = False

    def look(self, waiting: Iterable[Any]) -> list[Any]:
        """Return what `waiting` batches hold, before another one is read."""
        if self._looks == 0 and not self._shares:
            return []
        return [_copy(_content(leaf)) for leaf in _leaves(list(waiting))]

    def check(self, waiting: Iterable[Any], held: list[Any], batch: Any) -> None:
        """Compare with what `look` has returned; `batch` has been read since.

        Raises:
            JoinValueError: The waiting batches have changed.
        """
        self._looks = max(0, self._looks - 1)
        if not held:
            return
        waiting = list(waiting)
        leaves = list(_leaves(waiting))
        if _have_changed(waiting, leaves, held):
            raise JoinValueError(
                f"The {self._name} refills the memory of one batch to make another, and Join reads two batches ahead"
                " of the loop where a loader has a length. Copy each batch in the loader (`.clone()`), or use"
                " Join(..., heartbeat=True), with which a batch is read when it is needed."
            )
        places = {_place(leaf) for leaf in leaves} - {0}
        self._shares = self._shares or any(_place(leaf) in places for leaf in _leaves(batch))


def _have_changed(waiting: list[Any], leaves: list[Any], held: list[Any]) -> bool:
    now = list(map(_content, leaves))
    if len(now) != len(held):
        return True
    if all(map(_are_same, now, held)):
        return False
    # What a batch makes when it is asked for may be another each time: that says nothing of the loader.
    again = map(_content, _leaves(waiting))
    return any(
        _are_same(*twice) and not _are_same(twice[0], was) for *twice, was in zip(now, again, held, strict=False)
    )


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        for part in batch:
            yield from _leaves(part)
    else:
        yield batch


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_nested and flaw(leaf) is None


def _is_array(leaf: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray)


def _content(leaf: Any) -> Any:
    """Return what tells whether `leaf` has changed: its bytes, or itself if these cannot be had."""
    return raw_bytes(leaf) if _is_tensor(leaf) else leaf.tobytes() if _is_array(leaf) else leaf


def _copy(content: Any) -> Any:
    return content.clone() if _is_tensor(content) else content


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and _is_tensor(one) and _is_tensor(other):
        return torch.equal(one, other)
    return type(one) in _SIMPLE and bool(one == other)


def _place(leaf: Any) -> int:
    """Return where `leaf` is in memory, 0 for nowhere."""
    if _is_tensor(leaf):
        return int(leaf.data_ptr())
    return int(leaf.__array_interface__["data"][0]) if _is_array(leaf) else 0
