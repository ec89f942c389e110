"""Reads a loader ahead, so that its end is known in time."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from torch_join._base.errors import JoinError, JoinValueError, UnsupportedError
from torch_join._base.membership import Membership
from torch_join._base.sampler import Dealt, dealt
from torch_join._base.weighting import Count, Window
from torch_join._control.channel import Channel
from torch_join._schedule.positions import EVERY, LoaderPlace, Position
from torch_join._schedule.rebalancing import Source
from torch_join._schedule.stateful import sampler_of
from torch_join._tail.refills import RefillGuard

T = TypeVar("T")
# Starts to rebalance a reader's batches; returns the reader of the batches to train on, or `None` to keep this reader.
Begin = Callable[["Reader[Any]"], "Reader[Any] | None"]
_MOST_PAUSE = 60.0  # seconds between two checks by a rank that waits for other ranks' loaders
# Samplers in these modules yield exactly `len(sampler)` indices.
_EXACT = (
    *("torch.utils.data.sampler", "torch.utils.data.distributed", "torch_join._base.sampler"),
    "torch_join._schedule.deals",
)


class Reader(Source, Generic[T]):
    """An iterator that can look ahead.

    Attributes:
        pulling: Whether the loader is producing its next batch.
        first: The number of batches taken before the loop was resumed.
        taken: The number of batches taken, including those before a resume.
        dealer: The name of the sampler that deals out one dataset to all ranks, and how to turn it off.
        dealt: The dataset that such a sampler deals out; `None` without one.
        lead: How many steps ahead another rank's batch must arrive.
        plan: The state of the rebalancing plan for a checkpoint; `None` without rebalancing.
        has_ended: Whether a loop with rebalanced batches is over.
    """

    dealer = (
        "A DistributedSampler",
        ("Remove it (with Ray: prepare_data_loader(loader, add_dist_sampler=False))"),
    )
    dealt: Dealt | None = None
    lead = 1
    pulling = _left = False
    plan: dict[str, Any] | None = None
    has_ended = False
    _reads_ahead = False  # whether this class reads further batches while the last one is in use

    def __init__(self, loader: Iterable[T], place: LoaderPlace | None = None, after: bool = False) -> None:
        self._loader = loader
        sampler = sampler_of(loader)
        if isinstance(sampler, DistributedSampler) and dist.is_initialized():
            self.dealt = dealt(sampler.dataset) if sampler.num_replicas == dist.get_world_size() else None
        self._position = Position(loader, place, EVERY * self._reads_ahead, after)
        self._iterator: Iterator[T] = self._position.iterator
        self.taken = self.first = self._position.first
        self._ahead: deque[T] = deque()
        self._ended = False
        self._reserved: deque[list[T]] = deque(maxlen=self.lead)  # batches for the coming steps
        self._guard: RefillGuard | None = None  # only if batches are read ahead

    def has_next(self, ahead: int = 1) -> bool:
        """Whether there are `ahead` more batches."""
        while len(self._ahead) < ahead and not self._ended:
            self.pulling = True
            try:
                self._ahead.append(self._read())
            except StopIteration:
                self._ended = True
            finally:
                self.pulling = False
        return len(self._ahead) >= ahead

    def _read(self) -> T:
        if self._position.keeps:
            self._position.keep(self.taken + len(self._ahead), self.trained_on)
        if self._guard is None:
            return next(self._iterator)
        return self._guard.read([*chain(*self._reserved), *self._ahead], lambda: next(self._iterator))

    @property
    def goes_on(self) -> bool:
        """Whether there is a batch after the last one taken."""
        return self.has_next()

    def take(self) -> T:
        """Return the next batch."""
        if not self._ahead:
            self.has_next()
        self.taken += 1
        return self._ahead.popleft()

    @property
    def trained_on(self) -> int:
        """The number of this rank's batches that some rank has trained on, including the current one."""
        return self.taken - sum(map(len, self._reserved))

    def place(self) -> LoaderPlace:
        """Return this rank's place in its loader; the current batch counts as trained on."""
        ended = not self._ahead and (self._ended or self.taken == self.certain_length())
        taken = self.trained_on
        if self.plan is not None:  # this rank trains until all ranks' batches are used up
            ended = self.has_ended and not self._left
        place = self._position.place(taken, self.taken + len(self._ahead), ended)
        return {**place, "left": self._left, "plan": self.plan}

    def drop(self) -> None:
        """Release the iterator, when the loop is over or was left."""
        self._iterator = self._position.iterator = iter(())

    def end(self) -> Callable[[], LoaderPlace]:
        """Release the iterator; return a function that returns this rank's place at the end of the loop."""
        position, taken = self._position, self.taken
        position.iterator = iter(())
        return lambda: {**position.place(taken, taken, True), "left": False, "plan": None}

    def certain_length(self) -> int | None:
        """Return the number of batches if it is certain, else `None`."""
        if (length := self._position.length) is not None:
            return length
        return len(self._loader) if is_length_certain(self._loader) else None  # type: ignore[arg-type]

    def rebalanced(self, begin: Begin) -> "Reader[Any]":
        """Start an epoch with rebalanced batches; all ranks meet.

        Returns:
            A reader of the batches that this rank trains on.

        Raises:
            UnsupportedError: The loader has a state, and a checkpoint of it would miss the batches sent to other ranks.
        """
        refuse_position(self._loader)
        self._guard = RefillGuard(self._loader, gives=True)
        return begin(self) or self

    def read(self, ahead: int) -> int:
        self.has_next(ahead)
        return len(self._ahead)

    def peek(self) -> T:
        return self._ahead[0]

    def reserve(self, count: int) -> list[T]:
        batches = [self.take() for _ in range(min(count, self.read(count)))]
        self._reserved.append(batches)
        return batches[:]

    def leave(self) -> None:
        """Note that the loop was left; a subclass also lets the loader reach its end, if no other batch can follow."""
        self._left = True

    @property
    def at_last(self) -> bool:
        """Whether the next batch is known to be the last one."""
        return self.taken + 1 == self._certain_length

    @cached_property
    def _certain_length(self) -> int | None:
        return self.certain_length()

    def count(self, count: Count) -> float:
        """Return the count of the next batch, which must exist; called once for each batch."""
        return count(self._ahead[0])


