"""The description of a collective, from which joined ranks take part in it; and the calls that are refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_join._compat import operators as _compat_c10d
from torch_join._control.codec import brief, closed

OBJECT_OPERATIONS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
OPERATIONS = frozenset({*_compat_c10d.OPERATORS.values(), *OBJECT_OPERATIONS})
_FROM_ROOT = ("broadcast", "scatter", "broadcast_object_list", "scatter_object_list")


class Refusal(NamedTuple):
    """A call in which a joined rank cannot take part.

    Attributes:
        what: The call, for the docs.
        why: Why a joined rank cannot.
        instead: The replacement.
    """

    what: str
    why: str
    instead: str


_POINT_TO_POINT = Refusal(
    "`send`, `recv`, `isend`, `irecv`, `batch_isend_irecv`, `send_object_list`, `recv_object_list`",
    "finished ranks cannot see it, since only the sender and the receiver take part",
    "a collective such as `broadcast` or `all_gather`, or communicate outside the loop",
)
_JOINED_ROOT = Refusal(
    "`broadcast`, `scatter`, `broadcast_object_list` and `scatter_object_list` from a rank that has finished",
    "the source rank has finished and has nothing new to send",
    "an active rank as the source: `join.active_ranks[0]`",
)
_UNEQUAL = Refusal(
    "`all_to_all` and `all_to_all_single` with unequal sizes",
    "only the receivers know the sizes that they expect from a finished rank",
    "equal sizes, padded where necessary",
)
_INTEGER_AVERAGE = Refusal(
    "`ReduceOp.AVG` of integers",
    "scaling integers cannot give the mean over the active ranks alone",
    "`ReduceOp.SUM`, and divide by the number of active ranks",
)
_PREMUL_SUM = Refusal(
    "`ReduceOp.PREMUL_SUM`",
    "its factor cannot be read",
    "`ReduceOp.SUM` of the tensor multiplied by the factor",
)
_FSDP = Refusal(
    "a collective of FSDP for a model that was not passed to `Join`, or outside its steps (`summon_full_params`, a"
    " state dict)",
    "it needs the parameter shards of finished ranks, and zeros in their place would be wrong",
    "`Join([model, optimizer])` with the sharded model, or do it after the loop, on all ranks",
)
_DTENSOR = Refusal(
    "a collective that assembles a `DTensor` (`full_tensor`, `redistribute`, norms of sharded gradients)",
    "it needs the shards of finished ranks, and zeros in their place would be wrong",
    "`torch.nn.utils.clip_grad_norm_` to clip, or do it after the loop, on all ranks",
)
_ZERO = Refusal(
    "a collective of DeepSpeed outside the forwards, backwards, steps and checkpoints of an engine passed to `Join`",
    "it needs the shards of finished ranks, and zeros in their place would be wrong",
    "the engine itself, `Join([engine])`; and read or write whole parameters before or after the loop",
)
_MODEL_AVERAGING = Refusal(
    "the averaging of parameters by `torch.distributed.algorithms.model_averaging`",
    "it divides the sum of all ranks' parameters by the world size, but a finished rank no longer trains",
    "DistributedDataParallel, which averages gradients, or the same number of batches on every rank",
)
_CHECKPOINT = Refusal(
    "`torch.distributed.checkpoint.save`, `async_save` and `load`, `consolidate_state_dict`",
    "it needs a part from each rank, and finished ranks do not run it",
    "it after the loop, on all ranks, or `torch.save` in the loop, only on `join.active_ranks[0]`",
)
# By `Origin.owner`.
_OWNERS = {"fsdp": _FSDP, "dtensor": _DTENSOR, "zero": _ZERO, "averaging": _MODEL_AVERAGING, "checkpoint": _CHECKPOINT}

_MOST_ELEMENTS = 1 << 40  # of one tensor: more than any device holds
_MOST_OBJECTS = 1 << 20


@closed("stand-in")
class TensorSpec(NamedTuple):
    """The shape and dtype of a stand-in for a tensor (`sparse_dim` is `None` for a dense one)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sparse_dim: int | None = None

    def validate(self) -> None:
        """Raise a `ValueError` if no such tensor can exist."""
        # The product comes last: for many or long numbers it takes seconds, in which no other thread runs.
        is_short = len(self.shape) <= 64 and all(0 <= length <= _MOST_ELEMENTS for length in self.shape)
        if not is_short or math.prod(self.shape) > _MOST_ELEMENTS:
            raise ValueError(f"no tensor has the shape {brief(self.shape)}")
        if self.sparse_dim is not None and not 0 <= self.sparse_dim <= len(self.shape):
            raise ValueError(f"{self.sparse_dim} sparse dimensions of {len(self.shape)}")


