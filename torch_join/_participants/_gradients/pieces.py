"""A backward of a DDP model that joined ranks follow piece by piece, since other collectives come in it.

Just before DDP launches a bucket, the active ranks announce which parameters' gradients have come since they last
did; any other collective is a record of its own, in its place. A joined rank runs a backward of just these
parameters, in which its own reducer launches the same buckets, and takes part in the others with zeros. So all
ranks issue everything in the order of the lowest active rank, over all communicators. The reducer does not mind that
it is several backwards: it ends its work in the one that readies its last bucket.

All active ranks must write the same number of records. So a launch is one, also where nothing new has come.
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
    """The backwards of one model, on an active rank and on one that has joined.

    Args:
        participant: The model's part.
        shadow: What runs in place of the model's step on a joined rank.

    Attributes:
        under_way: Whether a backward has begun whose pieces are announced.
    """

    kinds: ClassVar[dict[str, Any]] = {FIRED: list[int]}  # which parameters, by place

    def __init__(self, participant: Participant, shadow: ModelShadow) -> None:
        self._participant = weakref.proxy(participant)  # a circle would keep the model, and its group, after the loop
        self._shadow = shadow
        self._came: list[int] = []  # the parameters whose gradients have come, since the last record
        self.under_way = False
        self._delays = False  # DDP averages at the end of the backward that comes
        self._is_whole = False  # the backward that is under way was announced as one
        self._due: set[int] = set()  # on a joined rank: the parameters that have yet to come
        self._output: Callable[[], None] | None = None  # what runs all of it at once, in a first iteration
        self._around = ExitStack()
        self._is_open = False  # whether there is something in it

    # ------------------------------------------------------------ on an active rank

    def before_forward(self) -> None:
        """Begin anew: the last backward may have raised."""
        if self.under_way or self._is_whole or self._is_open:
            self.reset()
        self._delays = _compat.delays_all_reduce(self._shadow.ddp) if self._shadow.first.decides else False

    def begin(self, ended: Callable[[], None]) -> None:
        """A backward that will sync has come to the model, and goes in pieces.

        Args:
            ended: Called at its end, before DDP waits for its buckets.

        Raises:
            UnsupportedError: It cannot.
        """
        self.check_nested()
        models = [each for each in self._participant.tail_log.participants if each.is_model]
        if len(models) > 1 and self._delays:
            raise UnsupportedError(
                "The first iteration of a model with static_graph=True, of several models, has collectives in backward"
                " while some ranks have joined, which cannot follow DDP's order there. Give each rank a batch in the"
                " first iteration, or use static_graph=False."
            )
        self.under_way, self._came = True, self._shadow.unreached()
        _compat.after_backward(lambda: self._end(ended))

    def check_nested(self) -> None:
        """Raise if the backward that is under way is inside of another one.

        Raises:
            UnsupportedError: So it is.
        """
        if not in_nested_backward():
            return
        raise UnsupportedError(
            "Reentrant activation checkpointing, or a loss that runs backwards of its own (GradCache), with collectives"
            " in backward while some ranks have joined: they cannot follow a backward inside a backward. Use"
            " checkpointing with use_reentrant=False, and compute such a loss in one part."
        )

    def begin_whole(self) -> None:
        """A backward that will sync has come to the model, and was announced as one."""
        self._is_whole = True
        _compat.after_backward(lambda: self._end(lambda: None))

    def came(self, place: int) -> None:
        """Note that the gradient of a parameter comes."""
        if self.under_way:
            self._came.append(place)

    def before_collective(self, ddps: bool) -> None:
        """See `Participant.before_collective`."""
        if ddps and self.under_way:
            self._tell()
        elif not ddps and self._is_whole:
            raise late("A collective")

    def _tell(self) -> None:
        came, self._came = self._came, []
        self._participant.announce(FIRED, came, hold=True)

    def _end(self, ended: Callable[[], None]) -> None:
        if self.under_way:
            self._tell()
            ended()
        self.reset()

    def reset(self) -> None:
        """Forget a backward that is under way."""
        self.under_way = self._is_whole = False
        if self._is_open:
            self._is_open, self._output = False, None
            self._due.clear()
            self._around.close()

    # ------------------------------------------------------------ on a joined rank

    def open(self, run_all: Callable[[], None]) -> None:
        """A backward begins, of which the pieces come; `run_all` runs all of it."""
        self._around.close()
        self._due = set(self._shadow.firing)
        self._output = run_all if _compat.delays_all_reduce(self._shadow.ddp) else None
        self._is_open = True
        self._around.enter_context(self._shadow.around_backward(in_pieces=True))

    def mirror(self, places: list[int]) -> None:
        """Run what the active ranks have run since the last piece: the gradients of these parameters have come."""
        parameters = self._shadow.parameters
        if not all(0 <= place < len(parameters) for place in places):
            raise foreign("a piece of a backward", f"parameters {places} of {len(parameters)}")
        if self._output is not None:  # DDP counts gradients, and averages them all at the end
            if self._due:
                self._due.clear()
                with torch.enable_grad():
                    self._output()
            return
        new = [place for place in places if place in self._due]
        self._due.difference_update(new)
        if new:
            with torch.enable_grad():  # it may be inside of another backward
                torch.autograd.backward(self._shadow.zero_of(new))
