"""What becomes of collectives in backward, besides DDP's, on an active rank."""

import weakref
from collections.abc import Callable
from typing import Protocol

from torch_join._base.errors import UnsupportedError, name_ranks
from torch_join._base.membership import Membership
from torch_join._base.weighting import name_of
from torch_join._collectives.backwards import Backwards, late
from torch_join.joinables.part import LoopModel, Part


class _Server(Protocol):
    parts: list[Part]

    def meet(self) -> bool: ...

    def models(self) -> list[LoopModel]: ...

    def tell(self) -> None: ...


class ServedBackwards(Backwards):
    """The collectives in the backwards of a loop.

    Args:
        server: The loop's server.
        members: Who is active.
        check: Called with each first; see `Backwards.before_collective`.

    Attributes:
        in_pieces: Whether backwards are announced piece by piece.
        always: Whether they are from the first one on, before anything shows that they must.
        check: The same.
        replicas: Whether all ranks hold the same of what DistributedDataParallel ignores.
    """

    def __init__(self, server: _Server, members: Membership, check: Callable[[list[int], bool], None]) -> None:
        self._server = weakref.proxy(server)  # a circle would keep what that refers to, after the loop
        self._members = members
        self.check = check
        self.replicas = False
        self.always = False
        self.reset()

    def reset(self) -> None:
        """Begin anew, as before the first step."""
        self.in_pieces = self.always

    def before_collective(self, group: list[int], ddps: bool) -> None:
        in_tail = self._server.meet()
        self.check(group, ddps)
        if not ddps and self._is_apart(group):
            return
        if in_tail:
            for part in self._server.parts:
                part.before_collective(ddps)
            if ddps:
                self._server.tell()
        if ddps or self.in_pieces:
            return
        self.before_differentiable(group)
        if in_tail and not self.in_pieces and any(part.in_pieces for part in self._server.parts):
            raise late(f"A collective of ranks {group}, of which others may not know,")

    def before_differentiable(self, group: list[int]) -> None:
        self.in_pieces = {*self._members.global_ranks} <= {*group}

    def before_exchange(self, operation: str, group: list[int]) -> None:
        if not self._server.meet() or not (joined := [rank for rank in group if self._members.has_joined(rank)]):
            return
        owned = [] if self.replicas else [name for part in self._server.parts for name in part.owned]
        if owned:
            raise UnsupportedError(
                f"{operation} of a model while {name_ranks(joined)} {'have' if len(joined) > 1 else 'has'} joined, and"
                f" DistributedDataParallel does not average {owned[0]} ({len(owned)} parameters in all): each rank may"
                " own a part, as an expert, and a rank that has joined sends zeros in place of what its part makes of"
                " the tokens. Give every rank the same number of batches; or, where these parameters are the same on"
                " all ranks, use Join(..., hand_over_ignored=True)."
            )

    def _is_apart(self, group: list[int]) -> bool:
        """Whether this rank is the only one of the loop's in a group (of tensor parallelism, say): none can join it."""
        return len({*self._members.global_ranks} & {*group}) < 2

    def weighs(self, group: list[int]) -> bool:
        if self._members.count is None or self._members.serves or self._is_apart(group):
            return False
        return any(part.is_model and part.in_pieces for part in self._server.parts)

    @property
    def weighting(self) -> str:
        return name_of(self._members.weighting)

    @property
    def factor(self) -> float:
        if any(model.will_accumulate for model in self._server.models()):
            return self._members.loss_factor
        raise UnsupportedError(
            "A collective in a backward that does not come to the model's parameters (torch.autograd.grad; gradients of"
            f" detached outputs) under {self.weighting}: what it mixes is weighted by what ranks' batches count only"
            " later. Use weighting='world' with a loss that weighs samples itself, or one backward."
        )
