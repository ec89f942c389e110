"""Where a training is in its dataloader, in Trainer's checkpoints: each rank writes what its order is drawn from.

Trainer goes on by number: it reads what was trained on once more, and leaves it out. That is right where the order
follows from the epoch's number. Elsewhere the random states of the epoch's begin belong to the place, and for a stream
how often it has been gone through.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import load as load_file

from accelerate_join._loaders import drawn_from
from torch_join import UnsupportedError
from torch_join.integration import Order

_INSTEAD = "resume from a checkpoint of an epoch's end, or with ignore_data_skip=True"


class Position:
    """How far a rank is: in which pass, and after how many batches of it.

    Attributes:
        passes: How often the loader has been gone through before.
        taken: How many batches of this pass have been trained on, on the longest rank.
    """

    def __init__(self) -> None:
        self.passes, self.taken = 0, 0
        self._passes_before = 0  # those that Trainer does not count, of a stream
        self._is_over = False  # whether that was the last one
        self._order: Order | None = None
        self._pending: dict[str, Any] | None = None

    def begin(self, loader: DataLoaderShard, batches: Iterator[Any]) -> Iterator[Any]:
        """Begin a pass; return its batches. One that is resumed is in the order that it had."""
        pending, self._pending = self._pending, None
        if pending is None and self._order is not None:
            self.passes, self.taken = self.passes + 1, 0
        self._is_over = False
        self._order = Order(drawn_from(loader), pending and pending["order"], f" Or {_INSTEAD}.")
        return self._order.go_through(batches)

    def pass_of(self, epoch: int) -> int:
        """Return the number of the pass that Trainer counts as this epoch."""
        return epoch + self._passes_before

    def note_step(self, is_last: bool) -> None:
        """Note that a batch is trained on, or is by others."""
        self.taken, self._is_over = self.taken + 1, is_last

    def to_skip(self, number: int) -> int:
        """Return how many batches are left out of the pass that is resumed, where Trainer counts `number` in all."""
        return number if self._pending is None else self.taken

    def save(self, folder: str, rank: int, world_size: int) -> None:
        """Write the place into a checkpoint."""
        if self._order is None:
            return
        over = self._is_over
        place = {
            "world_size": world_size,
            "passes": self.passes + over,
            "taken": 0 if over else self.taken,
            "order": self._order.place(over),
        }
        torch.save(place, _file(folder, rank))

    def load(self, folder: str, rank: int, world_size: int) -> None:
        """Go on at the place that is in a checkpoint, if there is one.

        Raises:
            UnsupportedError: Another number of ranks has written it amid an epoch.
        """
        if not (file := _file(folder, rank)).exists():
            return
        place = load_file(file, map_location="cpu")
        if place["world_size"] != world_size and place["taken"]:
            raise UnsupportedError(
                f"The checkpoint was written in the middle of an epoch by {place['world_size']} ranks, and this job has"
                f" {world_size}. Resume with {place['world_size']} ranks; or {_INSTEAD}."
            )
        self._pending, self.passes, self.taken = place, place["passes"], place["taken"]
        self._passes_before = self.passes


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"join_position_{rank}.bin"