class windows(Generic[T]):  # noqa: N801  it is used like a function
    """Group batches into windows, each of which is one step: a list of batches whose gradients are accumulated.

    ```python
    for window in join.batches(windows(loader, 4)):
        n_window = sum(map(tokens, window))
        for batch in window:
            with nullcontext() if batch is window[-1] else model.no_sync():
                (loss_of(model, batch) * tokens(batch) / n_window).backward()
        optimizer.step()
    ```

    Weightings that count apply to the whole window: a function gets the list, and `"samples"` sums the batch sizes.
    Scale each batch's mean loss by its share of this rank's window, as above; the gradient is then the mean of all
    windows.

    It is a loader of lists, with a length if `loader` has one. It forwards other attributes to `loader`.

    Args:
        loader: The loader of the batches.
        size: The number of batches in a window; the last window may have fewer.

    Raises:
        JoinValueError: `size` is less than 1; or, in the loop, the loader reuses the memory of one batch for the next.
    """

    def __init__(self, loader: Iterable[T], size: int) -> None:
        if size < 1:
            raise JoinValueError(f"A window must have at least 1 batch, not {size}.")
        self.loader, self.size = loader, size

    def __iter__(self) -> Iterator[list[T]]:
        return self.over(iter(self.loader))

    def over(self, iterator: Iterator[T]) -> Iterator[list[T]]:
        """Yield the windows of the batches in an iterator over the loader."""
        guard = RefillGuard(self.loader, gives=False)
        window = Window()
        with suppress(StopIteration):
            while True:
                window.append(guard.read(window[:], lambda: next(iterator)))
                if len(window) == self.size:
                    yield window
                    window = Window()
        if window:
            yield window

    def __len__(self) -> int:
        return -(-len(self.loader) // self.size)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)


class Batches(Generic[T]):
    """The iterable, not an iterator, that `Join.batches` returns."""

    def __init__(self, go_through: Callable[[Iterable[T]], Iterator[T]], loader: Iterable[T]) -> None:
        self._go_through = go_through
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        return self._go_through(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


class Unbegun:
    """Loops whose iterators have not been asked for a batch yet, in order of creation."""

    def __init__(self) -> None:
        self._loops: dict[object, Callable[[], Iterator[Any]]] = {}

    def add(self, go_through: Callable[[], Iterator[Any]]) -> object:
        """Note that `go_through` has not started; return a ticket for it."""
        ticket = object()
        self._loops[ticket] = go_through
        return ticket

    def begin(self, ticket: object) -> bool:
        """Start this ticket's loop, after the earlier loops; return whether the ticket was valid."""
        if ticket not in self._loops:
            return False
        try:
            self.begin_all(until=ticket)
        finally:
            self._loops.pop(ticket, None)
        return True

    def begin_all(self, until: object = None) -> None:
        """Run the loops that user code never asked for a batch, since other ranks may be in them."""
        earlier = itertools.takewhile(lambda ticket: ticket is not until, [*self._loops])
        for go_through in [self._loops.pop(ticket) for ticket in earlier]:  # remove all first: one may raise
            for _ in go_through():
                pass


class LoaderWatch:
    """Checks, on a rank without a batch that waits for other ranks, whether another rank's loader waits for this one.

    A loader may be in a collective for a moment, so this raises only if two checks find it there in the same step.

    Args:
        channel: The channel between the ranks.
        members: Which ranks are active.
    """

    def __init__(self, channel: Channel, members: Membership) -> None:
        self._channel = channel
        self._members = members
        self._found: dict[int, int] = {}  # by rank whose loader is in a collective with this rank: the step
        self._asks_at, self._pause = 0.0, 1.0

    def check(self) -> None:
        """Ask the other ranks, at most once a second.

        Raises:
            JoinError: Another rank's loader waits for this rank.
        """
        if time.monotonic() < self._asks_at:
            return
        before, self._found = self._found, {}
        for rank, (_, status) in self._channel.health().answers.items():
            if status is not None and status.loader is not None and self._members.name in status.loader[1]:
                self._found[rank] = status.loader[0]
        for rank, step in self._found.items():
            if before.get(rank) == step:
                raise JoinError(
                    f"The loader of rank {self._members.global_ranks[rank]} called a torch.distributed collective to"
                    f" produce batch {step}, and waits for rank {self._members.name}, which has finished and will not"
                    " call it. Move it before the loop, or into the loop's body, where finished ranks follow it."
                )
        self._pause = 1.0 if self._found else min(2 * self._pause, _MOST_PAUSE)
        self._asks_at = time.monotonic() + self._pause


def _methods_beyond(kind: type) -> set[str]:
    """Return the methods, besides `__init__`, that a class and its bases below `DataLoader` define."""
    own = kind.__mro__[: kind.__mro__.index(DataLoader)]
    return {name for base in own for name, value in vars(base).items() if callable(value)} - {"__init__"}


def is_length_certain(loader: object) -> bool:
    """Whether a loader always has exactly `len(loader)` batches."""
    if type(loader) is windows:
        return is_length_certain(loader.loader)
    # `isinstance` alone is not enough: Accelerate's loaders only claim to be a `DataLoader`.
    if issubclass(type(loader), DataLoader) and isinstance(loader, DataLoader) and not _methods_beyond(type(loader)):
        return draws_exactly(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    return type(loader) in (list, tuple)


def draws_exactly(sampler: object) -> bool:
    """Whether a sampler, or the one in a batch sampler, yields exactly `len` indices, as torch's and ours do."""
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler).__module__ in _EXACT


def refuse_position(loader: object) -> None:
    """Raise for a loader with a state, since a checkpoint of it would miss the batches sent to other ranks.

    Raises:
        UnsupportedError: The loader has a state, or draws from an object that has one.
    """
    if _has_position(loader):
        raise UnsupportedError(
            f"rebalance=True reads ahead and sends batches to other ranks, but the {type(loader).__name__} (or an"
            " object that it reads from) has a state_dict(), whose checkpoints would miss these batches. Loop over a"
            " loader without a state_dict(); lightning_join's strategies save each rank's position."
        )


def _has_position(loader: Any, depth: int = 3) -> bool:
    """Whether `loader`, or an object that it draws from (a sampler, the iterable of a progress bar), has a state.

    Reading ahead moves its position, so a checkpoint written in the loop would leave out the batches not used yet.
    """
    if depth == 0 or isinstance(loader, (nn.Module, type)):  # a transform's state is not a position
        return False
    if callable(getattr(loader, "state_dict", None)):
        return True
    return any(_has_position(part, depth - 1) for part in getattr(loader, "__dict__", {}).values())
