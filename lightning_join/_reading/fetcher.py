"""A data fetcher that reads ahead."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_join import _compat
from lightning_join._compat import CombinedLoader, DataFetcher, PrefetchDataFetcher
from lightning_join._reading.combined import Combined, place_keeper
from lightning_join._reading.loaders import Loaders, measure, total_length
from torch_join import JoinDataWarning, UnsupportedError
from torch_join.integration import LoaderPlace, Position, Reader, RefillGuard, Resuming, is_length_certain, setting


class _RoundsFetcher(PrefetchDataFetcher):
    """Reads no batch beyond its round, even if Lightning does not know that limit; if planned, it reads none ahead."""

    rounds: Any

    def __next__(self) -> Any:
        if self.rounds.over:
            raise StopIteration
        return self.batches.pop(0) if self.rounds.is_planned and self.batches else super().__next__()


def read_in_rounds(fetcher: Any, rounds: Any) -> bool:
    """Make the fetcher of an evaluation or a prediction follow its `Rounds`; return whether it reads batches at all."""
    if type(fetcher) is not PrefetchDataFetcher:
        return False
    fetcher.__class__ = _RoundsFetcher
    vars(fetcher)["rounds"] = rounds
    if rounds.is_planned:  # only the limits of the rounds count
        fetcher.length, fetcher.done = None, fetcher.done and fetcher.length is None
    return True


class ReadAheadFetcher(DataFetcher, Reader[Any]):
    """Reads ahead through Lightning's iterator, so that this rank knows one step ahead that its batches end.

    The loader's iterator is made when the epoch's steps start, and not when Lightning requests it. Lightning does so
    twice in an epoch that reloads its dataloaders, which would lose the first batches; and when training is resumed, it
    does so before it sets the sampler's epoch.

    Attributes:
        limit: The number of batches that are used in an epoch, or their share.
        said: The numbers of batches that the dataloaders report, limits included.
        claimed: The length that the loader had reported, if it ended before that.
        left: Whether this rank has left the epoch, though there may be more batches.
        rebalances: Whether batches may go to other ranks, so that steps and batches do not correspond.
        is_over: Whether the epoch has ended.
        resuming: Starts an epoch at the position where it resumes.
        keeper: The object that has a position: the only dataloader, or all of them as one.
        next_step: Starts a step and returns its batch, which may be another rank's, or a substitute.
    """

    def __init__(self, resuming: Resuming) -> None:
        super().__init__()
        self.limit: int | float = 1.0
        self.next_step: Callable[[ReadAheadFetcher], Any]
        self.reported = Loaders([])
        self._has_read = False  # whether it has read a batch of this epoch
        self.rebalances = False
        self.resuming = resuming
        self.keeper: Any = None
        self._position: Any = None  # a `Position`, once this epoch has started
        self._guard: RefillGuard  # from then on
        self.is_over = False
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_position": None}  # its iterator cannot be pickled

    def __next__(self) -> Any:
        """Return the next step's batch, with the numbers that Lightning's fetchers return and the fit does not use."""
        batch = self.next_step(self)
        self.done = False  # the batches read do not tell whether a step is the epoch's last one
        return batch, 0, 0

    def __iter__(self) -> "ReadAheadFetcher":
        self.reset()
        return self

    def reset(self) -> None:
        self.fetched = 0
        self._ahead, self._ended = deque[Any](), False
        self.claimed: int | None = None
        self.taken = self._skipped = 0
        self.left = False
        self._nones: list[int] = []  # for each batch that was `None`: how many others were read before
        self._reserved: deque[list[Any]] = deque()  # the batches of each planned step
        self._in_step = 0  # the number of batches of the current step

    def measure(self) -> Loaders:
        """Return, and store, the numbers of batches that the dataloaders report now."""
        self.reported = measure(RunningStage.TRAINING, self.combined_loader.flattened, self.limit)
        left = None if self._position is None or self.is_over else self._position.length
        if left is not None:  # the epoch continues with the batches that another number of ranks has left
            self.reported = replace(self.reported, limits=[left], lengths=[left], full=[None])
        return self.reported

    def _take_length(self) -> None:
        """Set this epoch's number of batches by the dataloaders' lengths, if they have any, limits included.

        This is called when the iterator has been made, since some dataloaders plan an epoch's batches then, and again
        when the first batch has been read, since a generator starts then.
        """
        limits = self.measure().limits
        _compat.set_limits(self.combined_loader, limits)
        length = total_length(self.combined_loader, limits)
        if self.left:
            self.length = self.fetched
        else:
            self.length = None if length == float("inf") else int(length) - self._skipped

    def setup(self, combined_loader: CombinedLoader) -> None:
        super().setup(combined_loader)
        self.keeper = place_keeper(combined_loader)

    def start(self) -> None:
        """Make the epoch's iterator, at the position where the epoch resumes, if it is resumed.

        Raises:
            StopIteration: The loader ended before the position.
        """
        loader, place = self.combined_loader, self.resuming.place
        self._guard = RefillGuard(loader if isinstance(self.keeper, Combined) else self.keeper, gives=False)
        self.is_over = False
        self._position = self.resuming.open(self.keeper, self._begin)
        self.taken = self.fetched  # Lightning's count, if no position has one
        if place is not None and not place["over"]:
            is_redealt = place["plan"] is not None  # the rest of the epoch was split among these ranks
            self._skipped = 0 if is_redealt else place["skipped"]
            self.taken = self.fetched = place["taken"] - self._skipped
            self.left = not is_redealt and place["has_left"]
        self._take_length()
        self._has_read = False

    def _begin(self, keeper: Any, place: LoaderPlace | None = None, after: bool = False) -> Position:
        position = Position(keeper, place, ahead=1, after=after, advice="")
        loader = self.combined_loader
        if keeper is loader.flattened[0]:
            with setting(loader, flattened=[_compat.Watched(position.iterator)]):
                self.iterator = iter(loader)
        else:
            self.iterator = position.iterator
        return position

    def place(self, repeats: bool = False) -> LoaderPlace | None:  # type: ignore[override]
        """Return the position of training in the dataloaders, without the batches read ahead.

        Args:
            repeats: Whether the last taken batch is to be trained on when the epoch is resumed.

        Returns:
            A position to resume from, if this epoch's iterator has been made. It also contains how many batches the
            fetcher has `skipped`, and whether this rank `has_left`; or why the position is `refused`.
        """
        if self._position is None:
            return None
        read, repeated = self._read_so_far, self._in_step if repeats else 0
        trained = self.trained_on - repeated
        taken = self._before(trained) if repeated else self._next
        extra = {"skipped": taken - trained, "has_left": self.left and not repeated, "plan": None, "left": False}
        try:
            return {**self._position.place(taken, read, self._ended and taken == read), **extra}
        except UnsupportedError as error:
            return {"refused": str(error)}

    @property
    def _read_so_far(self) -> int:
        return self.fetched + self._skipped

    def _before(self, number: int) -> int:
        """Return how many reads preceded this batch of the epoch, including batches that were `None`."""
        return number + self._skipped - sum(before >= number for before in self._nones)

    @property
    def _next(self) -> int:
        """The number of reads before the first batch that is not trained on yet."""
        return self._before(self.trained_on) if any(self._reserved) or self._ahead else self._read_so_far

    def fill(self, ahead: int = 2) -> int | None:
        """Read until `ahead` batches are in memory or the loader ends.

        Returns:
            The number of this epoch's batches, if this call reached the end; else `None`.
        """
        return None if self._ended or self.has_next(ahead) else self.fetched

    @property
    def _may_have_more(self) -> bool:
        """Whether the dataloaders may not have planned this epoch yet, so that their length is not final."""
        if self._has_read or self.left or (self.rebalances and self.fetched > 0):  # a plan relies on these numbers
            return False
        return any(self.reported.planned) and self.reported.error is None

    def end_here(self) -> None:
        """End the epoch that has just been started, before its next batch."""
        self.length, self._has_read = self.fetched, True

    @property
    def has_more(self) -> bool:
        """Whether there may be another batch."""
        return bool(self._ahead) or not self._ended

    @property
    def remaining(self) -> int | None:
        """The number of batches that have not been taken, according to the loader."""
        if self._ended:
            return len(self._ahead)
        return None if self.length is None else max(0, int(self.length) - self.taken)

    @property
    def is_certain(self) -> bool:
        """Whether the number of batches can only be the one that the loader reports."""
        return all(map(is_length_certain, self.combined_loader.flattened))

    def give(self) -> None:
        """Record that from now on batches go to other ranks."""
        self._guard.gives = True

    def begin_step(self) -> None:
        """Use one batch, or those of the next planned step, on whichever rank they are trained on."""
        self._in_step = len(self._reserved.popleft()) if self._reserved else 1

    def _read(self) -> Any:
        if self.length is not None and self.fetched >= self.length and not self._may_have_more:
            raise StopIteration
        try:
            return self._guard.read([*chain(*self._reserved), *self._ahead], self._read_next)
        except StopIteration:
            self.claimed = self.length if self.length != self.fetched else None  # equal after a batch that was `None`
            raise

    def _read_next(self) -> Any:
        if self._position.keeps:
            oldest = self._before(self.trained_on - self._in_step) if self._in_step else self._next
            self._position.keep(self._read_so_far, oldest)
        try:
            batch, _, _ = super().__next__()
        finally:
            if not self._has_read:
                self._has_read = True
                self._take_length()
        if self.length is not None and self.fetched > self.length:  # read to find the end
            self.fetched -= 1
            raise StopIteration
        while batch is None:
            # There is no batch to train on; a rank that made a step for it would be out of step.
            rank_zero_only(JoinDataWarning.warn)(
                "train_dataloader yielded None. If this was on purpose, ignore this warning... This batch is skipped."
            )
            self.fetched -= 1
            self._skipped += 1
            self._nones.append(self.fetched)
            if self.length is not None:
                self.length -= 1
                if self.fetched >= self.length:
                    raise StopIteration
            batch, _, _ = super().__next__()
        return batch

    def drop(self) -> None:
        """Leave the rest of the epoch unread."""
        self._ahead.clear()  # batches read ahead are lost
        self._ended = self.left = True
