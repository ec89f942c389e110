"""A data fetcher that reads ahead."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_join import _compat
from lightning_join._compat import DataFetcher, PrefetchDataFetcher
from lightning_join._reading.loaders import Loaders, measure, total_length
from torch_join import UnsupportedError
from torch_join.integration import (
    Position,
    RefillGuard,
    begin_anew,
    epochs_of,
    forget_states,
    is_length_certain,
    resumed_at,
)

# Where a rank is in its dataloaders, in a checkpoint: `states` of those that have one, the `epochs` that datasets have
# of their own, `cycled` (which of several loaders have come to their end), the numbers of batches `taken` and of those
# left out (`skipped`), and whether the rest of the epoch is `left` unread. Of one without a state its `order` is there:
# what `Position` says of it, or why nobody could have it again.
Place = dict[str, Any]


class _Begun:
    """Stands for a dataloader whose iterator has been made."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def __reduce__(self) -> Any:
        return _Begun, (iter(()),)


class _RoundsFetcher(PrefetchDataFetcher):
    """Reads no batch that its round does not have, also where Lightning does not know; and, if planned, none ahead."""

    rounds: Any
    is_planned = False

    def __next__(self) -> Any:
        if self.rounds.over:
            raise StopIteration
        return self.batches.pop(0) if self.is_planned and self.batches else super().__next__()


def read_in_rounds(fetcher: Any, rounds: Any, is_planned: bool) -> bool:
    """Have a fetcher of an evaluation or a prediction go by its rounds, if it is one that reads batches.

    Args:
        fetcher: The fetcher.
        rounds: Its `Rounds`.
        is_planned: Whether limits alone count, since the lengths that they follow from are not known yet.
    """
    if type(fetcher) is not PrefetchDataFetcher:
        return False
    fetcher.__class__ = _RoundsFetcher
    vars(fetcher).update(rounds=rounds, is_planned=is_planned)
    if is_planned:
        fetcher.length, fetcher.done = None, fetcher.done and fetcher.length is None
    return True


