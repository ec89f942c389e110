"""Progress in an epoch, of which a rank may know later than Lightning sets it whether it comes to its end."""

import weakref
from typing import Any

from lightning_join._compat import BatchProgress
from torch_join.integration import Lockstep, setting


class JoinBatchProgress(BatchProgress):
    """Lightning's, which asks whether a batch is the last when somebody looks, and waits for other ranks only then."""

    _join: weakref.ReferenceType[Lockstep] | None = None  # until it has been asked

    def ask(self, join: Lockstep) -> None:
        """Have the current step's `is_last_batch` come from `join`."""
        self.is_last_batch = False
        self._join = weakref.ref(join)

    @property
    def is_last_batch(self) -> bool:
        """Whether the current step is the last one of the epoch."""
        if self._join is not None:
            join = self._join()
            known = vars(self)["is_last_batch"] if join is None else join.is_last_step
            if join is not None and not join.has_met:  # amid a wait
                return bool(known)
            self.is_last_batch = known
        return bool(vars(self)["is_last_batch"])

    @is_last_batch.setter
    def is_last_batch(self, value: bool) -> None:
        self._join = None
        vars(self)["is_last_batch"] = value

    # States never wait: the handler of a signal may save a checkpoint, while another rank has yet to say what this one
    # would wait for. Amid a step it is not known to be the last one; after it, it has been asked for.

    def state_dict(self) -> dict[str, Any]:
        with setting(self, _join=None):
            return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_join"}
