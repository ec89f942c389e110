"""Every private name of torch that the collective tap uses (seen in torch 2.13.0 and 2.14.1).

`tests/core/_collectives/test_tap.py` fails when one of them is gone.
"""

import functools
import gc
import inspect
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch import Tensor, overrides
from torch.autograd import graph
from torch.distributed import _functional_collectives, c10d_logger, distributed_c10d
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from torch_join._base.attributes import replace
from torch_join._base.errors import UnsupportedError
from torch_join._base.names import TORCH, check_names

# The dispatcher's operators, with their names in `torch.distributed`.
OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_single_coalesced",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "_allgather_base_": "all_gather_single",
    "allgather_into_tensor_coalesced_": "all_gather_single_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "broadcast_": "broadcast",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
# The functions that complete only once other ranks call them, too.
_COLLECTIVES = {*OPERATORS.values(), "all_gather_into_tensor", "reduce_scatter_tensor"} - {"send", "recv"}
_REDUCING_OPTIONS = (
    dist.AllreduceOptions,
    dist.AllreduceCoalescedOptions,
    dist.ReduceOptions,
    dist.ReduceScatterOptions,
)
# The names of these methods of a process group before torch 2.13.
_OLDER_NAMES = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
# An operator that does not communicate.
_LOCAL_OPERATORS = {"check_for_nan"}

AllgatherOptions = distributed_c10d.AllgatherOptions  # the only options that torch.distributed does not export

_ENGINE = graph._engine_run_backward.__code__
_CONTEXT = torch.autograd.function.BackwardCFunction
_BACKWARDS = {getattr(_CONTEXT, name).__code__ for name in ("apply", "apply_boxed") if hasattr(_CONTEXT, name)}
_DDP_FORWARD = DistributedDataParallel.forward.__code__
_CHECKPOINT_FILE = checkpoint.__file__
_FUNCTIONAL_FILE = _functional_collectives.__file__
_C10D_FILE = distributed_c10d.__file__
_FSDP_FOLDER = os.path.join(os.path.dirname(_C10D_FILE), "fsdp", "")
_TENSOR_FOLDER = os.path.join(os.path.dirname(_C10D_FILE), "tensor", "")
_SYNC_NORM_FILE = sys.modules[SyncBatchNorm.__module__].__file__
_MODEL_AVERAGING_FOLDER = os.path.join(os.path.dirname(_C10D_FILE), "algorithms", "model_averaging", "")
_CHECKPOINT_FOLDER = os.path.join(os.path.dirname(_C10D_FILE), "checkpoint", "")
_ZERO_FILE = os.path.join(os.path.dirname(_C10D_FILE), "optim", "zero_redundancy_optimizer.py")
_LOGGER_FILE = c10d_logger.__file__
_OVERRIDES_FILE = overrides.__file__
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_TORCH_FOLDER = os.path.join(os.path.dirname(torch.__file__), "")


def overload(name: str) -> Any:
    """Return the `c10d` operator of this name (each has one overload)."""
    return getattr(torch.ops.c10d, name).default


# The dispatch keys below that of the tap, for `&` with a call's keyset. (Not a function: torch 2.11 would trace it when
# it compiles code that issues a collective, and no graph can have such an argument.)
BELOW: Any = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def has_kernel(name: str) -> bool:
    """Whether an operator has a kernel at the dispatch key of the tap."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "BackendSelect"))


def c10d_library() -> Any:
    """Return an object that registers kernels of the `c10d` operators."""
    make: Any = torch.library.Library
    return make("c10d", "IMPL")


def destroy(library: Any) -> None:
    """Unregister everything that `library` has registered."""
    library._destroy()


@contextmanager
def changing_all_reduces(change: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
    """Call `change` with the tensors that each all-reduce inside sends; does nothing if a tap is installed."""
    if has_kernel("allreduce_"):
        yield
        return
    op, library = overload("allreduce_"), c10d_library()

    def kernel(keyset: Any, tensors: list[Tensor], *args: Any) -> Any:
        change(tensors)
        return op.redispatch(keyset & BELOW, tensors, *args)

    library.impl("allreduce_", kernel, "BackendSelect", with_keyset=True)
    try:
        yield
    finally:
        destroy(library)


@functools.cache
def operators() -> tuple[str, ...]:
    """Return the names of the `c10d` operators that communicate, in `OPERATORS` or not."""
    names = torch._C._dispatch_get_all_op_names()
    found = {name.removeprefix("c10d::") for name in names if name.startswith("c10d::")}
    return tuple(sorted(found - _LOCAL_OPERATORS))


@functools.cache
def argument_names(name: str) -> tuple[str, ...]:
    """Return the names of an operator's arguments, in order."""
    return tuple(argument.name for argument in overload(name)._schema.arguments)


