"""Collectives in backward, or of its gradients: who has to know of one before it is issued, and how it is weighted."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.errors import JoinDriftWarning, JoinWarning, UnsupportedError, name_ranks
from torch_join._base.membership import Membership
from torch_join._base.weighting import name_of
from torch_join._collectives.call import is_inexact, multiplied, tensors_in
from torch_join._compat import operators as _compat_c10d

GATHERS = ("all_gather", "gather", "all_to_all")  # of which a rank gets what others have computed, and not a sum of it
EXCHANGES = ("all_to_all", "reduce_scatter")  # how the names of operations begin by which experts get tokens


class Backwards:
    """What a `CollectiveTap` tells of collectives in the backwards of a loop, and asks.

    Args:
        tail_log: The loop's `TailLog`.
        members: Who is active.
        check: Called with each first; see `before_collective`.

    Attributes:
        in_pieces: Whether backwards are announced piece by piece, since there may be collectives besides
            DistributedDataParallel's: an autograd function has had one in forward. Once true it stays so.
        always: Whether they are from the first one on, before anything shows that they must.
        replicas: Whether all ranks hold the same of what DistributedDataParallel ignores.
    """

    def __init__(self, tail_log: Any, members: Membership, check: Callable[[list[int], bool], None]) -> None:
        self._tail_log: Any = weakref.proxy(tail_log)  # a circle would keep what that refers to, after the loop
        self._members = members
        self.check = check
        self.replicas = False
        self.always = False
        self._warned: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Begin anew, as before the first step."""
        self.in_pieces = self.always

    def before_collective(self, group: list[int], ddps: bool) -> None:
        """Hear of a collective in backward; what this raises, the collective raises.

        Args:
            group: The global ranks of its process group.
            ddps: Whether it is DistributedDataParallel's.
        """
        in_tail = self._tail_log.meet()
        self.check(group, ddps)
        if not ddps and self._is_apart(group):
            return
        if in_tail:
            for each in self._tail_log.participants:
                each.before_collective(ddps)
            if ddps:
                self._tail_log.tell()
        if ddps or self.in_pieces:
            return
        self.before_differentiable(group)
        if in_tail and not self.in_pieces and any(each.in_pieces for each in self._tail_log.participants):
            raise late(f"A collective of ranks {group}, of which others may not know,")

    def before_differentiable(self, group: list[int]) -> None:
        """Hear of a collective of an autograd function's forward, while `in_pieces` is false.

        All active ranks must come to the same: where only some of them know of it, it shows nothing.

        Args:
            group: The global ranks of its process group.
        """
        self.in_pieces = {*self._members.global_ranks} <= {*group}

    def before_exchange(self, operation: str, group: list[int]) -> None:
        """Hear of a model's collective by which ranks may use what others own (`EXCHANGES`).

        Args:
            operation: Its name.
            group: The global ranks of its process group.

        Raises:
            UnsupportedError: Ranks that have joined may own a part of a model.
        """
        if not self._tail_log.meet() or not (joined := [rank for rank in group if self._members.has_joined(rank)]):
            return
        owned = [] if self.replicas else [name for each in self._tail_log.participants for name in each.owned]
        if owned:
            raise UnsupportedError(
                f"{operation} of a model while {name_ranks(joined)} {'have' if len(joined) > 1 else 'has'} joined, and"
                f" DistributedDataParallel does not average {owned[0]} ({len(owned)} parameters in all), which may"
                ' belong to one rank, as an expert does. With Join(..., placeholder="last") finished ranks run the step'
                " themselves: see docs/spread.md. If these parameters are the same on all ranks, use Join(...,"
                " hand_over_ignored=True)."
            )

    def before_gather(self, operation: str, group: Sequence[int], joined: Sequence[int]) -> None:
        """Hear, in the tail, of a gather of what a forward computes, through which gradients flow.

        Args:
            operation: Its name.
            group: The global ranks of its process group.
            joined: Those of them that have joined.

        Raises:
            UnsupportedError: Its group is of some ranks only, which compute something together that takes all of them.
        """
        zeros = f"{operation} with gradients, in a forward, while {name_ranks(joined)} of its group"
        if {*self._members.global_ranks} - {*group}:
            raise UnsupportedError(
                f"{zeros} {'have' if len(joined) > 1 else 'has'} joined, and other ranks of it have not: those would go"
                " on with zeros in place of keys, values or other activations. Ranks that compute a batch together must"
                " run out at the same step: give all of them the same batches, and a mesh with named dimensions."
            )
        if "gather" in self._warned:
            return
        self._warned.add("gather")
        JoinDriftWarning.warn(
            f"{zeros} {'have' if len(joined) > 1 else 'has'} joined: their rows are zeros, and a loss over the rows of"
            " all ranks (a contrastive one) takes them for samples. Use join.all_gather(x, sync_grads=True), or in"
            " Lightning self.all_gather: they return the rows of join.active_ranks alone, among which this rank's own"
            " are at another place. If your code leaves the zeros out, nothing is wrong."
        )

    def before_reduction(self, operation: str, reduce_op: str | None, tensors: Sequence[Tensor]) -> bool:
        """Hear of a reduction beside backward, in the tail.

        Args:
            operation: Its name.
            reduce_op: The name of its reduce operation.
            tensors: What it reduces.

        Returns:
            Whether that is weighted already, so that its mean over all ranks is that over the active ones.
        """
        if reduce_op not in ("SUM", "AVG"):
            return False
        models = [one for one in self._tail_log.models() if any(map(one.is_unsynced, tensors))]
        for model in models:
            self._tail_log.announce(model.index, "reduced", hold=True)
        if not models or self._members.weighting == "world":
            return False
        if reduce_op == "SUM" and "sum" not in self._warned:
            self._warned.add("sum")
            JoinWarning.warn(
                f"{operation} of gradients of a backward under no_sync, by {self.weighting}: each rank's were"
                " multiplied in the backward by what it counts, such that their sum over the number of all ranks"
                f" ({self._members.world_size}) is the weighted mean. Divide by that, not by len(join.active_ranks), or"
                " use ReduceOp.AVG."
            )
        return True

    def _is_apart(self, group: list[int]) -> bool:
        """Whether this rank is the only one of the loop's in a group (of tensor parallelism, say): none can join it."""
        return len({*self._members.global_ranks} & {*group}) < 2

    def weighs(self, group: list[int]) -> bool:
        """Whether these ranks' gradients (global ones, of a process group) are weighted where they reach parameters."""
        if self._members.count is None or self._members.serves or self._is_apart(group):
            return False
        return any(each.is_model and each.in_pieces for each in self._tail_log.participants)

    @property
    def weighting(self) -> str:
        """What errors call the weighting."""
        return name_of(self._members.weighting)

    @property
    def factor(self) -> float:
        """What the gradients of the backward that is under way are multiplied with where they reach parameters.

        Raises:
            UnsupportedError: That backward does not come to the parameters.
        """
        if any(model.will_accumulate for model in self._tail_log.models()):
            return self._members.loss_factor
        raise UnsupportedError(
            "A collective in a backward that does not reach the model's parameters (torch.autograd.grad, detached"
            f" outputs) under {self.weighting}: its gradients have no weight yet. Use weighting='world' with a loss"
            " that weighs samples itself, or one backward."
        )


