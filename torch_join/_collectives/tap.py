"""Observes the collectives that this rank's own code issues, so that joined ranks can take part in them.

Every collective of `torch.distributed`, also a functional or a compiled one, goes through the dispatcher's `c10d`
operators. A kernel at "BackendSelect" runs before the backend's own, in every grad mode, and the interpreter's lock is
released before it waits. A kernel in the backend's place would hold the lock, and deadlock with Python callbacks in the
backend's threads.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any, ClassVar

import torch.distributed as dist

from torch_join._base.errors import JoinError, UnsupportedError
from torch_join._collectives import gather_active
from torch_join._collectives.backwards import EXCHANGES, GATHERS, Backwards, check_weighted, issue_weighted
from torch_join._collectives.call import (
    OBJECT_OPERATIONS,
    Call,
    describe,
    refusal,
    scale_inputs,
    starts_objects,
    tensors_in,
)
from torch_join._compat import operators as _compat_c10d

__all__ = ["Call", "CollectiveTap"]


class CollectiveTap:
    """Passes a description of each collective to `observe` before it runs, while installed.

    It observes the thread that installs it, and process groups with a joined member. It ignores collectives that
    DistributedDataParallel issues in a backward, but not those in a forward, so these must be inside `ignoring()`.

    With `ReduceOp.AVG` it multiplies this rank's input by the group's size over the number of active members, so that
    the result is the mean over the active members.

    Args:
        observe: Called with each collective before it runs; the collective raises the errors raised here.
        joined: Whether a global rank has joined; called at each collective. `None` is for a joined rank that itself
            runs code with the active ranks' collectives: every group is observed, and nothing is scaled.
        backwards: Called for collectives in, and around, backward.
        before: Called first with each collective: its operation, the global ranks of its group, and whether it is
            synchronous.

    Limits:
        It does not see the creation of process groups, or calls that bypass the dispatcher: symmetric
        memory, and the methods of a backend object. Install and remove the tap while no other thread
        issues collectives.
    """

    _installed: ClassVar["CollectiveTap | None"] = None

    def __init__(
        self,
        observe: Callable[[Call], None],
        joined: Callable[[int], bool] | None,
        backwards: Backwards | None = None,
        before: Callable[[str, list[int], bool], None] | None = None,
    ) -> None:
        self._before = before
        self._observe = observe
        self._joined = joined
        self._backwards = backwards
        self._library: Any = None
        self._thread = 0
        self._ignoring = 0

    @property
    def installed(self) -> bool:
        """Whether the tap is installed."""
        return self._library is not None

    def install(self) -> None:
        """Start to observe this thread; do nothing if installed already.

        Raises:
            JoinError: Another tap is installed in this process.
        """
        if self.installed:
            return
        if CollectiveTap._installed is not None:
            raise JoinError(
                "Another join context is already intercepting the collectives of this process. Exit that context"
                " before another one has finished ranks."
            )
        self._thread = threading.get_ident()
        self._others = _compat_c10d.threads()  # all ranks have started the work of these threads
        self._library = _compat_c10d.c10d_library()
        CollectiveTap._installed = self
        self._allow_graphs = _compat_c10d.refuse_graphs(self._refuse_graph)
        try:
            for operator in _compat_c10d.operators():
                self._library.impl(operator, _kernel(operator), "BackendSelect", with_keyset=True)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Stop observing and clean up; do nothing if not installed."""
        if not self.installed:
            return
        library, self._library = self._library, None
        CollectiveTap._installed = None
        self._allow_graphs()
        _compat_c10d.destroy(library)

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Ignore the collectives issued inside; may be nested."""
        self._ignoring += 1
        try:
            yield
        finally:
            self._ignoring -= 1

    def _check_other_thread(self, args: dict[str, Any], caller: FrameType | None) -> None:
        if self._joined is None or threading.get_ident() in self._others or "process_group" not in args:
            return
        of_all = len(_ranks(args)) == dist.get_world_size()  # only the observed thread can find out who has joined
        if of_all and _compat_c10d.origin(caller).owner == "checkpoint":
            raise UnsupportedError(
                "torch.distributed.checkpoint.async_save needs all ranks, but some have finished and do not call it."
                " Call it after the loop on all ranks, or `torch.save` in the loop, only on `join.active_ranks[0]`."
            )

    def _tell(
        self, backwards: Backwards, operation: str, args: dict[str, Any], caller: FrameType | None, ddps: bool
    ) -> None:
        backward = _compat_c10d.in_backward()
        if operation.startswith(EXCHANGES) and (backward or _compat_c10d.is_in_model(caller)):
            backwards.before_exchange(operation, _ranks(args))
        if backward:
            with self.ignoring():
                backwards.before_collective(_ranks(args), ddps)
        elif not backwards.in_pieces and _compat_c10d.differentiates(caller):
            backwards.before_differentiable(_ranks(args))

    def _factor(self, operation: str, args: dict[str, Any], caller: FrameType | None) -> float:
        """Return the factor by which gradients in this collective in a backward are multiplied only later; else 1."""
        if self._backwards is None or "process_group" not in args or not self._backwards.weighs(_ranks(args)):
            return 1
        if _compat_c10d.recomputes(caller):
            return 1
        if not check_weighted(operation, args, _compat_c10d.is_adjoint(caller), self._backwards.weighting):
            return 1
        if _compat_c10d.is_coalescing(group := dist.ProcessGroup.unbox(args["process_group"]), caller):
            _compat_c10d.leave_coalescing(group, tensors_in(args, "input", "output", "tensor"))
            raise UnsupportedError(
                f"{operation} was called in backward under {self._backwards.weighting}, inside a coalescing manager,"
                " which launches the collective at exit, too late to divide its result by this rank's weight. Call it"
                " without the manager, or use weighting='world' with a loss that weights samples itself."
            )
        return self._backwards.factor

    def _refuse_graph(self) -> None:
        if self._ignoring or not self._is_ours():
            return
        if self._joined is not None:
            self._joined(-1)  # this first finishes a loop that was left, which may remove the tap
        if self.installed:
            raise UnsupportedError(
                "A CUDA graph was captured or replayed (torch.cuda.graph; torch.compile with mode='reduce-overhead'"
                " or 'max-autotune') while some ranks have finished, or under a weighting that counts. Join cannot"
                " see the graph's collectives or weight its gradients. Run without graphs."
            )

    def _is_ours(self) -> bool:
        if threading.get_ident() == self._thread:
            return True
        # For an accelerator's tensors, autograd runs backward in its own threads.
        return _compat_c10d.in_backward() and _compat_c10d.waits_for_backward(self._thread)

    def _see(self, operator: str, args: dict[str, Any], caller: FrameType | None) -> dict[str, Any]:
        operation = _compat_c10d.OPERATORS.get(operator)
        if operation is None:
            raise UnsupportedError(
                f"This version of torch_join does not support c10d::{operator}: it does not know what a finished rank"
                " must contribute. Update torch_join, or use another collective."
            )
        group = dist.ProcessGroup.unbox(args["process_group"])
        ranks = _compat_c10d.group_ranks(group)
        if not ranks:
            raise UnsupportedError(
                f"{operation} was called on a process group that is not registered with torch.distributed, so"
                " finished ranks cannot find it. Use a group from torch.distributed.new_group."
            )
        if self._before is not None:
            with self.ignoring():
                self._before(operation, ranks, _compat_c10d.is_waited_for(operator, args, caller))
        joined = [rank for rank in ranks if self._joined(rank)] if self._joined is not None else []
        if self._joined is not None and not joined:
            return args
        origin = _compat_c10d.origin(caller)
        function = origin.function
        name = function.f_code.co_name if function is not None else operation
        root = ranks[args["root_rank"]] if "root_rank" in args else None
        if function is not None and name in OBJECT_OPERATIONS:
            if not starts_objects(name, operation, args):
                return args
            operation = name
            if name == "gather_object":
                root = _compat_c10d.gather_object_destination(function, ranks)
        call = describe(operation, group.group_name, root, args)
        if (refused := refusal(call, args, joined, origin)) is not None:
            if name == "batch_isend_irecv":
                _compat_c10d.leave_coalescing(group, tensors_in(args, "input", "output", "tensor"))
            raise UnsupportedError(
                f"{name} was called on a process group in which {f'ranks {joined}' if joined else 'some ranks'} have"
                f" finished (no inputs left): {refused.why}. Use {refused.instead}."
            )
        tensors = tensors_in(args, "input", "tensor")
        gathers = bool(joined) and operation.startswith(GATHERS) and not _compat_c10d.in_backward()
        if gathers and self._backwards and _compat_c10d.gathers_activations(caller, gather_active.__file__):
            self._backwards.before_gather(name, ranks, joined)
        with self.ignoring():
            by_hand = self._backwards is not None and self._backwards.before_reduction(name, call.reduce_op, tensors)
            self._observe(call)
        if call.reduce_op == "AVG" and joined and not by_hand:
            factor = len(ranks) / (len(ranks) - len(joined))
            return scale_inputs(call, args, factor, is_destination=root == ranks[group.rank()])
        return args


def _ranks(args: dict[str, Any]) -> list[int]:
    """Return the global ranks of the process group in an operator's arguments."""
    return _compat_c10d.group_ranks(dist.ProcessGroup.unbox(args["process_group"]))