def finished_work(result: list[Tensor]) -> Any:
    """Return a finished work in the form that an operator returns; a stream can wait for it as for any other."""
    devices: Any = list({tensor.device for tensor in result if tensor.device.type != "cpu"})
    future: Any = torch.futures.Future(devices=devices)
    future.set_result(result)
    return _c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def unbox_reduce_op(boxed: Any) -> str:
    """Return the name of an operator's reduce operation; called from the operator's kernel.

    Before torch 2.10 this reads the frame of the Python function that issued the collective.

    Raises:
        UnsupportedError: There is no such frame.
    """
    if hasattr(boxed, "op"):
        return str(dist.ReduceOp.RedOpType(boxed.op()).name)
    frames = [each for each in _callers(sys._getframe(1)) if not each.f_code.co_filename.startswith(_OWN_FOLDER)]
    for frame in frames:
        if frame.f_code.co_filename == _C10D_FILE:
            for value in frame.f_locals.values():
                if isinstance(value, _REDUCING_OPTIONS):
                    reduction: Any = value.reduceOp
                    return str(dist.ReduceOp.RedOpType(reduction.op).name)
        elif frame.f_code.co_filename == _FUNCTIONAL_FILE and "reduceOp" in frame.f_locals:
            return str(frame.f_locals["reduceOp"]).upper()
    if in_backward() and not frames:  # DDP's reducer, which autograd calls without any Python
        return "SUM"
    raise UnsupportedError(
        f"A reduction was called without torch.distributed's functions, so torch {torch.__version__} does not expose"
        " its reduce operation. Call torch.distributed.all_reduce (or a similar function), or use torch 2.10 or newer."
    )


def is_waited_for(operator: str, args: dict[str, Any], caller: FrameType | None) -> bool:
    """Whether a collective is synchronous.

    Before torch 2.8 some operators lack this argument: it is then found in the frame of the Python function.

    Args:
        operator: Its operator's name.
        args: Its operator's arguments.
        caller: The innermost Python frame.
    """
    for name in {"async_op", "asyncOp"}.intersection(argument_names(operator)):
        return not args.get(name, True)
    frames = itertools.takewhile(
        lambda each: each.f_code.co_filename in (_C10D_FILE, _LOGGER_FILE), _all_callers(caller)
    )
    named = [each.f_locals[name] for each in frames for name in ("async_op", "async_ops") if name in each.f_locals]
    return bool(named) and not named[0]


def issue(group: dist.ProcessGroup, operation: str, *args: Any) -> dist.Work | None:
    """Issue a collective of a group by its name in this version of torch."""
    method = getattr(group, operation, None) or getattr(group, _OLDER_NAMES[operation])
    work: dist.Work | None = method(*args)
    return work


def group_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of a group's members; nothing for a group that `torch.distributed` does not know."""
    return list(distributed_c10d._world.pg_group_ranks.get(group, ()))


def group_named(name: str) -> dist.ProcessGroup | None:
    """Return the group of this name, if this rank is a member of it."""
    return next((group for group, key in distributed_c10d._world.pg_names.items() if key == name), None)


