"""Join for a model that FSDP shards, in a loop that a framework drives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from torch_join._base.hyperparameters import group_options, hyperparameters, take_group_options
from torch_join._base.weighting import finite
from torch_join._compat import fsdp as _compat
from torch_join._lockstep.base import Lockstep
from torch_join._lockstep.step_driver import StepDriver
from torch_join._participants._sharded.contents import check_state, state_of
from torch_join._participants._sharded.following import FollowingParticipant
from torch_join._participants._sharded.sharded_step import Options
from torch_join._participants.clears import innermost_optimizer


class LockstepShardedParticipant(FollowingParticipant):
    """A model with parts that `fully_shard` or `FullyShardedDataParallel` has sharded."""

    kinds: ClassVar[dict[str, Any]] = {**FollowingParticipant.kinds, "options": list[Options]}
    optimizers: Sequence[Any] = ()

    def enter(self) -> None:
        super().enter()
        self._undo.append(_compat.clip_by_whole_norms())

    @contextmanager
    def telling_changes(self) -> Iterator[None]:
        """Wrap an active rank's step, and announce the hyperparameters that it sets to joined ranks.

        Raises:
            JoinError: The step has changed shards, or their state, which joined ranks own in part.
        """
        options, states = hyperparameters(self.optimizers), [*map(state_of, self.optimizers)]
        self.contents.remember()
        yield
        joined = self.members.joined_names
        self.contents.check_hooks(joined)
        self.contents.check(joined)
        self.contents.forget()
        for optimizer, before in zip(self.optimizers, states, strict=True):
            check_state(optimizer, before, joined)
        if hyperparameters(self.optimizers) != options:
            self.announce("options", [*map(group_options, self.optimizers)])

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "options":
            for optimizer, options in zip(self.optimizers, payload, strict=True):
                take_group_options(optimizer, options)
        else:
            super().mirror(kind, payload)


class ShardedLockstepJoin(Lockstep):
    """A model with parts that `fully_shard` or `FullyShardedDataParallel` has sharded, in a lockstep loop.

    A joined rank gathers, reduces and reshards the same units as the active ranks, twice in a step: in place of the
    forward, and inside its loss's backward.

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

    @contextmanager
    def active_step(self) -> Iterator[None]:
        self._model.optimizers = [each for each in map(innermost_optimizer, self._stepped) if each is not None]
        with super().active_step(), self._model.telling_changes() if self.in_tail else nullcontext():
            yield

    def shadow_forward(self) -> Tensor:
        self._model.optimizers = [each for each in map(innermost_optimizer, self._stepped) if each is not None]
        return super().shadow_forward()

    def _known(self) -> list[int]:
        return [number for place in self._model.places for number in place]

    def _compare(self, known: Sequence[list[int] | None], has_batch: bool) -> None:
        # FSDP1 prefetches in the order of its first iteration, which only ranks that had a batch there know.
        newest = max((each or [] for each in known), key=lambda each: each[1::2])
        if newest != self._known():
            self._model.places = list(zip(newest[::2], newest[1::2], strict=True))

    def backward(self, backward: Callable[[], None]) -> bool:
        with ExitStack() as stack:
            for unit in self._model.units if self.counts_nothing else ():
                stack.callback(unit.scale(float, lambda gradient, _: finite(gradient)))
            backward()
        return True
