"""A signal that asks the job to stop: noted where it comes, and told to all ranks where they ask for it."""

import signal
import threading
from types import FrameType
from typing import Any, ClassVar

from torch_join._base.errors import JoinError
from torch_join._participants.participant import Participant
from torch_join._tail.batch_loop import Place

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """SIGTERM and SIGUSR1, which end a process otherwise, from `listen` on.

    Args:
        lasts: Whether that is for longer than a `with`.

    Attributes:
        received: Whether this rank has got one.
        agreed: Whether all ranks know that one has.
        in_loops: Whether ranks have asked for it in a loop: then what they ask behind one is what was found in it.
    """

    received = agreed = in_loops = False

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
    """Has all ranks know at the same step that one has got a signal, those too that have joined."""

    kinds: ClassVar[dict[str, Any]] = {"ask": str}
    driver: Any  # a `LoopDriver`
    _place, _calls = "", 0

    def ask(self, loop: int) -> bool:
        """Return whether some rank has got a signal, or whether that is known.

        Args:
            loop: The number of the loop under way, or of the last one.

        Raises:
            JoinError: The loop is a plain `for`.
        """
        if self.driver.place is Place.PLAIN:
            raise JoinError(
                "join.stop_requested() inside of a `with` whose loop is a plain `for`: a rank that has run out of"
                " batches is not known to have come to its end. Loop over join.batches(loader)."
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
