"""Reading a loader so that its end is known in time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from torch_join._base.errors import JoinValueError
from torch_join._tail.refills import RefillGuard

T = TypeVar("T")


class Reader(Generic[T]):
    """An iterator that can look ahead.

    Attributes:
        sight: How many batches before its end the loader's real length is known.
        pulling: Whether the loader is at work on its next batch.
        corrects: Whether a length that proves wrong can still be made good. It takes two batches of sight.
    """

    sight = 2
    corrects = True

    def __init__(self, loader: Iterable[T]) -> None:
        self._loader = loader
        self.pulling = False
        self._iterator = iter(loader)
        self._ahead: deque[T] = deque()
        self._ended = False
        self._guard = RefillGuard(loader)

    def has_next(self, ahead: int = 1) -> bool:
        """Whether there are `ahead` more batches."""
        while len(self._ahead) < ahead and not self._ended:
            held = self._guard.look(self._ahead)
            self.pulling = True
            try:
                batch = next(self._iterator)
                self._guard.check(self._ahead, held, batch)
                self._ahead.append(batch)
            except StopIteration:
                self._ended = True
            finally:
                self.pulling = False
        return len(self._ahead) >= ahead

    def take(self) -> T:
        """Return the next batch."""
        self.has_next()
        return self._ahead.popleft()

    def certain_length(self) -> int | None:
        """Return the number of batches if there is reason to trust it, and none against reading ahead."""
        loader = self._loader
        if _has_position(loader):
            return None
        if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
            return None  # DataLoader's is a guess there
        if not isinstance(loader, Sized):
            return None
        try:
            return len(loader)
        except (TypeError, NotImplementedError):
            return None

    def length_if_known(self, step: int) -> int | None:
        """Return the number of batches if no more than `sight` are left, having taken `step`."""
        return None if self.has_next(self.sight + 1) else step + len(self._ahead)

    @property
    def at_last(self) -> bool:
        """Whether the next batch is known to be the last one."""
        return False

    @property
    def samples(self) -> int:
        """Number of samples in the next batch, 0 without one."""
        return count_samples(self._ahead[0]) if self.has_next() else 0


class Batches(Generic[T]):
    """What `Join.batches` returns: to loop over, and no iterator."""

    def __init__(self, go_through: Callable[[Iterable[T]], Iterator[T]], loader: Iterable[T]) -> None:
        self._go_through = go_through
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        return self._go_through(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


def _has_position(loader: Any, depth: int = 3) -> bool:
    """Whether `loader`, or something that it draws from (a sampler, or what a progress bar goes through), can be saved.

    Reading ahead moves where it is: a checkpoint from within the loop would leave out what has not been used yet.
    """
    if depth == 0 or isinstance(loader, (nn.Module, type)):  # a transform's state is no position
        return False
    if callable(getattr(loader, "state_dict", None)):
        return True
    return any(_has_position(part, depth - 1) for part in getattr(loader, "__dict__", {}).values())


def count_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in `batch`.

    Raises:
        JoinValueError: There is none.
    """
    first = _first_tensor(batch)
    if first is None:
        raise JoinValueError(
            f"weighting='samples' takes a batch's size from the first dimension of its first tensor, and a batch of"
            f" type {type(batch).__name__} has none. Use another weighting, or put a tensor in the batch."
        )
    return len(first)


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch if batch.ndim > 0 else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
