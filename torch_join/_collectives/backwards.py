"""Collectives in a backward, or of its gradients: how they are announced before they are issued, and weighted."""

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

GATHERS = ("all_gather", "gather", "all_to_all")  # a rank receives other ranks' values, not their sum
EXCHANGES = ("all_to_all", "reduce_scatter")  # prefixes of operations that bring tokens to experts


class Backwards:
    """Handles, for a `CollectiveTap`, the collectives in and around the backwards of a loop.

    Args:
        tail_log: The loop's `TailLog`.
        members: Which ranks are active.
        check: Called first with each collective; see `before_collective`.

    Attributes:
        in_pieces: Whether backwards are announced piece by piece, since they may have collectives besides those of
            DistributedDataParallel. True once an autograd function had a collective in its forward.
        always: Whether backwards are announced piece by piece from the first one on.
        replicas: Whether all ranks have equal copies of the parameters that DistributedDataParallel ignores.
    """

    def __init__(self, tail_log: Any, members: Membership, check: Callable[[list[int], bool], None]) -> None:
        self._tail_log: Any = weakref.proxy(tail_log)  # a cycle would keep its references alive after the loop
        self._members = members
        self.check = check
        self.replicas = False
        self.always = False
        self._warned: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Reset to the state before the first step."""
        self.in_pieces = self.always

    def before_collective(self, group: list[int], ddps: bool) -> None:
        """Prepare for a collective in a backward; the collective raises the errors raised here.

        Args:
            group: The global ranks of its process group.
            ddps: Whether DistributedDataParallel issues it.
        """
        in_tail = self._tail_log.meet()
        self.check(group, ddps)
        if not ddps and self._is_apart(group):
            return
        if in_tail:
            for each in self._tail_log.participants:
                each.before_collective(ddps)
            if ddps:
                self._tail_log.flush()
        if ddps or self.in_pieces:
            return
        self.before_differentiable(group)
        if in_tail and not self.in_pieces and any(each.in_pieces for each in self._tail_log.participants):
            raise late(f"A collective of only ranks {group}")

    def before_differentiable(self, group: list[int]) -> None:
        """Record a collective in an autograd function's forward; called while `in_pieces` is false.

        All active ranks must come to the same conclusion, so a collective of only some ranks does not count.

        Args:
            group: The global ranks of its process group.
        """
        self.in_pieces = {*self._members.global_ranks} <= {*group}

    def before_exchange(self, operation: str, group: list[int]) -> None:
        """Check a model's collective through which ranks may use other ranks' parameters (`EXCHANGES`).

        Args:
            operation: Its name.
            group: The global ranks of its process group.

        Raises:
            UnsupportedError: Joined ranks may own a part of the model.
        """
        if not self._tail_log.meet() or not (joined := [rank for rank in group if self._members.has_joined(rank)]):
            return
        owned = [] if self.replicas else [name for each in self._tail_log.participants for name in each.owned]
        if owned:
            raise UnsupportedError(
                f"The model called {operation} after {name_ranks(joined)} {'have' if len(joined) > 1 else 'has'}"
                f" finished. DistributedDataParallel does not average {owned[0]} ({len(owned)} parameters in all),"
                ' which may be local to one rank, like an expert. If so, use Join(..., placeholder="last") (see'
                " docs/spread.md); if all ranks hold the same values, use Join(..., hand_over_ignored=True)."
            )

    def before_gather(self, operation: str, group: Sequence[int], joined: Sequence[int]) -> None:
        """Check, in the tail, a gather in a forward through which gradients flow.

        Args:
            operation: Its name.
            group: The global ranks of its process group.
            joined: The joined ranks among them.

        Raises:
            UnsupportedError: The group lacks some ranks. Its members compute one batch together, and are all needed.
        """
        zeros = f"{operation} was called with gradients, in a forward, while {name_ranks(joined)} of its group"
        if {*self._members.global_ranks} - {*group}:
            raise UnsupportedError(
                f"{zeros} {'have' if len(joined) > 1 else 'has'} finished and others have not, so the others would"
                " receive zeros instead of keys, values or other activations. Ranks that compute a batch together must"
                " finish at the same step: give all of them the same batches, and use a mesh with named dimensions."
            )
        if "gather" in self._warned:
            return
        self._warned.add("gather")
        JoinDriftWarning.warn(
            f"{zeros} {'have' if len(joined) > 1 else 'has'} finished, so their rows are zeros, and a loss over the"
            " rows of all ranks (such as a contrastive loss) counts these zeros as samples. Use join.all_gather(x,"
            " sync_grads=True), or self.all_gather in Lightning: they return only the rows of join.active_ranks, so"
            " this rank's rows may be at another index. If your code already drops the zeros, ignore this warning."
        )

    def before_reduction(self, operation: str, reduce_op: str | None, tensors: Sequence[Tensor]) -> bool:
        """Prepare for a reduction outside of backward, in the tail.

        Args:
            operation: Its name.
            reduce_op: The name of its reduce operation.
            tensors: The tensors to reduce.

        Returns:
            Whether the tensors are weighted already, so that their mean over all ranks is that over the active ranks.
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
                f"{operation} sums gradients of a backward under no_sync, with {self.weighting}. The backward has"
                " already multiplied each rank's gradients by its weight, so the weighted mean is their sum divided"
                f" by the number of all ranks ({self._members.world_size}). Divide by that number, not by"
                " len(join.active_ranks), or use ReduceOp.AVG."
            )
        return True

    def _is_apart(self, group: list[int]) -> bool:
        """Whether this rank is the loop's only one in a group (of tensor parallelism, say): no other can join."""
        return len({*self._members.global_ranks} & {*group}) < 2

    def weighs(self, group: list[int]) -> bool:
        """Whether the gradients in a collective of these global ranks are weighted only when they reach parameters."""
        if self._members.count is None or self._members.serves or self._is_apart(group):
            return False
        return any(each.is_model and each.in_pieces for each in self._tail_log.participants)

    @property
    def weighting(self) -> str:
        """The weighting's name in errors."""
        return name_of(self._members.weighting)

    @property
    def factor(self) -> float:
        """The factor by which gradients of the current backward are multiplied when they reach parameters.

        Raises:
            UnsupportedError: The backward does not reach the parameters.
        """
        if any(model.will_accumulate for model in self._tail_log.models()):
            return self._members.loss_factor
        raise UnsupportedError(
            "A backward that does not reach the model's parameters (torch.autograd.grad, detached outputs) called a"
            f" collective under {self.weighting}, when its gradients have not been weighted yet. Use"
            " weighting='world' with a loss that weights samples itself, or run a single backward."
        )


