"""Batch progress that finds out on access whether a batch is the last: a rank may learn it late."""

import weakref
from typing import Any

from lightning_join._compat import BatchProgress
from torch_join.integration import Lockstep, setting


class JoinBatchProgress(BatchProgress):
    """Lightning's progress, but `is_last_batch` is determined on access, and waits for other ranks only then."""

    _join: weakref.ReferenceType[Lockstep] | None = None  # until it has answered

    def ask(self, join: Lockstep) -> None:
        """Take the current step's `is_last_batch` from `join`."""
        self.is_last_batch = False
        self._join = weakref.ref(join)

    @property
    def is_last_batch(self) -> bool:
        """Whether the current step is the last one of the epoch."""
        if self._join is not None:
            join = self._join()
            known = vars(self)["is_last_batch"] if join is None else join.is_last_step
            if join is not None and not join.has_met:  # during a wait
                return bool(known)
            self.is_last_batch = known
        return bool(vars(self)["is_last_batch"])

    @is_last_batch.setter
    def is_last_batch(self, value: bool) -> None:
        self._join = None
        vars(self)["is_last_batch"] = value

    # Saving a state never waits: a signal handler may save a checkpoint while another rank's message is missing. During
    # a step the state says that it is not the last one; after the step, the value is known.

    def state_dict(self) -> dict[str, Any]:
        with setting(self, _join=None):
            return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_join"}