def late(operation: str) -> UnsupportedError:
    """Return the error of a collective that comes in a backward which was announced as a whole."""
    return UnsupportedError(
        f"{operation} in backward, after a forward in which no autograd function had a collective of all ranks, while"
        " some ranks have joined: those may have gone through the whole backward already. Set backward_collectives=True"
        " (of Join, or of the strategy), or use a collective on detached tensors in the forward pass."
    )


_SENT = ("input", "tensor")  # how the names of arguments begin that hold what is sent
_MOVES = ("gather", "scatter", "broadcast", "all_to_all")  # without a reduction, or with a sum


def check_weighted(operation: str, args: dict[str, Any], is_adjoint: bool, weighting: str) -> bool:
    """Return whether a collective in backward is one of gradients that are weighted later.

    Args:
        operation: Its name.
        args: The arguments of its operator.
        is_adjoint: Whether the backward of an autograd function issues it.
        weighting: What errors call the weighting.

    Raises:
        UnsupportedError: Nobody can tell, or there is no way to weigh it.
    """
    if "barrier" in operation or not any(map(is_inexact, tensors_in(args, *_SENT, "output"))):
        return False
    adds = "reduce_op" not in args or _compat_c10d.unbox_reduce_op(args["reduce_op"]) in ("SUM", "AVG")
    known = any(move in operation for move in _MOVES) or "reduce" in operation
    if is_adjoint and adds and known:
        return True
    where = "" if is_adjoint else ", in a hook,"
    raise UnsupportedError(
        f"{operation} in backward{where} under {weighting}: gradients are weighted only where they reach the"
        " parameters, and what this mixes or compares has no weight yet. Only sums and moves of gradients in the"
        " backward of an autograd function are weighted. Use weighting='world' with a loss that weighs samples itself."
    )


def issue_weighted(issue: Callable[..., Any], args: dict[str, Any], factor: float) -> Any:
    """Issue a collective of gradients that are multiplied by a factor of this rank's own only later.

    What a rank sends is, on another rank, a part of gradients that are multiplied with the other one's factor. So it
    is multiplied here, with this rank's own, and what is received is divided by that.

    Args:
        issue: Issues it.
        args: The arguments of its operator.
        factor: The factor, not zero.
    """
    in_place = not tensors_in(args, "input", "output")
    received = list(filter(is_inexact, tensors_in(args, *(_SENT if in_place else ("output",)))))
    with torch.no_grad():
        if in_place:
            for tensor in received:
                tensor.mul_(factor)
        else:
            sent = [name for name in args if name.startswith(_SENT) and "split" not in name]
            args = {name: multiplied(value, factor) if name in sent else value for name, value in args.items()}
        result = issue(*args.values())
        *others, work = result if isinstance(result, (tuple, list)) else (result,)
        if (own := dist.Work.unbox(work)) is not None:
            own.wait()
        for tensor in received:
            tensor.div_(factor)
    # Another one, that is done: to wait again may write what was received again (gloo's `reduce_scatter` does).
    done = _compat_c10d.finished_work(received)
    return (*others, done) if others else done
