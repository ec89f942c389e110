"""A training's position in its dataloader, in Trainer's checkpoints: each rank saves the source of its order.

Trainer resumes by number: it reads again the batches that were trained on, and skips them. That is correct if the order
depends only on the epoch's number. Otherwise the position includes the random states at the epoch's start and, for a
stream, the number of passes over it.

If a different number of ranks resumes, the loader yields the batches that the earlier ranks left. Trainer's counters
then look as if this job's ranks had made the steps of the finished share of the epoch.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from accelerate.data_loader import DataLoaderShard

from accelerate_join import _compat_transformers as _compat
from accelerate_join._loaders import dealer_of, drawn_from, known_as
from accelerate_join._positions import NO_MORE, dealt_among, read_all, rest_of, write
from accelerate_join.transformers._loader import EvenedLoader
from torch_join import UnsupportedError
from torch_join.integration import Order, ReadStep, gather_objects

_INSTEAD = "resume from a checkpoint written at the end of an epoch, or with ignore_data_skip=True"


class Resized(NamedTuple):
    """An epoch that this job resumes with other ranks or more data, counted as if it had made all of its steps."""

    epoch: int
    before: int  # the number of batches before the remaining ones
    batches: int  # the number of batches including the remaining ones
    updates: int  # the number of optimizer steps


class Position:
    """A rank's progress: the pass, and the number of batches in it.

    Args:
        trainer: The trainer.

    Attributes:
        passes: The number of earlier passes over the loader.
        passes_before: The number of passes before this job started; for a stream, Trainer does not count them.
        taken: The number of steps with a batch in this pass, on the longest rank.
        resized: The resumed epoch if its steps differ from those that Trainer counts, else `None`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._accelerator = trainer, trainer.accelerator
        self.passes = self.taken = self.passes_before = 0
        self.resized: Resized | None = None
        self._rest: DataLoaderShard | None = None  # this rank's rest of an epoch that other ranks started
        self._share = 0.0  # the finished share of the resumed epoch
        self._is_at_end = False  # whether the checkpoint was saved at an epoch's end, by Trainer's count at that time
        self._own, self._before = 0, 0  # this rank's trained batches: in this job, and before it in the same deal
        self._deals: list[dict[str, Any]] = []  # of earlier numbers of ranks in this pass
        self._loader: DataLoaderShard | None = None
        self._is_resized = False  # whether another number of ranks made some of the steps
        self._is_over = False  # whether the last step ended the pass
        self._order: Order | None = None
        self._pending: dict[str, Any] | None = None

    def begin(self, loader: DataLoaderShard, batches: Iterator[Any]) -> Iterator[Any]:
        """Start a pass and return its batches; a resumed pass keeps its order."""
        pending, self._pending = self._pending, None
        if pending is None and self._order is not None:
            self.passes, self.taken, self._deals = self.passes + 1, 0, []
        self._is_over, self._own = False, 0
        self._loader = known_as(loader, ())
        if pending is not None and pending["deals"]:
            return batches  # these are in the order of the rest
        self._before = 0 if pending is None else self.taken
        self._order = Order(drawn_from(loader), pending and pending["order"], f" Or {_INSTEAD}.")
        return self._order.go_through(batches)

    def note_step(self, step: ReadStep) -> None:
        """Record that a batch is trained on, here or on other ranks."""
        self.taken, self._own, self._is_over = self.taken + 1, step.taken, step.is_last_step

    def skip(self, loader: DataLoaderShard, number: int) -> Any:
        """Return this rank's rest of the resumed pass over a loader, if Trainer counts `number` batches in total."""
        rest, self._rest = self._rest, None  # of an epoch that other ranks started
        number = number if self._pending is None else self.taken
        return _compat.skip_first_batches(loader, number) if rest is None else rest

    def save(self, folder: str) -> None:
        """Write the position into a checkpoint's folder."""
        trainer, accelerator = self._trainer, self._accelerator
        if self._order is None or self._loader is None:
            return
        over, dealer = self._is_over, dealer_of(self._loader)
        place = {
            **NO_MORE,
            "iteration": self.passes + over,
            "order": self._order.place(over),
            "amid": not over,
            "steps": 0 if over else self.taken,
            "taken": 0 if over else self._before + self._own,
            "deals": [] if over else self._deals,
            "dealt": None if dealer is None else dealer.batch,
            "gives": trainer.rebalance,
            "epoch": trainer.state.epoch,
            "is_resized": self._is_resized,
        }
        record = {"when": None, "world_size": accelerator.num_processes, "places": [place]}
        write(folder, accelerator.process_index, record)

    def resume(self, folder: str, loader: EvenedLoader, values: Sequence[Any]) -> Sequence[Any]:
        """Resume at the position in a checkpoint; all ranks call this.

        Args:
            folder: The checkpoint's folder.
            loader: The training loader.
            values: The return value of `Trainer.set_initial_training_values`.

        Returns:
            `values`; or this job's values, if the epochs of the checkpoint had a different number of steps.

        Raises:
            UnsupportedError: The remaining samples cannot be determined.
        """
        args = self._trainer.args
        if not self._load(folder, loader.loader) or None in loader.lengths:
            return values
        (count, per_epoch, *between, steps), window = values, args.gradient_accumulation_steps
        done, batches, before = _compat.steps_in(folder), len(loader), self.taken
        has_made_all = self._rest is None and done == self.passes * per_epoch + before // window
        if has_made_all or not (self._is_resized or self._is_at_end):
            return values  # these ranks made all of its steps, in epochs of equal length
        _compat.check_resizes(self._trainer, self._is_resized)
        if self._rest is not None:
            left = max(gather_objects(len(self._rest.batch_sampler), "What is left", None))
            share = min(self._share, 1 - 1 / (1 + left))
            before = window * max(1, round(share / (1 - share) * left / window))
            batches = before + left
        share, updates = before / max(1, batches), -(-batches // window)
        self.resized = Resized(self.passes, before, batches, updates)
        left_updates, epochs = updates - before // window, args.num_train_epochs - self.passes
        if args.max_steps > 0:
            count = self.passes + 1 + math.ceil(max(0, steps - done - left_updates) / per_epoch)
        else:
            steps = done + math.ceil(min(1.0, max(0.0, epochs - share) / max(1e-9, 1 - share)) * left_updates)
            steps += math.ceil(max(0.0, epochs - 1) * per_epoch)
        return (count, per_epoch, *between, steps)

    def _load(self, folder: str, loader: DataLoaderShard) -> bool:
        """Load the position in a checkpoint; all ranks call this. Return whether there is one."""
        records = read_all(folder, self._accelerator)
        newest = next((record for record in records if record is not None), None)
        if newest is None:
            _compat.refuse_to_resize(folder, self._accelerator.num_processes)
            return False
        places = [None if record is None else _place_in(record) for record in records]
        rank, world = self._accelerator.process_index, len(places)
        place = places[rank] if rank < world else None
        if None in places and any(each is not None and each["deals"] for each in places):
            raise UnsupportedError(
                f"The checkpoint lacks join_position_<rank>.bin files for some of {world} ranks. All of them are"
                f" needed, because a different number of ranks started the epoch. Copy these files, or {_INSTEAD}."
            )
        if world != self._accelerator.num_processes:
            known: Any = next(each for each in places if each is not None)
            place = dealt_among([each or known for each in places], loader, None in places)
        if place is None:
            return False
        self._is_resized = place["is_resized"] or world != self._accelerator.num_processes
        self.passes = self.passes_before = place["iteration"]
        self._pending, self.taken, self._deals = place, place["steps"], place["deals"]
        if place["deals"]:
            self._order = Order(drawn_from(loader), place["order"], f" Or {_INSTEAD}.")
            self._before = place["taken"]
            self._rest = rest_of(self._accelerator, loader, self._order, place)
        if place["epoch"] is not None:
            self._share = place["epoch"] - self.passes
            self._is_at_end = self.passes > 0 and abs(self._share) < 1e-9
        return True


def _place_in(record: dict[str, Any]) -> dict[str, Any]:
    if "version" in record:
        return record["places"][0]  # type: ignore[no-any-return]
    # The format of 0.2.0, which the next release will not read.
    mid_epoch = bool(record["taken"]) or not record["order"]["ended"]
    known = {"iteration": record["passes"], "steps": record["taken"], "taken": record["taken"], "amid": mid_epoch}
    return {**NO_MORE, **known, "order": record["order"], "epoch": None, "is_resized": False}
