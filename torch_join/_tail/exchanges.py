"""Exchanges in which joined ranks take part: of all ranks' places in loaders, and of signals to stop the job."""

import signal
import threading
from functools import partial
from types import FrameType
from typing import Any, ClassVar, cast

from torch_join._base.attributes import setting
from torch_join._base.devices import on_device
from torch_join._base.errors import JoinDataWarning, JoinError, name_ranks
from torch_join._handover import objects as _objects
from torch_join._participants.participant import Participant
from torch_join._schedule.positions import LoaderPlace
from torch_join._tail.batch_loop import Place
from torch_join._tail.tail_log import TailLog

_PLACE = "place"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class PositionExchange(Participant):
    """Gathers every rank's place in its loader; joined ranks take part when the exchange is announced."""

    kinds: ClassVar[dict[str, Any]] = {_PLACE: int}
    driver: Any  # a `LoopDriver`

    def gather(self, name: str, which: int) -> list[LoaderPlace | None]:
        """Return every rank's place, by rank; all active ranks call this at the same step.

        Args:
            name: The call, for errors.
            which: The loader's number.

        Raises:
            JoinError: Some active rank continues without this call, or this rank holds accumulated gradients.
            JoinTypeError: The state of this rank's loader cannot be pickled.
        """
        tail_log, members, channel = cast(TailLog, self.tail_log), self.members, self.tail_log.channel
        if self.driver.place in (Place.LOOP, Place.LEFT, Place.FINISHING):
            self._check_window(name)
        step = self.driver.step_number if self.driver.in_loop else -1
        tail_log.asked += 1
        if members.world_size == 1:
            return [self.driver.find_place(which)]
        with setting(channel, suspect=partial(self._check_absence, name, set())):
            steps = channel.gather(step, of=int, among=(f"{_PLACE}/{tail_log.asked}", members.active))
        if len({*steps}) > 1:
            names = ", ".join(
                f"rank {rank}: {at}" for rank, at in zip(members.named(members.active), steps, strict=True)
            )
            raise JoinError(
                f"{name} was called at different steps ({names}). Call it on all active ranks at the same step."
            )
        place = self.driver.find_place(which)  # may raise, so it comes before the announcement
        self.announce(_PLACE, which)
        return self._exchange(place)

    def _check_window(self, name: str) -> None:
        if (mid_window := self.driver.is_mid_window()) is False:
            return
        text = (
            f"{name} was called at step {self.driver.step_number} of a loop, within an accumulation window: rank"
            f" {self.members.name} holds gradients that its optimizer has not used yet. Because states hold no"
            " gradients, a resumed run would lose these batches. Save after the optimizer's step or zero_grad()."
        )
        if mid_window:
            raise JoinError(text)
        JoinDataWarning.warn(f"If the optimizer has already used this rank's gradients, ignore this warning. {text}")

    def mirror(self, kind: str, payload: Any) -> None:
        cast(TailLog, self.tail_log).asked += 1
        self._exchange(self.driver.find_place(payload))

    def _exchange(self, place: LoaderPlace | None) -> list[LoaderPlace | None]:
        with self.tail_log.own_collectives(), on_device(self.members.group):
            return _objects.gather(place, "The state of a loader", self.members.group)

    def _check_absence(self, name: str, before: set[int]) -> None:
        """Check, while this rank waits for the other ranks' places, whether one of them continued without the call.

        Args:
            name: The call, for errors.
            before: The ranks that seemed to have continued at the last check; this function updates it.

        Raises:
            JoinError: Some ranks seem to have continued at two checks in a row.
        """
        answers, asked = self.tail_log.channel.health().answers, cast(TailLog, self.tail_log).asked
        _, own_status = answers.get(self.members.rank, (False, None))
        gone = set()
        for rank in self.members.active:
            waits, status = answers.get(rank, (False, None))
            if status is None or own_status is None or status.asked >= asked:
                continue
            ahead = any(other[0] > own[0] for other, own in zip(status.models, own_status.models, strict=False))
            if waits or ahead:
                gone.add(rank)
        if confirmed := gone & before:
            raise JoinError(
                f"{name} was called on rank {self.members.name}, but {name_ranks(self.members.named(confirmed))}"
                " continued without the call. Call it on all active ranks at the same step, and write the file on one"
                " of them (`state = join.state_dict()`, then `if rank == min(join.active_ranks): torch.save(...)`)."
            )
        before.clear()
        before |= gone


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
        signals, ranks = self.driver.signals, range(self.members.world_size)
        signals.listen()
        answers = self.tail_log.channel.gather(signals.received, of=bool, among=(name, ranks))
        signals.agreed = any(answers)