@cache  # torch keeps kernels that have run
def _kernel(operator: str) -> Callable[..., Any]:
    """Return the kernel that runs in place of an operator while a tap is installed."""
    op = _compat_c10d.overload(operator)
    operation = _compat_c10d.OPERATORS.get(operator)
    names = _compat_c10d.argument_names(operator)

    def kernel(keyset: Any, *args: Any) -> Any:
        tap = CollectiveTap._installed
        if tap is None:
            return op.redispatch(keyset & _compat_c10d.BELOW, *args)
        is_ours = tap._is_ours()
        if is_ours and not tap._ignoring:
            caller = sys._getframe().f_back
            while caller is not None and caller.f_code.co_filename == __file__:  # dynamo runs a frame inside itself
                caller = caller.f_back
            backward = _compat_c10d.in_backward()
            ddps = backward and _compat_c10d.is_ddps(operation, caller)
            # Trailing arguments with their default values are left out.
            named = dict(zip(names, args, strict=False))
            if tap._backwards is not None and "process_group" in named:
                tap._tell(tap._backwards, operation or operator, named, caller, ddps)
            if not ddps:
                named = tap._see(operator, named, caller)
                if backward and (factor := tap._factor(operation or operator, named, caller)) != 1:
                    return issue_weighted(partial(op.redispatch, keyset & _compat_c10d.BELOW), named, factor)
                args = tuple(named.values())
        elif not is_ours:
            tap._check_other_thread(dict(zip(names, args, strict=False)), sys._getframe().f_back)
        return op.redispatch(keyset & _compat_c10d.BELOW, *args)

    return kernel
