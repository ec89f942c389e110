"""Join for a DeepSpeed engine, in a loop that a framework drives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.distributed.algorithms.join import Joinable

from torch_join._base.attributes import setting
from torch_join._lockstep.base import Lockstep
from torch_join._lockstep.step_driver import StepDriver
from torch_join._participants._deepspeed.events import EngineParticipant


class LockstepEngineParticipant(EngineParticipant):
    """A `DeepSpeedEngine` whose steps all ranks run.

    Attributes:
        before_epilogue: Called at the end of autograd's part of a backward, before the part that all ranks run.
    """

    before_epilogue: Callable[[], None] | None = None

    def enter(self) -> None:
        super().enter()
        self.override(self.engine, "_backward_epilogue", self._epilogue)

    def _epilogue(self, original: Callable[[], None]) -> None:
        self.send_present()
        if self.before_epilogue is not None:
            self.before_epilogue()
        original()


class EngineLockstepJoin(Lockstep):
    """A `DeepSpeedEngine` in a lockstep loop.

    A joined rank replays the engine's events of a step with zero gradients, twice: in place of the forward, and inside
    its loss's backward. Then it runs the epilogue and `engine.step()` itself, like all ranks.

    Args:
        driver: See `Lockstep`.
        engine: The engine.
        joinables: See `Lockstep`.

    Raises:
        JoinTypeError: See `Lockstep`.
        UnsupportedError: See `EngineParticipant`.
    """

    _model: LockstepEngineParticipant

    def __init__(self, driver: StepDriver, engine: Any, joinables: Sequence[Joinable] = ()) -> None:
        module = self._module = engine.module
        make = partial(LockstepEngineParticipant, engine=engine)
        super().__init__(driver, make, joinables, [(module, None)])
        self.follows_backward = True
        self._device = next(module.parameters()).device
        self._engine = engine

    @property
    def _whole(self) -> Any:
        return self._engine

    def backward(self, backward: Callable[[], None]) -> bool:
        with self._model.leaving_out(self.counts_nothing):
            backward()
        return True

    @contextmanager
    def in_engine(self) -> Iterator[None]:
        # All ranks run the epilogue, which is inside the engine's backward.
        with ExitStack() as stack:
            stack.enter_context(super().in_engine())
            with setting(self._model, before_epilogue=stack.close):
                yield
