"""Join for a DeepSpeed engine, in a loop that a framework drives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.distributed.algorithms.join import Joinable

from torch_join._handover.buffers import StepBuffers
from torch_join._tail.lockstep import Lockstep
from torch_join._tail.steps import StepDriver
from torch_join.joinables._deepspeed.lockstep import LockstepEnginePart


class EngineLockstepJoin(Lockstep):
    """A `DeepSpeedEngine` in a loop in lockstep.

    A joined rank replays the engine's events of a step with zeros for gradients, twice: in place of the forward, and
    inside of its loss's backward. Then it runs the epilogue and `engine.step()` itself, like all.

    Args:
        driver: See `Lockstep`.
        engine: The engine.
        throw_on_early_termination: See `Lockstep`.
        joinables: See `Lockstep`.
        hand_over_buffers: See `UnsyncedBuffers`.
        **kwargs: Forwarded to every `join_hook`.

    Raises:
        JoinTypeError: See `Lockstep`.
        UnsupportedError: See `EngineEvents`.
    """

    def __init__(
        self,
        driver: StepDriver,
        engine: Any,
        *,
        throw_on_early_termination: bool = False,
        joinables: Sequence[Joinable] = (),
        hand_over_buffers: bool | None = None,
        **kwargs: Any,
    ) -> None:
        module = self._module = engine.module
        buffers = StepBuffers([(module, None)], driver.server.channel, driver.members.group, hand_over_buffers)
        make = partial(LockstepEnginePart, engine=engine)
        super().__init__(driver, make, throw_on_early_termination, joinables, kwargs, buffers)
        self.follows_backward = True
        self._device = next(module.parameters()).device

    @property
    def _part(self) -> LockstepEnginePart:
        assert isinstance(self._model, LockstepEnginePart)
        return self._model

    def backward(self, backward: Callable[[], None]) -> bool:
        with self._part.events.leaving_out(self.counts_nothing):
            backward()
        return True

    @contextmanager
    def in_engine(self) -> Iterator[None]:
        # The epilogue, inside of the engine's backward, is what all ranks run.
        with ExitStack() as stack:
            stack.enter_context(super().in_engine())
            self._part.before_epilogue = stack.close
            try:
                yield
            finally:
                self._part.before_epilogue = None