@closed("call")
@dataclass(frozen=True)
class Call:
    """A collective that an active rank issues, with everything that a joined rank needs to take part.

    Attributes:
        operation: Its name in `torch.distributed` (an object collective is one operation).
        group: The name of its process group.
        device: The device type of its tensors.
        inputs: The tensors that it sends, or both sends and receives; lists are flattened.
        outputs: The tensors it receives.
        reduce_op: The name of the reduce operation.
        root: The source or destination, as a global rank.
        objects: The number of objects of a `broadcast_object_list`.
        timeout: How long a `monitored_barrier` waits, in seconds.
        wait_all_ranks: The argument of a `monitored_barrier`.
    """

    operation: str
    group: str
    device: str = "cpu"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    reduce_op: str | None = None
    root: int | None = None
    objects: int = 0
    timeout: float | None = None
    wait_all_ranks: bool = False

    def validate(self) -> None:
        """Raise a `ValueError` if no such collective can exist."""
        if self.operation not in OPERATIONS:
            raise ValueError(f"no collective is called {self.operation[:60]!r}")
        if self.reduce_op is not None and self.reduce_op not in dist.ReduceOp.RedOpType.__members__:
            raise ValueError(f"no reduction is called {self.reduce_op[:60]!r}")
        if not 0 <= self.objects <= _MOST_OBJECTS or not 0 <= (self.timeout or 0) < 1e9:
            raise ValueError(f"{self.objects} objects, {self.timeout} seconds")
        torch.device(self.device)


def describe(operation: str, group: str, root: int | None, args: dict[str, Any]) -> Call:
    """Describe a collective from its operator's arguments; an object collective, from those of its first operator."""
    inputs, outputs = tensors_in(args, "input", "tensor"), tensors_in(args, "output")
    device = next((tensor.device.type for tensor in (*inputs, *outputs)), "cpu")
    if operation in OBJECT_OPERATIONS:
        return Call(operation, group, device, root=root, objects=inputs[0].numel())
    if operation == "barrier":
        return Call(operation, group, device)
    if operation == "monitored_barrier":
        wait_all_ranks = bool(args.get("wait_all_ranks", False))
        return Call(operation, group, device, timeout=args["timeout"] / 1000, wait_all_ranks=wait_all_ranks)
    if operation == "gather":
        outputs = []  # only the destination has any
    if operation == "scatter":
        inputs = []  # only the source has any
    reduce_op = _compat_c10d.unbox_reduce_op(args["reduce_op"]) if "reduce_op" in args else None
    return Call(operation, group, device, _specs(inputs), _specs(outputs), reduce_op, root)


def starts_objects(name: str, operation: str, args: dict[str, Any]) -> bool:
    """Whether a collective is the first of those that make up the object collective `name`."""
    if operation != ("all_gather" if "gather" in name else "broadcast"):
        return False
    # The first one exchanges sizes; the next one of its kind carries bytes.
    return tensors_in(args, "input", "tensor")[0].dtype == torch.int64


def refusal(call: Call, args: dict[str, Any], joined: Sequence[int], origin: _compat_c10d.Origin) -> Refusal | None:
    """Return why joined ranks cannot take part in a collective, or `None` if they can.

    Args:
        call: Its description.
        args: Its operator's arguments.
        joined: The joined members of its group.
        origin: Where it comes from.
    """
    if (owner := origin.owner) is not None:
        return _OWNERS[owner]
    if call.operation in ("send", "recv"):
        return _POINT_TO_POINT
    # In a backward, the root sends a gradient, which is zero on a joined rank.
    if call.operation in _FROM_ROOT and call.root in joined and not _compat_c10d.in_backward():
        return _JOINED_ROOT
    if call.operation in ("all_to_all", "all_to_all_single") and not _is_equal_exchange(call, args):
        return _UNEQUAL
    if call.reduce_op == "PREMUL_SUM":
        return _PREMUL_SUM
    if call.reduce_op == "AVG" and not all(spec.dtype.is_floating_point for spec in call.inputs):
        return _INTEGER_AVERAGE
    return None


def scale_inputs(call: Call, args: dict[str, Any], factor: float, is_destination: bool) -> dict[str, Any]:
    """Multiply the inputs of a reducing collective; return its operator's arguments with the products.

    A tensor is changed in place only if the result overwrites it anyway.
    """
    in_place = "tensors" in args and (call.operation != "reduce" or is_destination)
    if in_place:
        # In inference mode, because inference tensors can be changed only there.
        with torch.inference_mode():
            for tensor in tensors_in(args, "tensors"):
                tensor.mul_(factor)
        return args
    with torch.no_grad():
        return {
            name: multiplied(value, factor) if name.startswith(("input", "tensor")) else value
            for name, value in args.items()
        }


def multiplied(value: Any, factor: float) -> Any:
    """Return an operator's argument, a tensor or nested lists of tensors, times `factor`; integers stay unchanged."""
    return tree_map_only(Tensor, lambda tensor: tensor * factor if is_inexact(tensor) else tensor, value)


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers, which can be weighted."""
    return tensor.is_floating_point() or tensor.is_complex()


def _is_equal_exchange(call: Call, args: dict[str, Any]) -> bool:
    if call.operation == "all_to_all":
        return len({*call.inputs, *call.outputs}) == 1
    splits = {*args.get("input_split_sizes", ()), *args.get("output_split_sizes", ())}
    return call.inputs == call.outputs and len(splits) <= 1


def tensors_in(args: dict[str, Any], *prefixes: str) -> list[Tensor]:
    """Return the tensors in an operator's arguments with these prefixes; lists are flattened."""
    return tree_leaves([value for name, value in args.items() if name.startswith(prefixes) and "split" not in name])


def _specs(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.dtype, tuple(t.shape), t.sparse_dim() if t.is_sparse else None) for t in tensors)
