"""A backward of a DDP model that joined ranks follow piece by piece, since it issues other collectives too.

Just before DDP launches a bucket, the active ranks announce the parameters whose gradients have come since the last
announcement. Any other collective has its own record between these. A joined rank runs a backward of only these
parameters, in which its own reducer launches the same buckets, and takes part in the other collectives with zeros. So
all ranks issue all collectives in the order of the lowest active rank, over all communicators. The reducer can handle
several backwards: it finishes in the one that makes its last bucket ready. All active ranks must write the same number
of records, so each launch has a record, even without new gradients.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from torch_join._base.errors import UnsupportedError
from torch_join._collectives.backwards import late
from torch_join._compat import ddp as _compat
from torch_join._compat.operators import in_nested_backward
from torch_join._control.codec import foreign
from torch_join._participants.participant import Participant
from torch_join._shadow.model_shadow import ModelShadow

FIRED = "fired"


class Pieces:
    """The backwards of one model, on active and on joined ranks.

    Args:
        participant: The model's participant.
        shadow: Replaces the model's step on a joined rank.

    Attributes:
        under_way: Whether a backward that is announced in pieces has started.
    """

    kinds: ClassVar[dict[str, Any]] = {FIRED: list[int]}  # parameters, by place

    def __init__(self, participant: Participant, shadow: ModelShadow) -> None:
        self._participant = weakref.proxy(participant)  # a cycle would keep the model, and its group, after the loop
        self._shadow = shadow
        self._fired: list[int] = []  # the parameters whose gradients have come since the last record
        self.under_way = False
        self._delays = False  # whether DDP averages at the end of the next backward
        self._is_whole = False  # whether the current backward was announced as a whole
        self._due: set[int] = set()  # on a joined rank: the parameters whose gradients have not come yet
        self._output: Callable[[], None] | None = None  # runs the whole backward at once, in a first iteration
        self._around: ExitStack | None = None  # around the pieces of a backward

    # ------------------------------------------------------------ on an active rank

    def before_forward(self) -> None:
        """Drop the state of the last backward, which may have raised."""
        if self.under_way or self._is_whole or self._around is not None:
            self.reset()
        self._delays = _compat.delays_all_reduce(self._shadow.ddp) if self._shadow.first.decides else False

    def begin(self, ended: Callable[[], None]) -> None:
        """Start the pieces of a backward that will sync, when it reaches the model.

        Args:
            ended: Called at the backward's end, before DDP waits for its buckets.

        Raises:
            UnsupportedError: Joined ranks cannot follow this backward in pieces.
        """
        self.check_nested()
        models = [each for each in self._participant.tail_log.participants if each.is_model]
        if len(models) > 1 and self._delays:
            raise UnsupportedError(
                "In the first iteration with static_graph=True, one of several models called a collective in"
                " backward, and finished ranks cannot follow DDP's order yet. Give each rank a batch in the first"
                " iteration, or use static_graph=False."
            )
        self.under_way, self._fired = True, self._shadow.unreached()
        _compat.after_backward(lambda: self._end(ended))

    def check_nested(self) -> None:
        """Raise if the current backward is inside another one.

        Raises:
            UnsupportedError: It is inside another one.
        """
        if not in_nested_backward():
            return
        raise UnsupportedError(
            "A backward with collectives ran inside another backward (reentrant activation checkpointing, or a loss"
            " that runs its own backwards, such as GradCache). Finished ranks cannot follow it. Use checkpointing with"
            " use_reentrant=False, and compute the loss in one piece."
        )

    def begin_whole(self) -> None:
        """Note that a backward that will sync, and was announced as a whole, has reached the model."""
        self._is_whole = True
        _compat.after_backward(lambda: self._end(lambda: None))

    def note(self, place: int) -> None:
        """Note that the gradient of a parameter has come."""
        if self.under_way:
            self._fired.append(place)

    def before_collective(self, ddps: bool) -> None:
        """See `Participant.before_collective`."""
        if ddps and self.under_way:
            self._announce_fired()
        elif not ddps and self._is_whole:
            raise late("A collective")

    def _announce_fired(self) -> None:
        fired, self._fired = self._fired, []
        self._participant.announce(FIRED, fired, hold=True)

    def _end(self, ended: Callable[[], None]) -> None:
        if self.under_way:
            self._announce_fired()
            ended()
        self.reset()

    def reset(self) -> None:
        """Drop the current backward."""
        self.under_way = self._is_whole = False
        if (around := self._around) is not None:
            self._around = self._output = None
            self._due.clear()
            around.close()

    # ------------------------------------------------------------ on a joined rank

    def open(self, run_all: Callable[[], None]) -> None:
        """Start a backward whose pieces will come; `run_all` runs the whole backward."""
        self.reset()
        self._due = set(self._shadow.firing)
        self._output = run_all if _compat.delays_all_reduce(self._shadow.ddp) else None
        self._around = ExitStack()
        self._around.enter_context(self._shadow.around_backward(in_pieces=True))

    def mirror(self, places: list[int]) -> None:
        """Run the active ranks' next piece: a backward of the parameters whose gradients have come there."""
        parameters = self._shadow.parameters
        if not all(0 <= place < len(parameters) for place in places):
            raise foreign("a piece of a backward", f"parameters {places} of {len(parameters)}")
        if self._output is not None:  # in this iteration DDP only counts gradients, and averages all at the end
            if self._due:
                self._due.clear()
                with torch.enable_grad():
                    self._output()
            return
        new = [place for place in places if place in self._due]
        self._due.difference_update(new)
        if new:
            with torch.enable_grad():  # it may be inside another backward
                torch.autograd.backward(self._shadow.zero_of(new))
