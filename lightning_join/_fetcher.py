"""A data fetcher that reads ahead."""

from collections import deque
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_join._compat import DataFetcher, sized_len


class ReadAheadFetcher(DataFetcher):
    """Holds the next batches, so that this rank knows one step ahead that it comes to its end.

    The loader's iterator is made when the epoch's steps begin, and not where Lightning asks for it:
    that is twice in an epoch that reloads its dataloaders, so that what was read first is lost, and
    before the sampler is told the epoch when training is resumed.

    Args:
        alone: Whether this is the only rank. Then nobody needs to know, and a loader that has a length
            is read as Lightning does: when a step begins.

    Attributes:
        batches: The batches that have been read and not been used.
        exhausted: Whether the loader's end is known.
        claimed: What the loader had said its length was, if it ended before that.
    """

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self._alone = alone
        self.batches: deque[Any] = deque()
        self.exhausted = False
        self.claimed: int | None = None

    def __iter__(self) -> "ReadAheadFetcher":
        self.reset()
        return self

    def reset(self) -> None:
        self.fetched = 0
        self.batches.clear()
        self.exhausted = False
        self.claimed = None

    def start(self) -> int | None:
        """Make the epoch's iterator.

        Returns:
            The number of batches that the loader claims to have, limits included, if it says one.
        """
        self.iterator = iter(self.combined_loader)
        self.length = sized_len(self.combined_loader)
        return self.length

    def fill(self, ahead: int = 2) -> int | None:
        """Read until `ahead` batches are there or the loader ends.

        Returns:
            The number of this epoch's batches, if this call came to the end; else `None`.
        """
        if self.exhausted:
            return None
        if self._alone and self.length is not None:
            self.exhausted = True
            return max(self.length, self.fetched)
        while len(self.batches) < ahead:
            if self.length is not None and self.fetched >= self.length:
                break
            try:
                self.batches.append(self._read())
            except StopIteration:
                self.claimed = self.length
                break
        else:
            return None
        self.exhausted = True
        return self.fetched

    def take(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: There is none.
        """
        return self.batches.popleft() if self.batches else self._read()

    def _read(self) -> Any:
        batch, _, _ = super().__next__()
        while batch is None:
            # There is nothing to train on; a rank that made a step of it would be out of step.
            rank_zero_warn("A train dataloader yielded None. Such batches are left out.")
            self.fetched -= 1
            if self.length is not None:
                self.length -= 1
                if self.fetched >= self.length:
                    raise StopIteration
            batch, _, _ = super().__next__()
        return batch

    def drop(self) -> None:
        """Leave the rest of the epoch unread."""
        self.batches.clear()
        self.exhausted = True
