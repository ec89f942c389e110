"""An engine in a loop that a framework runs: there all ranks run epilogues, steps and checkpoints alike."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch_join.joinables._deepspeed.events import EngineEvents
from torch_join.joinables.part import Driver, Part


class LockstepEnginePart(Part):
    """A `DeepSpeedEngine` whose steps all ranks run.

    Attributes:
        events: What it announces and answers.
        before_epilogue: Called where autograd's part of a backward ends, before what all ranks do alike.
    """

    kinds: ClassVar[dict[str, Any]] = EngineEvents.kinds

    def __init__(self, driver: Driver, index: int, engine: Any) -> None:
        super().__init__(driver, index)
        self.events = EngineEvents(self, engine)
        self.before_epilogue: Callable[[], None] | None = None

    def enter(self) -> None:
        self.events.watch()
        self.events.replace(self.events.engine, "_backward_epilogue", self._epilogue)

    def _epilogue(self, original: Callable[[], None]) -> Callable[[], None]:
        def epilogue() -> None:
            self.events.say_present()
            if self.before_epilogue is not None:
                self.before_epilogue()
            original()

        return epilogue

    def answer(self, kind: str, payload: Any) -> None:
        self.events.answer(kind, payload)
