"""A unit of a sharded model: what FSDP gathers, and reduces, at once.

An active rank announces each gather, each reduction and each reshard of a unit just before it does it. A rank that
has joined does the same with its own shard by FSDP's own code: it gathers and throws the result away, and reduces
zeros, or what it has accumulated without a sync while it was active. So division, casts, hybrid sharding,
communication hooks and accumulation are FSDP's, and the shard's gradient is the one that every rank would have.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_join._base.errors import JoinError
from torch_join._base.weighting import weighted
from torch_join._control.codec import closed

Weigh = Callable[[Tensor, float], Tensor]  # a gradient, and its factor
# The states of a unit's parameters: whole, this rank's shard, or a shard of a smaller mesh.
WHOLE, SHARD, PART = "whole", "sharded", "sharded over fewer ranks"


@closed("gather")
class Gather(NamedTuple):
    """An all-gather of a unit's parameters.

    Attributes:
        before: The state of the parameters before it.
        after: Their state after the phase that it belongs to.
        phase: FSDP's name of that phase.
        inference: Whether it is under `inference_mode`, in which alone an inference tensor can be written again.
        dtype: What is gathered; `None` where the unit itself knows.
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
        used: Which of its parameters have one; of a flat one, which of its parts are trained.
        all_reduces: Whether it is averaged over replicas too (hybrid sharding).
        reshards: Whether the parameters are resharded before it.
        divides: By what the sum is divided, if the user has chosen that.
        dtype: Of what is reduced; `None` where the unit itself knows.
    """

    used: list[bool]
    all_reduces: bool
    reshards: bool
    dtype: torch.dtype | None = None
    divides: float | None = None


class Observer(Protocol):
    """What is told of what a unit is about to do with others."""

    def is_quiet(self) -> bool:
        """Whether nobody needs to be told, so that `around` would do nothing: on even inputs, at every unit."""

    def around(self, unit: int, kind: str, payload: Gather | Reduction | str) -> AbstractContextManager[None]:
        """Put around a `"gather"`, `"reduce"` or `"reshard"` of the unit with this index."""

    def before_backward(self) -> None:
        """A backward, or the next part of one, is about to touch the unit's gradients."""


class Unit(Protocol):
    """A unit on this rank."""

    name: str

    @property
    def parameters(self) -> Sequence[Tensor]:
        """What an optimizer steps: this rank's shards of the trainable parameters."""

    @property
    def shards(self) -> Sequence[Tensor]:
        """The same, and this rank's shards of what is frozen."""

    @property
    def holders(self) -> Sequence[Any]:
        """What holds a gradient each, also what is frozen: it may be trained later in the loop."""

    @property
    def registered(self) -> Sequence[Tensor]:
        """All tensors by which the module may know the unit's parameters."""

    @property
    def synchronizes(self) -> bool:
        """Whether the next backward reduces gradients."""

    @property
    def is_bypassed(self) -> bool:
        """Whether somebody has put other gradients in the place of those that this unit knows."""

    @property
    def unsynced(self) -> list[Tensor | None]:
        """The gradient that this rank has accumulated without a sync, of each parameter."""

    def hold(self, unsynced: Sequence[bool]) -> None:
        """Hold zeros as the unsynced gradients of these parameters where this rank has none, as other ranks have some.

        So all ranks reduce equally often.
        """

    def watch(self, index: int, observer: Observer) -> Callable[[], None]:
        """Tell `observer`, and return what ends that."""

    def scale(self, factor: Callable[[], float], weigh: Weigh = weighted) -> Callable[[], None]:
        """Multiply this rank's gradients in each backward, or have `weigh` do it, and return what ends that."""

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the order of a first iteration by which FSDP1 prefetches (-1: none), and how many there were."""

    @place.setter
    def place(self, place: tuple[int, int]) -> None: ...

    def reach_joined_state(self) -> None:
        """Come, where no module is running, to the state that joined ranks are in.

        Forget in which order modules have run in an evaluation, too: in the next backward FSDP prefetches by it, and
        ranks with other numbers of batches would do so in another order.
        """

    def gather(self, gather: Gather) -> None:
        """Take part, on a joined rank, in a gather."""

    def reduce(self, reduction: Reduction) -> None:
        """Take part, on a joined rank, in a reduction, with zeros where nothing has been accumulated."""

    def reshard(self, after: str) -> None:
        """Free, on a joined rank, what is whole; `after` is the state that it leads to."""


def out_of_step(name: str, mine: str, theirs: str) -> JoinError:
    """Return the error of a joined rank whose unit is in another state than the active ranks'."""
    return JoinError(
        f"The parameters of {name or 'the root module'} are {mine} on this rank, which has joined, and {theirs} on the"
        " active ranks. Either one rank has gathered or resharded them alone (a forward, unshard(),"
        " summon_full_params()): do it on all ranks, before the loop. Or this rank joined between a forward and its"
        " backward under reshard_after_forward=<int>: ask for the next batch after the backward."
    )


def scaled(factor: Callable[[], float], weigh: Weigh, gradient: Tensor) -> Tensor | None:
    """Return a gradient times the factor, for a tensor's hook."""
    value = factor()
    return None if value == 1.0 else weigh(gradient, value)
