"""Signals that ask the job to stop: the rank that gets one notes it, and all ranks learn of it when they ask."""

import signal
import threading
from types import FrameType
from typing import Any, ClassVar

from torch_join._base.errors import JoinError
from torch_join._participants.participant import Participant
from torch_join._tail.batch_loop import Place

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notes SIGTERM and SIGUSR1, which by default end a process, after `listen` was called.

    Args:
        lasts: Whether to listen beyond the end of the `with`.

    Attributes:
        received: Whether this rank has got a signal.
        agreed: Whether all ranks know that some rank has got a signal.
        in_loops: Whether ranks have asked in a loop. If so, asking after the loop returns the answer found in it.
    """

    received = agreed = in_loops = False

    def __init__(self, lasts: bool = False) -> None:
        self.lasts = lasts
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Note signals from now on, in the main thread only; the user's own handlers are still called."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if (before := signal.getsignal(number)) is not None:  # else not a Python handler, such as faulthandler's
                self._before[number] = before
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(before := self._before.get(number)):
            before(number, frame)

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        while self._before:
            signal.signal(*self._before.popitem())


class StopExchange(Participant):
    """Informs all ranks, including joined ones, at the same step that some rank has got a signal."""

    kinds: ClassVar[dict[str, Any]] = {"ask": str}
    driver: Any  # a `LoopDriver`
    _place, _calls = "", 0

    def ask(self, loop: int) -> bool:
        """Return whether some rank has got a signal; exchanges nothing if this is already known.

        Args:
            loop: The number of the current or last loop.

        Raises:
            JoinError: The loop is a plain `for`.
        """
        if self.driver.place is Place.PLAIN:
            raise JoinError(
                "join.stop_requested() inside a `with` whose loop is a plain `for`, where Join cannot know whether a"
                " rank has run out of batches. Loop over join.batches(loader)."
            )
        signals: StopSignals = self.driver.signals
        step = self.driver.step_number if self.driver.in_loop else None
        if signals.agreed or (step is None and signals.in_loops):
            return signals.agreed
        place = f"stop/{loop}/{step}"
        self._calls = self._calls + 1 if place == self._place else 0
        self._place = place
        name = f"{place}/{self._calls}"
        self.announce("ask", name)
        self._meet(name)
        signals.in_loops = step is not None
        return signals.agreed

    def mirror(self, kind: str, payload: str) -> None:
        self._meet(payload)
        self.driver.signals.in_loops = True

    def _meet(self, name: str) -> None:
        signals, everyone = self.driver.signals, range(self.members.world_size)
        signals.listen()
        said = self.tail_log.channel.gather(signals.received, of=bool, among=(name, everyone))
        signals.agreed = any(said)
