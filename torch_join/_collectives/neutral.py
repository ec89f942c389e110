"""A joined rank's contribution to each collective, which does not change the active ranks' result."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.errors import JoinError
from torch_join._collectives.call import Call, TensorSpec
from torch_join._compat import operators as _compat_c10d


def _lowest(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        # Some 8-bit floats have no infinity.
        return -torch.inf if dtype.itemsize > 1 else torch.finfo(dtype).min
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return -_lowest(dtype)
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _all_bits(dtype: torch.dtype) -> float:
    # In a signed integer, all bits set is minus one. Backends have no bitwise operations on floats.
    return -1 if dtype.is_signed else _highest(dtype)


class Reduction(NamedTuple):
    """A joined rank's contribution to one reduce operation.

    Attributes:
        op: The name of the reduce operation.
        contribution: The contribution, in words.
        result: The active ranks' result, in words.
        value: The value contributed, by the tensors' dtype.
    """

    op: str
    contribution: str
    result: str
    value: Callable[[torch.dtype], float]


REDUCTIONS = (
    Reduction("SUM", "zeros", "the sum over the active ranks", lambda _: 0),
    Reduction("AVG", "zeros, and active ranks scale what they send", "the mean over the active ranks", lambda _: 0),
    Reduction("PRODUCT", "ones", "the product over the active ranks", lambda _: 1),
    Reduction("MIN", "the dtype's highest value", "the minimum over the active ranks", _highest),
    Reduction("MAX", "the dtype's lowest value", "the maximum over the active ranks", _lowest),
    Reduction("BAND", "all bits set", "the bitwise and over the active ranks", _all_bits),
    Reduction("BOR", "zeros", "the bitwise or over the active ranks", lambda _: 0),
    Reduction("BXOR", "zeros", "the bitwise exclusive or over the active ranks", lambda _: 0),
)
_VALUES = {reduction.op: reduction.value for reduction in REDUCTIONS}


class Entry(NamedTuple):
    """How a joined rank takes part in one operation.

    Attributes:
        operation: Its name in `torch.distributed`.
        contribution: A joined rank's contribution, in words.
        result: The active ranks' result, in words.
        issue: Issues it on a joined rank, and waits if it cannot be asynchronous.
    """

    operation: str
    contribution: str
    result: str
    issue: Callable[[Call, dist.ProcessGroup], dist.Work | None]


def begin(call: Call) -> dist.Work | None:
    """Take part in a collective of the active ranks, without waiting for it.

    Args:
        call: The active ranks' description of the collective.

    Returns:
        The work to wait for; `None` if it is done, or if this rank is not a member of the group.

    Raises:
        JoinError: The table lacks the operation.
    """
    entry = ENTRIES.get(call.operation)
    if entry is None:
        raise JoinError(f"An active rank announced {call.operation!r}, which finished ranks cannot take part in.")
    group = _compat_c10d.group_named(call.group)
    return None if group is None else entry.issue(call, group)


def mirror(call: Call) -> None:
    """Take part in a collective of the active ranks, and wait for it.

    Args:
        call: The active ranks' description of the collective. If this rank is not in its group, nothing happens.

    Raises:
        JoinError: The table lacks the operation.
    """
    if (work := begin(call)) is not None:
        work.wait()


def _blank(specs: Sequence[TensorSpec], call: Call) -> list[Tensor]:
    """Make tensors to receive into, or to send if only zeros are sent."""
    return [_filled(spec, 0, call.device) for spec in specs]


def _neutral(call: Call) -> list[Tensor]:
    """Make the tensors that are sent into a reduction."""
    value = _VALUES[str(call.reduce_op)]
    return [_filled(spec, value(spec.dtype), call.device) for spec in call.inputs]


def _filled(spec: TensorSpec, value: float, device: str) -> Tensor:
    if spec.sparse_dim is None:
        return torch.full(spec.shape, value, dtype=spec.dtype, device=device)
    # Missing values of a sparse tensor are zeros: neutral in a sum, the only sparse reduction that backends have.
    indices = torch.empty((spec.sparse_dim, 0), dtype=torch.int64, device=device)
    values = torch.empty((0, *spec.shape[spec.sparse_dim :]), dtype=spec.dtype, device=device)
    return torch.sparse_coo_tensor(indices, values, spec.shape, check_invariants=False)


def _options(kind: Any, call: Call, group: dist.ProcessGroup) -> Any:
    options = kind()
    if hasattr(options, "asyncOp"):  # otherwise all of its kind are asynchronous
        options.asyncOp = True
    if call.reduce_op is not None:
        options.reduceOp = getattr(dist.ReduceOp, call.reduce_op)
    if call.root is not None:
        options.rootRank = dist.get_group_rank(group, call.root)
    return options


def _in_place(method: str, kind: Any, call: Call, group: dist.ProcessGroup) -> dist.Work | None:
    tensors = _blank(call.inputs, call) if call.reduce_op is None else _neutral(call)
    return getattr(group, method)(tensors, _options(kind, call, group))  # type: ignore[no-any-return]


def _reduce_scatter(call: Call, group: dist.ProcessGroup) -> dist.Work | None:
    own = [call.inputs[group.rank()]]
    options = _options(dist.ReduceScatterOptions, call, group)
    return group.reduce_scatter(_blank(own, call), [_neutral(call)], options)


def _all_gather(call: Call, group: dist.ProcessGroup) -> dist.Work | None:
    own = [call.outputs[group.rank()]]
    options = _options(_compat_c10d.AllgatherOptions, call, group)
    return group.allgather([_blank(call.outputs, call)], _blank(own, call), options)


def _all_gather_coalesced(call: Call, group: dist.ProcessGroup) -> dist.Work | None:
    options = _options(_compat_c10d.AllgatherOptions, call, group)
    outputs = [_blank(call.inputs, call) for _ in range(group.size())]
    return group.allgather_coalesced(outputs, _blank(call.inputs, call), options)


def _single(call: Call, group: dist.ProcessGroup) -> dist.Work | None:
    reduces = call.reduce_op is not None
    options = _options(dist.ReduceScatterOptions if reduces else _compat_c10d.AllgatherOptions, call, group)
    outputs, inputs = _blank(call.outputs, call), _neutral(call) if reduces else _blank(call.inputs, call)
    if call.operation.endswith("coalesced"):
        return _compat_c10d.issue(group, call.operation, outputs, inputs, options)
    return _compat_c10d.issue(group, call.operation, outputs[0], inputs[0], options)


def _gather(call: Call, group: dist.ProcessGroup) -> dist.Work | None:
    options = _options(dist.GatherOptions, call, group)
    outputs = [_blank(call.inputs * group.size(), call)] if options.rootRank == group.rank() else []
    return group.gather(outputs, _blank(call.inputs, call), options)


def _scatter(call: Call, group: dist.ProcessGroup) -> dist.Work | None:
    options = _options(dist.ScatterOptions, call, group)
    inputs = [_blank(call.outputs * group.size(), call)] if options.rootRank == group.rank() else []
    return group.scatter(_blank(call.outputs, call), inputs, options)


def _all_to_all(call: Call, group: dist.ProcessGroup) -> dist.Work | None:
    outputs, inputs = _blank(call.outputs, call), _blank(call.inputs, call)
    options = _options(dist.AllToAllOptions, call, group)
    if call.operation == "all_to_all":
        return group.alltoall(outputs, inputs, options)
    return _compat_c10d.issue(group, call.operation, outputs[0], inputs[0], [], [], options)


def _barrier(call: Call, group: dist.ProcessGroup) -> dist.Work | None:
    if call.operation == "barrier":
        work: dist.Work | None = dist.barrier(group, async_op=True)
        return work
    dist.monitored_barrier(group, timedelta(seconds=call.timeout or 0.0), call.wait_all_ranks)
    return None


def _objects(call: Call, group: dist.ProcessGroup) -> None:
    if call.operation == "all_gather_object":
        dist.all_gather_object([None] * group.size(), None, group)
    elif call.operation == "gather_object":
        is_root = call.root == dist.get_rank()
        dist.gather_object(None, [None] * group.size() if is_root else None, call.root, group)
    elif call.operation == "broadcast_object_list":
        device = torch.device(call.device)
        dist.broadcast_object_list([None] * call.objects, call.root, group, device)
    else:
        dist.scatter_object_list([None], None, call.root, group)


_all_reduce = partial(_in_place, "allreduce", dist.AllreduceOptions)
_all_reduce_coalesced = partial(_in_place, "allreduce_coalesced", dist.AllreduceCoalescedOptions)
_reduce = partial(_in_place, "reduce", dist.ReduceOptions)
_broadcast = partial(_in_place, "broadcast", dist.BroadcastOptions)
_REDUCED = "as for the reduce operation"
_PART = "their part of the reduction over the active ranks"
_PARTS = "their parts of the reductions over the active ranks"
_GATHERED = "zeros in the finished ranks' places"
ENTRIES = {
    entry.operation: entry
    for entry in (
        Entry("all_reduce", _REDUCED, "the reduction over the active ranks", _all_reduce),
        Entry("all_reduce_coalesced", _REDUCED, "the reductions over the active ranks", _all_reduce_coalesced),
        Entry("reduce", _REDUCED, "on the destination: the reduction over the active ranks", _reduce),
        Entry("reduce_scatter", _REDUCED, _PART, _reduce_scatter),
        Entry("reduce_scatter_single", _REDUCED, _PART, _single),
        Entry("reduce_scatter_single_coalesced", _REDUCED, _PARTS, _single),
        Entry("all_gather", "zeros", _GATHERED, _all_gather),
        Entry("all_gather_coalesced", "zeros", _GATHERED, _all_gather_coalesced),
        Entry("all_gather_single", "zeros", _GATHERED, _single),
        Entry("all_gather_single_coalesced", "zeros", _GATHERED, _single),
        Entry("gather", "zeros", f"on the destination: {_GATHERED}", _gather),
        Entry("scatter", "nothing, it receives and forgets", "what the source sends them", _scatter),
        Entry("broadcast", "nothing, it receives and forgets", "what the source sends", _broadcast),
        Entry("all_to_all", "zeros", _GATHERED, _all_to_all),
        Entry("all_to_all_single", "zeros", _GATHERED, _all_to_all),
        Entry("barrier", "its arrival", "nothing", _barrier),
        Entry("monitored_barrier", "its arrival", "nothing", _barrier),
        Entry("all_gather_object", "`None`", "`None` in the finished ranks' places", _objects),
        Entry("gather_object", "`None`", "on the destination: `None` in the finished ranks' places", _objects),
        Entry("broadcast_object_list", "nothing, it receives and forgets", "what the source sends", _objects),
        Entry("scatter_object_list", "nothing, it receives and forgets", "what the source sends them", _objects),
    )
}
