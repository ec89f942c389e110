"""Loaders that refill the same memory for each batch, where batches are read ahead."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_join._errors import JoinValueError
from torch_join._raw import raw_bytes

# If the memory of none of these is that of another, the loader makes each batch anew.
_LOOKS = 3


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

    def look(self, waiting: Iterable[Any]) -> list[tuple[Any, Any]]:
        """Return what `waiting` batches hold, before another one is read."""
        if self._looks == 0 and not self._shares:
            return []
        return [(leaf, _copy(leaf)) for leaf in _leaves(list(waiting))]

    def check(self, waiting: Iterable[Any], held: list[tuple[Any, Any]], batch: Any) -> None:
        """Compare with what `look` has returned; `batch` has been read since.

        Raises:
            JoinValueError: The waiting batches have changed.
        """
        self._looks = max(0, self._looks - 1)
        if not held:
            return
        leaves = list(_leaves(list(waiting)))
        if len(leaves) != len(held) or not all(map(_is_unchanged, leaves, held)):
            raise JoinValueError(
                f"The {self._name} refills the memory of one batch to make another, and Join reads two batches ahead"
                " of the loop where a loader has a length. Copy each batch in the loader (`.clone()`), or use"
                " Join(..., heartbeat=True), with which a batch is read when it is needed."
            )
        places = {_place(leaf) for leaf in leaves} - {0}
        self._shares = self._shares or any(_place(leaf) in places for leaf in _leaves(batch))


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        for part in batch:
            yield from _leaves(part)
    else:
        yield batch


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta


def _is_array(leaf: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray)


def _copy(leaf: Any) -> Any:
    return raw_bytes(leaf).clone() if _is_tensor(leaf) else leaf.tobytes() if _is_array(leaf) else None


def _is_unchanged(leaf: Any, held: tuple[Any, Any]) -> bool:
    before, copy = held
    if leaf is not before:
        return False
    if _is_tensor(leaf):
        return torch.equal(raw_bytes(leaf), copy)
    return not _is_array(leaf) or bool(leaf.tobytes() == copy)


def _place(leaf: Any) -> int:
    """Return where `leaf` is in memory, 0 for nowhere."""
    if _is_tensor(leaf):
        return int(leaf.data_ptr())
    return int(leaf.__array_interface__["data"][0]) if _is_array(leaf) else 0
