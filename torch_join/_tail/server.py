"""What active ranks announce in the tail of a loop, and how a joined rank serves them."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from torch_join._base.errors import JoinError, JoinValueError
from torch_join._base.weighting import Weighting
from torch_join._collectives.neutral import mirror
from torch_join._collectives.subgroups import Subgroups
from torch_join._collectives.tap import Call, CollectiveTap
from torch_join._control.channel import Channel, Status
from torch_join._control.failures import telling_failures
from torch_join._handover.audit import Audit
from torch_join._tail.agreement import Agreement, explain_counts, explain_places
from torch_join._tail.ending import Ending
from torch_join._tail.records import COLLECTIVE, END, RECORD, TAIL, Said, check_record, has_met, is_record
from torch_join.joinables import Clears, Part, innermost_optimizer


class Server(Ending):
    """The tail of a loop, on an active rank and on one that has joined.

    Args:
        group: The process group.
        objects: Everything that was given to `Join`.
        weighting: How the gradients of the active ranks are combined.
    """

    def __init__(self, group: Any, objects: list[Any], weighting: Weighting) -> None:
        super().__init__(group, weighting)
        self._objects = objects
        self._parts: list[Part] = []
        self._audit = Audit()
        self._clears: list[Clears] = []
        self._open(Channel())
        self._tap = self._new_tap()

    def _reset(self) -> None:
        super()._reset()
        self._before = self._active  # at the step before
        self._said: list[Said] = []  # announced, and not yet written
        self._heard: deque[Said] = deque()  # read, and not yet answered
        self._last_joiner = True

    def _open(self, channel: Channel) -> None:
        self._channel = channel
        self._subgroups = Subgroups(channel, self._members, self.rank)
        self._agreement = Agreement(channel)
        # Weakly: a thread of the channel must not keep this object, and through it the group.
        status, explain = weakref.WeakMethod(self._status), weakref.WeakMethod(self._explain)
        channel.status = lambda: (method := status()) and method()
        channel.explain = lambda statuses: (method := explain()) and method(statuses)

    def _new_tap(self) -> CollectiveTap:
        return CollectiveTap(self._announce_collective, self._has_joined, self._check_backward)

    # ------------------------------------------------------------ what the parts see

    @property
    def clears(self) -> list[Clears]:
        """The calls of the `zero_grad` of given optimizers (of one that wraps another, of that one's) and models."""
        if not self._clears:
            found = {id(inner): inner for thing in self._objects if (inner := innermost_optimizer(thing)) is not None}
            models = [one for part in self._models() for one in (part.ddp, part.ddp.module)]
            self._clears = [Clears(one) for one in (*found.values(), *models)]
        return self._clears

    @property
    def in_tail(self) -> bool:
        """Whether this rank is active and another one has joined; a part asks when it is about to act."""
        self._arrive()
        return self._tail and not self.serving

    def announce(self, index: int, kind: str, payload: Any = None, hold: bool = False) -> None:
        """Tell the joined ranks, if there are any, what comes next.

        Args:
            index: The part that does it, -1 for none.
            kind: What it does.
            payload: What else they need to know.
            hold: Whether to tell them together with the next announcement.
        """
        if self.in_tail:
            self._agreement.note(index, kind, payload)
            self._said.append((index, kind, payload))
            if not hold:
                self._tell()

    def _tell(self) -> None:
        """Write what has been announced."""
        if self._said:
            self._subgroups.mark(self._active)
            self._channel.announce((self._said, self._active), leads=self.rank == self._leader)
            self._said = []

    def _follow(self) -> Said:
        """Wait for the next announcement."""
        if not self._heard:
            said, active = self._subgroups.follow(RECORD)
            check_record(said, active, len(self._parts), self._active)
            self._heard.extend(said)
            if active:
                self._set_active(active)
        return self._heard.popleft()

    @contextmanager
    def own_collectives(self) -> Iterator[None]:
        """Put around collectives that joined ranks know of without the tap."""
        with self._tap.ignoring():
            yield

    def run_hook(self, main_hook: Callable[[], None]) -> None:
        """Run a main hook; each collective that it issues stands for one that the active ranks announce."""
        self._tap.remove()
        self._tap = CollectiveTap(self._expect_collective, None)
        self._tap.install()
        try:
            main_hook()
        finally:
            self._tap.remove()
            self._tap = self._new_tap()

    def _set_active(self, active: tuple[int, ...]) -> None:
        if active != self._active:
            self._tell()  # as long as it is the same rank that writes
            if self.rank in self._active and self._announces and set(active) < set(self._active):
                self._agreement.part(self.rank, self._active, active)
        self._before, self._active = self._active, active
        if active:
            self._leader = active[0]

    @property
    def _announces(self) -> bool:
        """Whether this rank has announced something that others have followed."""
        return self._tail

    # ------------------------------------------------------------ the tail

    # What comes to be here (gradients, buckets, an optimizer's state) outlives a loop under inference_mode.
    @torch.inference_mode(False)
    def _begin_tail(self) -> None:
        self._tail = True
        self._audit.begin(self.joined_ranks, self._at_top, self._untouched)
        self._subgroups.find(self._before)
        self._agreement.begin()
        self.announce(-1, TAIL, [part.synced - part.silent for part in self._models()])
        for part in self._parts:
            part.enter_tail()
        self._tap.install()

    @torch.inference_mode(False)
    def _end_tail(self) -> None:
        """All ranks have joined; if some came earlier, give all of them the last one's state."""
        self._last_joiner = True
        if self._tail:
            words = [part.last_words() for part in self._parts]
            self._subgroups.mark(self._before)
            end = -1, END, (words, self._channel.position, self._leader)
            self._channel.announce(([end], ()), leads=self.rank == self._leader)
            self._channel.forget(delete=False)
            self._leave_tail()
            self._hand_over(words)
        else:
            self._end_even()
        self._active = tuple(range(self._world_size))

    def _leave_tail(self) -> None:
        if self._tail:
            self._tail = False
            self._tap.remove()
            for part in self._parts:
                part.leave_tail()

    def _arrive(self) -> None:
        """Meet the other ranks, if that has been put off until this rank does something in its step."""

    @torch.inference_mode(False)
    def _serve(self) -> None:
        """Do what the active ranks announce, with nothing, until they have joined too."""
        if not self._tail:
            self._audit.begin(self.joined_ranks, self._at_top, self._untouched)
        self._leave_tail()
        self._tap.remove()
        self._subgroups.find(self._before)
        self._subgroups.mark(self._before)
        self.serving = True
        try:
            while True:
                index, kind, payload = self._follow()
                if kind == END and is_record(kind, payload, END):
                    if self.rank != self.joined_ranks[0]:
                        self._channel.forget(delete=False)  # the lowest does, once all have read this one
                    self._set_active(())
                    break
                self._answer(index, kind, payload)
        finally:
            self.serving = False
        # It may be another one than in the last announcement: the others may have left without one since.
        words, position, self._leader = payload
        self._last_joiner = False
        self._channel.skip_to(position)
        self._hand_over(words)
        self._active = tuple(range(self._world_size))

    def _answer(self, index: int, kind: str, payload: Any) -> None:
        if index >= 0:
            self._parts[index].receive(kind, payload)
        elif is_record(kind, payload, COLLECTIVE):
            mirror(payload)
        elif is_record(kind, payload, TAIL):
            self._compare_counts(payload)
        if self._parts[index].has_met(kind) if index >= 0 else kind == COLLECTIVE and has_met(payload):
            self._forget()

    def _forget(self) -> None:
        """Delete the records up to one whose collective all joined ranks have come to, so that they have read it."""
        self._subgroups.forget()
        self._channel.forget(delete=self.rank == self.joined_ranks[0])

    def _announce_collective(self, call: Call) -> None:
        if self._subgroups.holds(call):
            self._subgroups.announce(call, self._active)
        else:
            self.announce(-1, COLLECTIVE, call)

    def _expect_collective(self, call: Call) -> None:
        if self._subgroups.holds(call):
            kind, payload = COLLECTIVE, self._subgroups.expect(call.group, self._active)
            if payload is None:
                return
        else:
            _, kind, payload = self._follow()
        if kind != COLLECTIVE or payload.operation != call.operation:
            found = payload.operation if kind == COLLECTIVE else kind
            raise JoinError(
                f"A main hook on rank {self.rank} issued {call.operation}, where the active ranks announced {found}."
                " A main hook must issue the collectives of its joinable's step, in the same order."
            )

    def _check_backward(self, group: list[int], is_ddps: bool) -> None:
        """Raise for a collective in backward that would be wrong or wait for ever; overridden in plain loops."""

    def _has_joined(self, rank: int) -> bool:
        self._arrive()
        return rank in self._members and self._members.index(rank) not in self._active

    # ------------------------------------------------------------ checks

    def _compare_lists(self) -> None:
        mine = [type(thing).__name__ for thing in self._objects]
        everyone = self._channel.gather(mine, of=list[str])
        if any(names != everyone[0] for names in everyone):
            given = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(everyone))
            raise JoinValueError(f"All ranks must give Join the same joinables in the same order, but gave {given}.")

    def _compare_counts(self, theirs: list[int]) -> None:
        if (mine := [part.synced for part in self._models()]) != theirs:
            raise JoinError(explain_counts({self.rank: mine, self._leader: theirs}))

    def _status(self) -> Status:
        word = self._agreement.word if self._tail else None
        return Status([[part.forwards, part.synced] for part in self._models()], word)

    def _telling(self) -> AbstractContextManager[None]:
        return telling_failures(self._channel)

    def _explain(self, statuses: dict[int, Any]) -> JoinError | None:
        """Say what a broken collective comes from, as far as the ranks' own words tell."""
        models = {rank: status.models for rank, status in statuses.items() if status}
        for mine in models.values():
            for theirs in models.values():
                # Not a matter of who is ahead: with no more forwards, more was synced.
                if any(a[0] <= b[0] and a[1] > b[1] for a, b in zip(mine, theirs, strict=False)):
                    synced = {rank: [synced for _, synced in counts] for rank, counts in models.items()}
                    return JoinError(explain_counts(synced))
        words = {rank: status.word for rank, status in statuses.items() if status and status.word}
        return JoinError(text) if (text := explain_places(words)) else None