class ReadAheadFetcher(DataFetcher):
    """Holds the next batches, so that this rank knows one step ahead that it comes to its end.

    The loader's iterator is made when the epoch's steps begin, and not where Lightning asks for it:
    that is twice in an epoch that reloads its dataloaders, so that what was read first is lost, and
    before the sampler is told the epoch when training is resumed.

    Attributes:
        limit: How many batches are used of an epoch's, or which share of them.
        said: What the dataloaders say of their numbers of batches, limits included.
        batches: The batches that have been read and not been used.
        exhausted: Whether the loader's end is known.
        claimed: What the loader had said its length was, if it ended before that.
        taken: How many batches of this epoch have been taken.
        left: Whether this rank has left the epoch, though there may be more batches.
        stateful: Whether some of the dataloaders have a state, or batches go to other ranks.
        rebalances: Whether batches may go to other ranks, so that steps and batches are not one to one.
        is_over: Whether the epoch has ended.
        next_step: Begins a step and returns its batch, which may be another rank's, or a stand-in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit: int | float = 1.0
        self.next_step: Callable[[ReadAheadFetcher], Any]
        self.said = Loaders([])
        self._has_read = False  # anything of this epoch
        self.stateful = self.rebalances = self._has_state = False
        self._resumed: list[Any] | None = None  # where this epoch has begun at a place: its `epochs`
        self._position: Position | None = None  # of a dataloader without a state
        self._goes_on = False  # whether it has gone on at a place
        self.is_over = False
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_position": None}  # whose iterator cannot be pickled

    def __next__(self) -> Any:
        """Return the next step's batch, with the numbers that Lightning's fetchers return and the fit does not use."""
        batch = self.next_step(self)
        self.done = False  # whether a step is the epoch's last one is not said by what has been read
        return batch, 0, 0

    def __iter__(self) -> "ReadAheadFetcher":
        self.reset()
        return self

    def reset(self) -> None:
        self.fetched = 0
        self.batches: deque[Any] = deque()
        self.exhausted = False
        self.claimed: int | None = None
        self.taken = self._skipped = 0
        self.left = False
        # By step that is planned: the states before its batches.
        self._reserved: deque[list[Place]] = deque()
        self._in_step = 0  # batches of the step that is run now
        self._planned: list[Any] = []  # batches of the step that was planned last
        self._guard: RefillGuard | None = None
        # The states before each read that a checkpoint does not know of yet: that of the batch which is trained on
        # now, those of the batches that were read ahead, that of a read which found the end.
        self._current: Place | None = None
        self._newest: Place | None = None
        self._begun_at: Place | None = None  # until something has been read
        self._before: deque[Place] = deque()

    def measure(self) -> Loaders:
        """Return, and note, what the dataloaders say now of their numbers of batches."""
        self.said = measure(RunningStage.TRAINING, self.combined_loader.flattened, self.limit)
        left = None if self._position is None or self.is_over else self._position.length
        if left is not None:  # the epoch goes on with what another number of ranks has left
            self.said = replace(self.said, limits=[left], lengths=[left], full=[None])
        return self.said

    def _take_length(self) -> None:
        """Take the number of this epoch's batches, limits included, from what the dataloaders say now, if they do.

        Asked for when the iterator has been made, since that is when some plan an epoch's batches, and once more when
        something has been read, since a generator begins then.
        """
        limits = self.measure().limits
        _compat.set_limits(self.combined_loader, limits)
        length = total_length(self.combined_loader, limits)
        if self.left:
            self.length = self.fetched
        else:
            self.length = None if length == float("inf") else int(length) - self._skipped

    def start(self, place: Place | None = None, over: Place | None = None) -> None:
        """Make the epoch's iterator.

        Args:
            place: Where to go on, if the epoch is resumed in the middle.
            over: Where the one before has come to its end, if that was in another job.

        Raises:
            StopIteration: The loader has come to its end before the place.
        """
        loader = self.combined_loader
        self._has_state = any(isinstance(part, _compat.Stateful) for part in loader.flattened)
        self.stateful = self.rebalances or self._has_state
        if self._resumed is not None:
            begin_anew(loader.flattened, self._resumed)
        self._resumed = None
        self._guard = RefillGuard(loader.flattened[0] if len(loader.flattened) == 1 else loader, gives=False)
        after, self._position = self._goes_on, None
        order = None if place is None else place.get("order")
        self._goes_on, self.is_over = order is not None, False
        if over is not None and isinstance(over.get("order"), dict):
            order = {**over["order"], "over": True}
        if len(loader.flattened) == 1 and not self._has_state and (place is None or order is not None):
            own = loader.flattened
            self._position = Position(own[0], order, after=after)
            loader.flattened = [_Begun(self._position.iterator)]
            try:
                self.iterator = iter(loader)
            finally:
                loader.flattened = own
        elif place is None:
            self.iterator = iter(loader)
        else:
            self._resumed, self._begun_at = place["epochs"], place
            loader._load_state_dicts(deepcopy(place["states"]))  # they may go on changing it
            with resumed_at(loader.flattened, place["epochs"], place["taken"]):
                self.iterator = iter(loader)
            if not place["taken"]:  # before its first batch, what a stream shows is its end in the epoch before
                forget_states(loader.flattened)
            _compat.act_at_ends(loader, forget_states)
        if self._has_state:
            _compat.watch_ends(loader)
        self.taken = self.fetched  # as Lightning counts them, where no place says so
        if place is not None:
            _compat.set_cycled(loader, place["cycled"])
            self.fetched = self.taken = place["taken"]
            self._skipped, self.left = place["skipped"], place["left"]
        self._take_length()
        self._has_read = False

    def place(self, repeats: bool = False) -> Place | None:
        """Return where training is in the dataloaders, whatever has been read ahead.

        Args:
            repeats: Whether the batch that was taken last is to be trained on when the epoch is resumed.

        Returns:
            A place to `start` from, if this epoch's iterator has been made, and the dataloaders have a state or there
            is only one.
        """
        if self.iterator is None:
            return None
        if self._position is not None:
            return self._place_in_order(self._position, self.taken - (self._in_step if repeats else 0))
        if not self.stateful:
            return None
        if repeats and self._current is not None:
            return {**self._current, "taken": self.taken - self._in_step, "left": False}
        reserved = [before for step in self._reserved for before in step]
        before = reserved[0] if reserved else self._before[0] if self._before else self._snapshot()
        return {**before, "taken": self.taken, "left": self.left}

    def _place_in_order(self, position: Position, taken: int) -> Place:
        order: Any = "it has yielded None"  # so that batches are not what it has read
        if not self._skipped:
            try:
                order = position.place(taken, self.fetched, self.exhausted and taken == self.fetched)
            except (UnsupportedError, NotImplementedError, TypeError) as error:  # a dataset without a length, too
                order = str(error)
        place = {"states": [], "epochs": [], "cycled": [], "skipped": 0, "taken": taken, "left": self.left}
        return {**place, "order": order}

    def end_at(self, place: Place) -> None:
        """Bring the dataloaders to the end of an epoch that was resumed when nothing of it was left.

        Their next iterator is then that of the epoch after it: a sampler's random generator goes on.
        """
        if not any(epoch is not None for epoch in place["epochs"]):  # else their next one is anyhow
            with suppress(StopIteration):  # it shows the new epoch already, which has fewer batches
                self.start(place)
                self.fill()
            self.reset()

    def _snapshot(self) -> Place:
        if self._begun_at is not None:
            # A loader of LitData that is asked for its state now forgets which it was given.
            known = {name: self._begun_at[name] for name in ("states", "epochs", "cycled")}
            self._newest = {**known, "skipped": self._skipped}
            return self._newest
        loader = self.combined_loader
        now = {"cycled": _compat.get_cycled(loader), "skipped": self._skipped}
        if self._newest is not None and not self._has_state:
            self._newest = {**self._newest, **now}
            return self._newest
        states = loader._state_dicts()
        if self._newest is not None and states:
            # A loader that has ended while others go on would begin anew, so its state stays what it was before that.
            ends = zip(_compat.ended_parts(loader), self._newest["states"], states, strict=True)
            states = [before if ended else state for ended, before, state in ends]
        # Copied, since a state may hold what the loader goes on changing.
        self._newest = {"states": deepcopy(states), "epochs": epochs_of(loader.flattened), **now}
        return self._newest

    def fill(self, ahead: int = 2) -> int | None:
        """Read until `ahead` batches are there or the loader ends.

        Returns:
            The number of this epoch's batches, if this call came to the end; else `None`.
        """
        if self.exhausted:
            return None
        while len(self.batches) < ahead:
            if self.length is not None and self.fetched >= self.length and not self._may_have_more:
                break
            try:
                self.batches.append(self._read())
            except StopIteration:
                self.claimed = self.length if self.length != self.fetched else None  # for a batch that was `None`
                break
        else:
            return None
        self.exhausted = True
        return self.fetched

    @property
    def _may_have_more(self) -> bool:
        """Whether the dataloaders may not have planned this epoch yet, so that their length is no end."""
        if self._has_read or self.left or (self.rebalances and self.fetched > 0):  # what a plan counts on is not moved
            return False
        return any(self.said.planned) and self.said.error is None

    def end_here(self) -> None:
        """Have nothing left of the epoch that has been started."""
        self.length, self._has_read = self.fetched, True

    def take(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: There is none.
        """
        batch = self.batches.popleft() if self.batches else self._read()
        self._current = self._before.popleft() if self._before else None
        self.taken += 1
        self._in_step = 1
        return batch

    @property
    def remaining(self) -> int | None:
        """How many batches have not been taken, as far as the loader says."""
        if self.exhausted:
            return len(self.batches)
        return None if self.length is None else max(0, int(self.length) - self.taken)

    @property
    def is_certain(self) -> bool:
        """Whether there can be no other number of batches than the loader says."""
        return all(map(is_length_certain, self.combined_loader.flattened))

    def give(self) -> None:
        """Note that from now on batches go to other ranks."""
        assert self._guard is not None
        self._guard.gives = True

    def read(self, ahead: int) -> int:
        self.fill(ahead)
        return len(self.batches)

    def peek(self) -> Any:
        return self.batches[0]

    def reserve(self, count: int) -> list[Any]:
        """See `Source`; `begin_step` takes them."""
        count = min(count, len(self.batches))
        self._reserved.append([self._before.popleft() for _ in range(count)])
        self._planned = [self.batches.popleft() for _ in range(count)]
        return self._planned[:]

    def begin_step(self) -> None:
        """Take the batches of the next step that has been planned: they count as used, whoever trains on them."""
        before = self._reserved.popleft()
        self._current = before[0] if before else None
        self._in_step = len(before)
        self.taken += self._in_step

    def _read(self) -> Any:
        if self._guard is None:
            return self._read_next()
        return self._guard.read([*self._planned, *self.batches], self._read_next)

    def _read_next(self) -> Any:
        if self.stateful:
            self._before.append(self._snapshot())
            self._begun_at = None
        try:
            batch, _, _ = super().__next__()
        finally:
            if not self._has_read:
                if self._resumed is not None:
                    forget_states(self.combined_loader.flattened)
                self._has_read = True
                self._take_length()
        if self.length is not None and self.fetched > self.length:  # read to find out
            self.fetched -= 1
            raise StopIteration
        while batch is None:
            # There is nothing to train on; a rank that made a step of it would be out of step.
            rank_zero_warn(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
                " Such a batch is left out."
            )
            self.fetched -= 1
            self._skipped += 1
            if self.length is not None:
                self.length -= 1
                if self.fetched >= self.length:
                    raise StopIteration
            batch, _, _ = super().__next__()
        return batch

    def drop(self) -> None:
        """Leave the rest of the epoch unread."""
        self.batches.clear()
        self._before.clear()  # what was read ahead is lost
        self.exhausted = self.left = True
