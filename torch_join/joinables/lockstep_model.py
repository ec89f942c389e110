"""A DDP model in a loop that a framework runs: its forward and backward are shadowed, and need no announcement."""

from typing import Any

from torch import Tensor

from torch_join._shadow.model import ModelShadow
from torch_join.joinables.part import Driver, Part


class LockstepModelPart(Part):
    """A `DistributedDataParallel` model whose steps all ranks run.

    That there is a forward, and a backward, each rank knows from the meeting before the step: these records are
    derived, see `StepDriver.derive`. An active rank whose forward comes to no loss answers its backward too.

    Attributes:
        shadow: What runs in place of the model's step.
    """

    def __init__(self, driver: Driver, index: int, shadow: ModelShadow) -> None:
        super().__init__(driver, index)
        self.shadow = shadow
        self._output: Tensor | None = None

    def answer(self, kind: str, payload: Any) -> None:
        if kind == "forward":
            self._output = self.shadow.forward()
        else:
            self.shadow.backward(payload)  # which runs it: it is the framework's, with its hooks

    def take_output(self) -> Tensor:
        """Return what the last forward has returned, a scalar zero, and keep nothing of its graph."""
        output, self._output = self._output, None
        assert output is not None
        return output