def groups_of_this_rank() -> dict[str, list[int]]:
    """Return the global ranks of the members of each group that this rank is in, by the group's name."""
    world = distributed_c10d._world
    return {name: list(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def waits_for_backward(thread: int) -> bool:
    """Whether another thread waits for a backward pass that autograd's own threads run."""
    frame = _frames().get(thread)
    return frame is not None and frame.f_code is _ENGINE


def threads() -> frozenset[int]:
    """Return the running threads, by `threading.get_ident`."""
    return frozenset(_frames())


def _frames() -> dict[int, FrameType]:
    """Return the frame of each thread.

    Python holds a lock here that threads need to end. Garbage collection is off meanwhile: it may wait for a thread.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def collective_under_way(thread: int) -> list[int] | None:
    """Return the global ranks in the group of the collective that a thread is in, if it is in one."""
    for frame in _all_callers(_frames().get(thread)):
        if frame.f_code.co_filename == _C10D_FILE and frame.f_code.co_name in _COLLECTIVES:
            group: Any = frame.f_locals.get("group") or dist.group.WORLD
            return group_ranks(group)
    return None


def is_ddps(operation: str | None, caller: FrameType | None) -> bool:
    """Whether DDP issued a collective in backward, itself or through a communication hook.

    Autograd calls DDP's reducer, which calls the collective, without any Python in between; it only ever all-reduces. A
    communication hook is recognized by its bucket argument.
    """
    if caller is None or caller.f_code is _ENGINE:
        return operation == "all_reduce"
    return any(isinstance(value, dist.GradBucket) for each in _callers(caller) for value in each.f_locals.values())


def differentiates(caller: FrameType | None) -> bool:
    """Whether a collective in a forward belongs to an autograd function, whose backward may have collectives too.

    `Function.apply` has no frame (since torch 2.14 it is a builtin), so this looks for the frame of a `forward`. One
    without a context, whose class has a `setup_context`, is recognized by its code, and assumed to need a gradient.
    """
    frames = [*_callers(caller)]
    contexts = [context for frame in frames if (context := _context(frame)) is not None]
    return any(any(context.needs_input_grad) for context in contexts) or _is_known_to_differentiate(frames)


def gathers_activations(caller: FrameType | None, own_file: str) -> bool:
    """Whether a gather in a forward belongs to an autograd function that treats all rows as samples.

    `SyncBatchNorm` leaves out ranks with zero rows. Functions in the file `own_file` leave out joined ranks.
    """
    knows = (_SYNC_NORM_FILE, own_file)
    return differentiates(caller) and not any(frame.f_code.co_filename in knows for frame in _callers(caller))


def is_in_model(caller: FrameType | None) -> bool:
    """Whether a collective in a forward belongs to a model: to an autograd function, or below DDP's forward."""
    frames = [*_callers(caller)]
    return (
        any(frame.f_code is _DDP_FORWARD or _context(frame) is not None for frame in frames)
    ) or _is_known_to_differentiate(frames)


def _context(frame: FrameType) -> Any:
    """Return the context of an autograd function, if this is the frame of its `forward` and has one."""
    count = frame.f_code.co_argcount
    first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_varnames else None
    if not count and isinstance(first, tuple):  # forward(*args)
        first = next(iter(first), None)
    return first if isinstance(first, _CONTEXT) else None


def _is_known_to_differentiate(frames: Sequence[FrameType]) -> bool:
    codes = [frame.f_code for frame in frames]
    if any(code.co_filename == _FUNCTIONAL_FILE and code.co_name.endswith("_autograd") for code in codes):
        return True
    if torch.is_grad_enabled():  # `apply` turns it off
        return False
    return not {*_forwards_without_context(torch.autograd.Function)}.isdisjoint(codes)


def _forwards_without_context(kind: Any) -> Iterator[CodeType | None]:
    for each in kind.__subclasses__():
        if each.setup_context is not torch.autograd.Function.setup_context:
            yield getattr(inspect.unwrap(each.forward), "__code__", None)
        yield from _forwards_without_context(each)


def recomputes(caller: FrameType | None) -> bool:
    """Whether a collective in a backward belongs to a forward that a checkpoint reruns."""
    return any(frame.f_code.co_filename == _CHECKPOINT_FILE for frame in _callers(caller))


def is_adjoint(caller: FrameType | None) -> bool:
    """Whether a collective in a backward belongs to an autograd function's backward, and not to a hook."""
    return any(frame.f_code in _BACKWARDS for frame in _callers(caller))


def in_nested_backward() -> bool:
    """Whether the current backward is inside another one, as reentrant checkpointing runs for a part of the model.

    The outer backward may run in a thread of autograd, where it has no frame, while another thread waits for it.
    """
    own, waiting = threading.get_ident(), False
    if all(thread.ident != own or isinstance(thread, threading._DummyThread) for thread in threading.enumerate()):
        waiting = any(frame.f_code is _ENGINE for thread, frame in _frames().items() if thread != own)
    return waiting + sum(frame.f_code is _ENGINE for frame in _all_callers(sys._getframe())) > 1


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, up to a running backward."""
    return itertools.takewhile(lambda each: each.f_code is not _ENGINE, _all_callers(frame))


def _all_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


_PASSES_ON = ("torch.", "deepspeed.comm", "contextlib", "functools")  # between a collective and the code that calls it


class Origin(NamedTuple):
    """Where in Python a collective comes from.

    Attributes:
        function: The frame of the called function of `torch.distributed`, if there is one. Some functions call each
            other (`batch_isend_irecv`, `isend`): this is the outermost.
        caller: The frame that called it.
    """

    function: FrameType | None
    caller: FrameType | None

    @property
    def owner(self) -> str | None:
        """The library that issues the collective, if joined ranks cannot follow its collectives.

        "fsdp": either generation. "dtensor": it gathers or combines the parts of a tensor. "zero": DeepSpeed itself,
        but not user code that calls `deepspeed.comm` (seen in DeepSpeed 0.19.8). "averaging": a torch model averager.
        "checkpoint": also the consolidation of a sharded optimizer's state.
        """
        frame = self.caller
        file, function = ("", "") if frame is None else (frame.f_code.co_filename, frame.f_code.co_name)
        if file.startswith(_FSDP_FOLDER):
            return "fsdp"
        while frame is not None and not frame.f_code.co_filename.startswith(_TENSOR_FOLDER):
            frame = frame.f_back if _is_torchs(frame) or _is_passed_on(frame) else None
        if frame is not None:
            return "dtensor"
        names = (str(frame.f_globals.get("__name__", "")) for frame in _all_callers(self.caller))
        if next((name for name in names if not name.startswith(_PASSES_ON)), "").startswith("deepspeed."):
            return "zero"
        if file.startswith(_MODEL_AVERAGING_FOLDER):
            return "averaging"
        consolidates = file == _ZERO_FILE and function == "_broadcast_object"
        return "checkpoint" if consolidates or file.startswith(_CHECKPOINT_FOLDER) else None


def origin(caller: FrameType | None) -> Origin:
    """Find out where a collective comes from, given the innermost Python frame."""
    function = None
    while caller is not None and (caller.f_code.co_filename in (_C10D_FILE, _LOGGER_FILE) or _is_passed_on(caller)):
        if caller.f_code.co_filename == _C10D_FILE:
            function = caller
        caller = caller.f_back
    if function is not None and function.f_code.co_name.startswith("_"):
        function = None
    return Origin(function, caller)


def _is_passed_on(frame: FrameType) -> bool:
    """Whether this frame only passes a call on: `torch.set_default_device` or another mode, or a function it calls."""
    outer = next((each for each in _all_callers(frame) if _is_torchs(each) or _passes_on(each)), None)
    return outer is not None and _passes_on(outer)


def _passes_on(frame: FrameType) -> bool:
    if frame.f_code.co_name == "__torch_dispatch__":
        return not _is_torchs(frame)  # torch's own are those of FSDP and DTensor
    return frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename == _OVERRIDES_FILE


def _is_torchs(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TORCH_FOLDER)


def refuse_graphs(refuse: Callable[[], None]) -> Callable[[], None]:
    """Call `refuse` before a CUDA graph is captured or replayed; return a function that ends this.

    A graph's replay bypasses all hooks and the dispatcher: its collectives cannot be seen.
    """
    kind: Any = torch.cuda.CUDAGraph

    def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
        def first(*args: Any, **kwargs: Any) -> Any:
            refuse()
            return method(*args, **kwargs)

        return first

    return replace(kind, capture_begin=refusing(kind.capture_begin), replay=refusing(kind.replay))


def is_coalescing(group: dist.ProcessGroup, caller: FrameType | None) -> bool:
    """Whether a `_coalescing_manager` launches a collective: the group's open one, or one with a device, at its end."""
    is_open = any(each.group_name == group.group_name for each in distributed_c10d._world.pg_coalesce_state)
    name = "" if caller is None else caller.f_code.co_name
    return is_open or (name == "_coalescing_manager" and caller.f_locals["device"] is not None)  # type: ignore[union-attr]


def leave_coalescing(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """End torch's `_coalescing_manager` when an error is raised inside it, since torch leaves it open.

    The group's next collective would then wait forever for the manager's end to launch it.
    """
    open_groups = distributed_c10d._world.pg_coalesce_state
    for each in [each for each in open_groups if each.group_name == group.group_name]:
        del open_groups[each]
        for device in {tensor.device for tensor in tensors}:
            with suppress(RuntimeError):  # it was opened without a device
                each._end_coalescing(device)


def gather_object_destination(frame: FrameType, ranks: Sequence[int]) -> int:
    """Return the destination, as a global rank, from the frame of a `gather_object` in a group of these ranks."""
    if "global_dst" in frame.f_locals:  # before torch 2.7
        return int(frame.f_locals["global_dst"])
    return ranks[int(frame.f_locals["group_dst"])]


check_names(
    "torch",
    TORCH,
    {
        _c10d: "_create_work_from_future",
        dist.ProcessGroup: "_end_coalescing unbox",
        dist.Work: "unbox",
        graph: "_engine_run_backward",
        torch._C: (
            "_current_graph_task_id _dispatch_get_all_op_names _dispatch_has_kernel_for_dispatch_key"
            " _dispatch_keyset_full_after DispatchKey"
        ),
        torch.library.Library: "_destroy impl",
    },
)
