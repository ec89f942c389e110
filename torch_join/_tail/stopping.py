"""A signal that asks the job to stop: noted where it comes, and told to all ranks where they ask for it."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, ClassVar

from torch_join._participants.participant import Participant

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """SIGTERM and SIGUSR1, which end a process otherwise, from `listen` on.

    Args:
        lasts: Whether that is for longer than a `with`.

    Attributes:
        received: Whether this rank has got one.
        agreed: Whether all ranks know that one has.
        asked: Whether all ranks know that they are to listen.
    """

    received = agreed = asked = False

    def __init__(self, lasts: bool = False) -> None:
        self.lasts = lasts
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Note signals from here on; only the main thread can. A handler of the user's is called as before."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if (before := signal.getsignal(number)) is not None:  # else it is none of Python's, as faulthandler's
                self._before[number] = before
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(before := self._before.get(number)):
            before(number, frame)

    def restore(self) -> None:
        """Leave signals to what they were left to before."""
        while self._before:
            signal.signal(*self._before.popitem())


class StopExchange(Participant):
    """Has all ranks know at the same step that one has got a signal; those that have joined are told."""

    kinds: ClassVar[dict[str, Any]] = {"listen": None, "stop": None}

    driver: Any  # a `LoopDriver`
    _place, _calls = "", 0

    def ask(self, place: str, ranks: Sequence[int]) -> bool:
        """Return whether one of these ranks has got a signal, or whether that is known; they all call this.

        Args:
            place: Where in the job that is: a meeting elsewhere is another one.
            ranks: Those that are active, or all.
        """
        signals: StopSignals = self.driver.signals
        if not signals.asked:
            self.announce("listen")  # a rank without a batch has not come here
        self._listen()
        if not signals.agreed:
            self._calls = self._calls + 1 if place == self._place else 0
            self._place = place
            name = f"stop/{place}/{self._calls}"
            if any(self.tail_log.channel.gather(signals.received, of=bool, among=(name, ranks))):
                self.announce("stop")
                signals.agreed = True
        return signals.agreed

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "listen":
            self._listen()
        else:
            self.driver.signals.agreed = True

    def _listen(self) -> None:
        self.driver.signals.asked = True
        self.driver.signals.listen()
