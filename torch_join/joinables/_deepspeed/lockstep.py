"""An engine in a loop that a framework runs: there all ranks run epilogues, steps and checkpoints alike."""

from typing import Any, ClassVar

from torch_join.joinables._deepspeed.events import EngineEvents
from torch_join.joinables.part import Driver, Part


class LockstepEnginePart(Part):
    """A `DeepSpeedEngine` whose steps all ranks run.

    Attributes:
        events: What it announces and answers.
    """

    kinds: ClassVar[dict[str, Any]] = EngineEvents.kinds

    def __init__(self, driver: Driver, index: int, engine: Any) -> None:
        super().__init__(driver, index)
        self.events = EngineEvents(self, engine)

    def enter(self) -> None:
        self.events.watch()

    def answer(self, kind: str, payload: Any) -> None:
        self.events.answer(kind, payload)