def late(operation: str) -> UnsupportedError:
    """Return the error for a collective in a backward that was announced as a whole."""
    return UnsupportedError(
        f"{operation} was called in backward while some ranks have finished, but no autograd function called a"
        " collective of all ranks in the forward, so finished ranks did not expect it. Set backward_collectives=True"
        " (of Join or the strategy), or call the collective on detached tensors in the forward."
    )


_SENT = ("input", "tensor")  # prefixes of the arguments that are sent
_MOVES = ("gather", "scatter", "broadcast", "all_to_all")  # operations without a reduction, or with a sum


def check_weighted(operation: str, args: dict[str, Any], is_adjoint: bool, weighting: str) -> bool:
    """Return whether a collective in backward handles gradients that are weighted later.

    Args:
        operation: Its name.
        args: The arguments of its operator.
        is_adjoint: Whether the backward of an autograd function issues it.
        weighting: The weighting's name in errors.

    Raises:
        UnsupportedError: It is unknown whether it does, or the gradients cannot be weighted.
    """
    if "barrier" in operation or not any(map(is_inexact, tensors_in(args, *_SENT, "output"))):
        return False
    adds = "reduce_op" not in args or _compat_c10d.unbox_reduce_op(args["reduce_op"]) in ("SUM", "AVG")
    known = any(move in operation for move in _MOVES) or "reduce" in operation
    if is_adjoint and adds and known:
        return True
    where = "" if is_adjoint else ", in a hook,"
    raise UnsupportedError(
        f"{operation} was called in backward{where} under {weighting}. Gradients are weighted only when they reach"
        " the parameters, so this call would combine unweighted gradients; only a sum or a move of gradients in an"
        " autograd function's backward is supported. Use weighting='world' with a loss that weights samples itself."
    )


def issue_weighted(issue: Callable[..., Any], args: dict[str, Any], factor: float) -> Any:
    """Issue a collective of gradients that this rank multiplies by its factor only later.

    Values that this rank sends become part of gradients that another rank multiplies by its own factor. So they are
    multiplied here by this rank's factor, and received values are divided by it.

    Args:
        issue: Issues the collective.
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
    # A new, finished work: waiting for the old one again may write the received values again (gloo's `reduce_scatter`).
    done = _compat_c10d.finished_work(received)
    return (*others, done) if others else done
