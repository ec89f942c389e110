"""A loader that has as many steps on each rank as the longest rank has batches."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SkipBatchSampler
from accelerate.utils import send_to_device

from accelerate_join import _compat_transformers as _compat
from accelerate_join._compat import active_loader, without_none
from accelerate_join._loaders import PreparedReader
from torch_join import UnsupportedError
from torch_join.integration import EvenedLoader as CoreEvenedLoader
from torch_join.integration import length_of, without_rows


class EvenedLoader(CoreEvenedLoader):
    """A loader of Accelerate, evened with those of the other ranks, for a run of `train` or `evaluate`.

    Args:
        loader: This rank's loader.
        trainer: The trainer, whose `Run` iterates over it with the other ranks.
        trains: Whether its batches are trained on.

    Attributes:
        owns: Whether the dataset belongs to this rank only.
        all_examples: By rank, like `lengths`, the number of samples in its dataset.
        remainder: 0, since no sample occurs twice; Accelerate reads it.
    """

    framework = "Trainer"
    remainder = 0

    def __init__(self, loader: DataLoaderShard, trainer: Any, trains: bool) -> None:
        empty, keeps = partial(without_rows, other=lambda value: value), trainer.placeholder is not None
        super().__init__(loader, empty, trains, trains and trainer.rebalance, keeps)
        self.owns: bool = trainer.own_shards
        self._trainer = trainer
        self.all_examples: Sequence[int | None] = ()
        self.resumes_stream = False

    @property
    def own_examples(self) -> int | None:
        """The number of samples in this rank's dataset; `None` if it has no length."""
        return length_of(self.loader.dataset)

    @property
    def examples(self) -> int | None:
        """The number of samples in all ranks' datasets; `None` if unknown."""
        numbers = self.all_examples or [self.own_examples]
        if not self.owns:
            return numbers[0]
        return None if None in numbers else sum(number or 0 for number in numbers)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether no rank has another batch; Accelerate reads it."""
        return self.is_last_step

    def reader(self, counts: bool) -> PreparedReader:
        if self.rebalances and (type(self.loader.batch_sampler) is SkipBatchSampler or self.loader.skip_batches):
            raise UnsupportedError(
                "rebalance=True cannot resume in the middle of an epoch: the checkpoint does not record which batches"
                " were sent to other ranks. Resume at the start of an epoch, or use ignore_data_skip=True."
            )
        return PreparedReader(without_none(type(self.loader).__iter__), counts, False, self.loader)

    def around(self) -> AbstractContextManager[None]:
        return active_loader(self)  # Accelerate's own loader has started, so ours is registered after it

    def moved(self, batch: Any, device: torch.device | str) -> Any:
        return send_to_device(batch, device)

    def without_first(self, number: int) -> "EvenedLoader":
        """Return this loader without its first batches, even if a rank has fewer."""
        rest, run = copy(self), self._trainer._join_run
        rest.resumes_stream = self._has_no_length
        skip = _compat.skip_first_batches if run is None else run.position.skip
        rest.loader = skip(self.loader, number)
        rest.lengths = rest.all_examples = ()
        return rest

    def set_epoch(self, epoch: int) -> None:
        """Set the loader's epoch; after resuming, Trainer counts the passes over a stream from 0 again."""
        run = self._trainer._join_run
        self.loader.set_epoch(epoch if run is None or not self._has_no_length else epoch + run.position.passes_before)

    @property
    def _has_no_length(self) -> bool:
        return self.resumes_stream or None in self.lengths

    def own_batches(self) -> Iterator[Any]:
        """Return this rank's batches, independent of other ranks and of a running loop."""
        loader = copy(self.loader)
        loader.rng_types = None  # otherwise ranks would exchange random states
        return iter(loader)

    def __iter__(self) -> Iterator[Any]:
        run = self._trainer._join_run
        batches: Iterator[Any] = iter(self.loader) if run is None else run.go_through(self)
        return batches

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, while the object is created
            raise AttributeError(name)
        return getattr(self.loader, name)
