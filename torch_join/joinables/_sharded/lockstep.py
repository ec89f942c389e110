"""A sharded model in a loop that a framework runs: there all ranks clip and step alike, and nothing else is said."""

from typing import Any, ClassVar

from torch import nn

from torch_join._shadow._sharded import compat as _compat
from torch_join.joinables._sharded.following import Following
from torch_join.joinables.part import Driver, Part


def _nothing() -> None:
    pass


class LockstepShardedPart(Part):
    """A model that holds what `fully_shard` or `FullyShardedDataParallel` has sharded."""

    kinds: ClassVar[dict[str, Any]] = Following.kinds

    def __init__(self, driver: Driver, index: int, model: nn.Module) -> None:
        super().__init__(driver, index)
        self.following = Following(self, model, _nothing)

    def enter(self) -> None:
        self._undo += [self.following.watch(), _compat.clip_by_whole_norms()]

    def leave_tail(self) -> None:
        self.following.settle()

    def answer(self, kind: str, payload: Any) -> None:
        self.following.answer(kind, payload)
