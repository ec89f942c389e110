"""Join for a model that FSDP shards, in a loop that a framework drives."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

from torch import nn
from torch.distributed.algorithms.join import Joinable

from torch_join._base.weighting import finite
from torch_join._compat import fsdp as _compat
from torch_join._lockstep.base import Lockstep
from torch_join._lockstep.step_driver import StepDriver
from torch_join._participants._sharded.following import Following
from torch_join._participants.participant import Driver, Participant


class LockstepShardedParticipant(Participant):
    """A model that holds what `fully_shard` or `FullyShardedDataParallel` has sharded."""

    kinds: ClassVar[dict[str, Any]] = Following.kinds

    def __init__(self, driver: Driver, index: int, model: nn.Module) -> None:
        super().__init__(driver, index)
        self.following = Following(self, model, lambda: None)

    def enter(self) -> None:
        self._undo += [self.following.watch(), _compat.clip_by_whole_norms()]

    def leave_tail(self) -> None:
        self.following.reach_joined_state()

    def mirror(self, kind: str, payload: Any) -> None:
        self.following.mirror(kind, payload)


class ShardedLockstepJoin(Lockstep):
    """A model that holds what `fully_shard` or `FullyShardedDataParallel` has sharded, in a loop in lockstep.

    A joined rank gathers, reduces and reshards what the active ranks do, twice in a step: in place of the forward,
    and inside of its loss's backward.

    Args:
        driver: See `Lockstep`.
        model: The model.
        joinables: See `Lockstep`.

    Raises:
        JoinTypeError: See `Lockstep`.
        UnsupportedError: The model cannot be followed.
    """

    _model: LockstepShardedParticipant

    def __init__(self, driver: StepDriver, model: nn.Module, joinables: Sequence[Joinable] = ()) -> None:
        make = partial(LockstepShardedParticipant, model=model)
        super().__init__(driver, make, joinables, [(model, None)])
        self.follows_backward = True
        self._device = next(model.parameters()).device
        self._module = model

    def _known(self) -> list[int]:
        return [number for place in self._model.following.places for number in place]

    def _compare(self, known: Sequence[list[int] | None], has_batch: bool) -> None:
        # By the order of its first iteration FSDP1 prefetches, and only the ranks that had a batch there know it.
        newest = max((each or [] for each in known), key=lambda each: each[1::2])
        if newest != self._known():
            self._model.following.places = list(zip(newest[::2], newest[1::2], strict=True))

    def backward(self, backward: Callable[[], None]) -> bool:
        with ExitStack() as stack:
            for unit in self._model.following.units if self.counts_nothing else ():
                stack.callback(unit.scale(float, lambda gradient, _: finite(gradient)))
            backward()
        return True
