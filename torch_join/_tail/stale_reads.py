"""Warns if a state was read after a rank's last batch, but before it received the other ranks' later changes.

A rank that leaves a loop by `break`, or that keeps the loop's iterator, does not wait for the other ranks. A checkpoint
that it writes there has the state of this rank's last step. The warning comes when all ranks have met, since only then
does this rank know whether others continued.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torch_join._base.errors import JoinDriftWarning
from torch_join._participants.hook import Hook


class StaleReads:
    """Watches the `state_dict` calls of the models and optimizers passed to `Join`.

    Args:
        objects: Everything passed to `Join`.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._read: str | None = None
        self._undo: list[Callable[[], None]] = []

    def watch(self) -> None:
        """Start to watch; does nothing if already started."""
        if self._undo:
            return
        inner = [thing.module for thing in self._objects if isinstance(getattr(thing, "module", None), nn.Module)]
        for thing in [*self._objects, *inner]:
            if isinstance(thing, (nn.Module, Optimizer)):
                with suppress(AttributeError):  # a wrapper may not have run the `__init__` of its base
                    self._undo.append(thing.register_state_dict_pre_hook(Hook(self._note)).remove)

    def _note(self, thing: Any, *_: Any) -> None:
        self._read = self._read or type(thing).__name__

    def stop(self) -> None:
        """Stop watching, but remember all reads so far."""
        while self._undo:
            self._undo.pop()()

    def forget(self) -> None:
        """Stop watching, and forget all reads."""
        self.stop()
        self._read = None

    def warn(self, rank: int) -> None:
        """Warn about any read, and forget it; called if other ranks have continued without this one."""
        if self._read is not None:
            JoinDriftWarning.warn(
                f"Rank {rank} read the state of {self._read} after its last batch from join.batches but before the"
                " other ranks had finished, so a checkpoint of that state would be outdated. Read the state after a"
                " `for` over join.batches, or after the `with`. (Ignore this if you want that step's state.)"
            )
        self.forget()
