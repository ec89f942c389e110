"""Serving inside the steps of a loop that stays in lockstep."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from torch_join._base.weighting import Weighting
from torch_join._collectives.compat import in_backward
from torch_join._collectives.tap import CollectiveTap
from torch_join._control.channel import Channel, Status
from torch_join._tail.server import Server
from torch_join.joinables import Part

P = TypeVar("P", bound=Part)

_DONE = "done"


class StepServer(Server):
    """What active ranks do together in a step, and how a rank without a batch takes part in it.

    In a loop that a framework drives all ranks go through every step, and know who is active. So a
    joined rank serves one step at a time, until the active ranks say that it is done.

    Args:
        channel: The channel between the ranks.
        group: The process group.
        weighting: How the gradients of the active ranks are combined.
    """

    # What the parts ask of a `Join`: there is always a meeting before the step.
    _in_loop = _has_model = True
    _first_custom = None
    in_plain_loop = False

    def __init__(self, channel: Channel, group: Any = None, weighting: Weighting = "world") -> None:
        super().__init__(group or (dist.group.WORLD if dist.is_initialized() else None), [], weighting)
        self.channel = channel
        self._alike = 0
        self._open(channel)

    @property
    def _announces(self) -> bool:
        return len(self._active) < self._world_size

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks that have a batch, inside of a step that some rank does not have; otherwise `None`."""
        return self._active if (self._tail or self.serving) and not self._alike else None

    @property
    def in_tail(self) -> bool:
        """Whether this rank is active, in a step that another one does not have, and does what that one does not."""
        return super().in_tail and not self._alike

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Put around what joined ranks do too, of their own accord, in the midst of a step."""
        self._alike += 1
        try:
            with self._tap.ignoring():
                yield
        finally:
            self._alike -= 1

    def add(self, make: Callable[[Any, int], P]) -> P:
        """Add what takes part in steps besides collectives, and install it; `make` gets this object and an index."""
        part = make(self, len(self._parts))
        self._parts.append(part)
        part.enter()
        return part

    def close(self) -> None:
        """Remove all that was installed."""
        self._tap.remove()
        while self._parts:
            self._parts.pop().exit()
        self.group = None  # a destroyed group must hang up on its peers at once

    def before_forward(self, samples: int, waits: bool = True) -> None:
        """Nothing to do: the ranks have met."""

    def before_notice(self, part: Part) -> None:
        """Nothing to do: the ranks have met."""

    @contextmanager
    def step(self, active: tuple[int, ...], listens: bool = True) -> Iterator[None]:
        """Put around what an active rank does in a step; joined ranks take part in what it does with others.

        Args:
            active: The ranks that have a batch.
            listens: Whether joined ranks take part in collectives too, or in what the parts announce only.
        """
        self._begin(active)
        if len(active) == self._world_size:
            yield
            return
        if listens:
            self._agreement.compare(self.rank, active)
        self._tail = True
        if listens:
            self._tap.install()
        try:
            yield
            self.announce(-1, _DONE)
        finally:
            self._tail = False
            self._tap.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Put around an active rank's backward, after a step in the tail: collectives raise in it, but DDP's and ours.

        Joined ranks have no counterpart to them. Others, of hooks that run before or after it, all ranks issue alike.
        """
        self._tap = CollectiveTap(lambda _: None, lambda rank: in_backward() and self._has_joined(rank))
        self._tap.install()
        try:
            yield
        finally:
            self._tap.remove()
            self._tap = self._new_tap()

    def serve(self, active: tuple[int, ...]) -> None:
        """Take part, on a joined rank, in what the active ranks do in a step, until they are done with it."""
        self._begin(active)
        self.serving = True
        try:
            while True:
                index, kind, payload = self._follow()
                if kind == _DONE:
                    return
                self._answer(index, kind, payload)
        finally:
            self.serving = False

    def met(self) -> None:
        """All ranks have met since the last step: what was announced in it has been read."""
        if self.rank in self.joined_ranks:
            self._forget()

    def _status(self) -> Status:
        # Also in the backward that follows a step, where a collective that one rank alone has issued goes wrong.
        in_tail = self.rank in self._active and len(self._active) < self._world_size
        return Status([], self._agreement.word if in_tail else None)

    def _begin(self, active: tuple[int, ...]) -> None:
        before = self._active
        # Where a rank is active again, it has not heard what the others announced since.
        again = len(before) == self._world_size or not set(active) <= set(before)
        if len(active) < self._world_size and again:
            self._subgroups.find(before)
            self._agreement.begin()
        if self.rank in before and self.rank not in active:
            self._subgroups.mark(before)
        self._set_active(active)
