"""A unit of a sharded model: the parameters that FSDP gathers, and whose gradients it reduces, at once.

An active rank announces each gather, reduction and reshard of a unit just before it starts. A joined rank repeats it
with its own shard, using FSDP's own code: it gathers and discards the result, and reduces zeros, or the gradients that
it accumulated without a sync while it was active. So division, casts, hybrid sharding, communication hooks and
accumulation are FSDP's, and the shard gets the same gradient as on any rank.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_join._base.errors import JoinError
from torch_join._base.weighting import weighted
from torch_join._control.codec import closed

Weigh = Callable[[Tensor, float], Tensor]  # takes a gradient and its factor
# The states of a unit's parameters: whole, this rank's shard, or a shard of a smaller mesh.
WHOLE, SHARD, PART = "whole", "sharded", "sharded over fewer ranks"


@closed("gather")
class Gather(NamedTuple):
    """An all-gather of a unit's parameters.

    Attributes:
        before: The state of the parameters before it.
        after: Their state after the phase to which it belongs.
        phase: FSDP's name of that phase.
        inference: Whether it runs in inference mode, the only mode in which inference tensors can be written again.
        dtype: The dtype that is gathered; `None` if the unit itself knows it.
    """

    before: str
    after: str
    phase: str
    inference: bool
    dtype: torch.dtype | None = None


@closed("reduction")
class Reduction(NamedTuple):
    """A reduction of a unit's gradients.

    Attributes:
        used: Which of its parameters have one; for a flat one, which of its parts are trained.
        all_reduces: Whether it is averaged over replicas too (hybrid sharding).
        reshards: Whether the parameters are resharded before it.
        divides: The divisor of the sum, if the user has chosen one.
        dtype: The dtype that is reduced; `None` if the unit itself knows it.
    """

    used: list[bool]
    all_reduces: bool
    reshards: bool
    dtype: torch.dtype | None = None
    divides: float | None = None


class Observer(Protocol):
    """Receives announcements of what a unit is about to do with other ranks."""

    def is_quiet(self) -> bool:
        """Whether no rank needs announcements, so that `around` would do nothing: for every unit, on even inputs."""

    def around(self, unit: int, kind: str, payload: Gather | Reduction | str) -> AbstractContextManager[None]:
        """Wrap a `"gather"`, `"reduce"` or `"reshard"` of the unit with this index."""

    def before_backward(self) -> None:
        """Prepare for a backward, or its next part, which is about to change the unit's gradients."""


class Unit(Protocol):
    """A unit on this rank."""

    name: str

    @property
    def shards(self) -> Sequence[Tensor]:
        """This rank's shards of all parameters, frozen ones included."""

    @property
    def holders(self) -> Sequence[Any]:
        """The objects that hold a gradient each, also for frozen parameters: these may be trained later in the loop."""

    @property
    def registered(self) -> Sequence[Tensor]:
        """All tensors that may represent the unit's parameters in the module."""

    @property
    def synchronizes(self) -> bool:
        """Whether the next backward reduces gradients."""

    @property
    def is_bypassed(self) -> bool:
        """Whether other gradients have replaced those that this unit knows."""

    @property
    def unsynced(self) -> list[Tensor | None]:
        """The gradient that this rank has accumulated without a sync, for each parameter."""

    def hold(self, unsynced: Sequence[bool]) -> None:
        """Set missing unsynced gradients of these parameters to zeros, since other ranks have such gradients.

        So all ranks run the same number of reductions.
        """

    def watch(self, index: int, observer: Observer) -> Callable[[], None]:
        """Announce the unit's actions to `observer`; return a function that ends this."""

    def scale(self, factor: Callable[[], float], weigh: Weigh = weighted) -> Callable[[], None]:
        """Multiply this rank's gradients in each backward, with `weigh`; return a function that ends this."""

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the first iteration, by which FSDP1 prefetches (-1: none), and the number of iterations."""

    @place.setter
    def place(self, place: tuple[int, int]) -> None: ...

    def reach_joined_state(self) -> None:
        """Move, while no module is running, to the state of joined ranks.

        Also forget the order in which modules ran in an evaluation: FSDP prefetches by it in the next backward, and the
        order differs on ranks with other numbers of batches.
        """

    def gather(self, gather: Gather) -> None:
        """Take part, on a joined rank, in a gather."""

    def reduce(self, reduction: Reduction) -> None:
        """Take part, on a joined rank, in a reduction, with zeros for gradients that were not accumulated."""

    def reshard(self, after: str) -> None:
        """Free, on a joined rank, the whole parameters; `after` is the state that this leads to."""


def out_of_step(name: str, own: str, active: str) -> JoinError:
    """Return the error of a joined rank whose unit is in another state than on the active ranks."""
    return JoinError(
        f"The parameters of {name or 'the root module'} are {own} on this finished rank but {active} on the active"
        " ranks. If your code gathers or reshards them on one rank (a forward, unshard(), summon_full_params()), do it"
        " on all ranks, before the loop. With reshard_after_forward=<int>, request the next batch after the backward."
    )


def scaled(factor: Callable[[], float], weigh: Weigh, gradient: Tensor) -> Tensor | None:
    """Return a gradient times the factor, for a tensor's hook."""
    value = factor()
    return None if value == 1.0 else weigh(gradient, value)
