"""The private names of torch for DistributedDataParallel, autograd and tensors (seen in torch 2.13.0).

`tests/core/_base/test_compat.py` fails when one of them is gone.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from torch_join._base.attributes import setting
from torch_join._base.errors import JoinError, UnsupportedError
from torch_join._base.names import TORCH, check_names


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the store that `group` was built from."""
    return distributed_c10d._world.pg_map[group][1]


def broadcast_coalesced(group: dist.ProcessGroup, tensors: Sequence[Tensor], bucket_bytes: int, src: int) -> None:
    """Broadcast `tensors` in place from rank `src` of `group`, packed as DDP packs its buffers."""
    dist._broadcast_coalesced(group, list(tensors), bucket_bytes, src)


def unsupported_ddp_feature(ddp: DistributedDataParallel) -> str | None:
    """Return the option of `ddp` that a zero-gradient pass cannot handle, if it has one."""
    if ddp._use_python_reducer:
        return "torch._dynamo's python_reducer"
    if ddp._delay_all_reduce_params:
        return "delay_all_reduce_named_params"
    if ddp.mixed_precision is not None:
        return "DDP's mixed_precision argument (autocast is fine)"
    return None


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook replaces the model's all-reduces."""
    return bool(ddp._comm_hooks)


def has_local_sgd_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook leaves the averaging of parameters to an optimizer."""
    return any(type(state).__name__ == "PostLocalSGDState" for _, state in ddp._comm_hooks)


def forwards_without_collectives(ddp: DistributedDataParallel) -> bool:
    """Whether DDP issues no collective in the model's forwards: no buffers to sync, no buckets left to rebuild."""
    return ddp._has_rebuilt_buckets and not broadcasts_buffers(ddp)


def broadcasts_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether the model's forwards broadcast buffers."""
    return bool(ddp.broadcast_buffers and ddp.modules_buffers)


def buffers_from(ddp: DistributedDataParallel, choose: Callable[[Sequence[int]], int]) -> AbstractContextManager[None]:
    """Make the model's forwards broadcast buffers from the rank that `choose` picks from its group's global ranks."""
    own, ranks = ddp._sync_module_buffers, dist.get_process_group_ranks(ddp.process_group)
    return setting(ddp, _sync_module_buffers=lambda _: own(choose(ranks)))  # type: ignore[no-untyped-call]


def sync_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcast a model's buffers, as its next forward would."""
    with torch.no_grad():
        ddp._sync_buffers()  # type: ignore[no-untyped-call]


def wrap(ddp: DistributedDataParallel, module: nn.Module) -> None:
    """Give a model another inner module: `ddp.module = module`, without the checks of `nn.Module` (10 us)."""
    ddp._modules["module"] = module


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether `module`'s own buffer `name` is part of its state dict."""
    return name not in module._non_persistent_buffers_set


def set_buffer(module: nn.Module, name: str, buffer: Tensor | None, persistent: bool) -> None:
    """Set a buffer as the last of `module`'s own, replacing any of that name; `None` keeps its place."""
    if buffer is not None:
        module._buffers.pop(name, None)
    module._buffers[name] = buffer
    (set.discard if persistent else set.add)(module._non_persistent_buffers_set, name)


def wait_for_device(kind: str, watch: Callable[[], Callable[[], None]]) -> None:
    """Wait until an accelerator has finished all queued work, since its collectives return before they have run.

    Args:
        kind: The kind of device.
        watch: Returns a function to call repeatedly meanwhile, which may raise: collectives with a failed rank never
            end.
    """
    if kind == "cpu":
        return
    done, pause = torch.Event(kind), 1e-5
    done.record()
    if not done.query():
        check = watch()
        while not done.query():
            check()
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
    torch.accelerator.current_stream().synchronize()


def check_not_captured(parameter: Tensor) -> None:
    """Raise if a CUDA graph captures a forward of the model of this parameter.

    Raises:
        UnsupportedError: A graph captures it.
    """
    if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "A CUDA graph captured a forward of a model that was passed to Join. Replays would skip the hooks that"
            " weight gradients and announce steps. Capture parts of the model without its DistributedDataParallel,"
            " outside the loop, or run without graphs."
        )


def backward_hooks(parameter: Tensor) -> dict[int, Any]:
    """Return the dictionary that `parameter.register_hook` fills (autograd reads it on each backward)."""
    return {} if parameter._backward_hooks is None else parameter._backward_hooks


def post_accumulate_hooks(parameter: Tensor) -> dict[int, Any]:
    """Return the dictionary that `register_post_accumulate_grad_hook` fills (autograd reads it on each backward)."""
    return parameter._post_accumulate_grad_hooks or {}


def differentiable(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output from which a backward can start, as DDP finds them, except leaves.

    A leaf, such as a parameter that a model returns, outlives the forward, and a backward may reach it in other ways.
    """
    tensors = [output] if isinstance(output, Tensor) else _find_tensors(output)  # type: ignore[no-untyped-call]
    return [tensor for tensor in tensors if tensor.grad_fn is not None]


def check_reduction_finished(ddp: DistributedDataParallel) -> None:
    """Raise DDP's own error, as its next forward would, if the last backward left gradients unaveraged."""
    ddp.reducer._check_reducer_finalized()


def ignored_and_trained(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the trained parameters that DDP was told to ignore."""
    named = ddp.module.named_parameters(remove_duplicate=False)
    return [name for name, p in named if p.requires_grad and name in ddp.parameters_to_ignore]


def averaged_parameters(ddp: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters that DDP averages, in its order: those that were trainable when it wrapped the model."""
    named: Any = ddp.module.named_parameters()
    parameters = [p for name, p in named if name not in ddp.parameters_to_ignore]
    if all(p.requires_grad for p in parameters):
        return parameters
    # Parameters may have been frozen or unfrozen since then: only DDP's buckets show what it averages.
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    averaged = {id(p) for bucket in buckets for p in bucket.parameters()}
    return [p for p in parameters if id(p) in averaged]


def norms(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the 1-norm of each tensor on its device, without a transfer, and in as few kernels as possible."""
    found = iter(torch._foreach_norm(there, 1) if (there := [t for t in tensors if t is not None]) else ())
    return [None if tensor is None else next(found) for tensor in tensors]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the shard of a `DTensor` or a flat parameter; any other tensor itself."""
    if type(tensor) is Tensor:
        return tensor
    part: Tensor = getattr(tensor, "_local_tensor", getattr(tensor, "_local_shard", tensor))
    return part


def writes(tensor: Tensor) -> int:
    """Return how often a tensor, or this rank's part of a `DTensor`, was written to; 0 for FSDP1's views."""
    part = getattr(tensor, "_local_tensor", None)
    if part is not None:
        return tensor._version + int(part._version)
    return 0 if is_shard(tensor) else tensor._version


def shard_hooks(tensor: Tensor) -> int:
    """Return the number of gradient hooks of a `DTensor`; 0 for other tensors: FSDP1 registers some itself."""
    if getattr(tensor, "_local_tensor", None) is None:
        return 0
    return len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def values_of(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the values of each tensor on this rank, detached: a `DTensor`'s shard, a sparse tensor's values."""
    parts = (None if tensor is None else local_part(tensor) for tensor in tensors)
    return [None if p is None else (p.coalesce().values() if p.is_sparse else p).detach() for p in parts]


def expect_gradients(ddp: DistributedDataParallel, output: Tensor) -> None:
    """Make DDP expect, in the next backward, gradients of just the parameters on which `output` depends."""
    ddp.reducer.prepare_for_backward([output])


def delays_all_reduce(ddp: DistributedDataParallel) -> bool:
    """Whether DDP averages only at the end of the next backward, as in the first one under `static_graph`."""
    return bool(ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued)


def steps_in_backward(parameters: Iterable[Tensor]) -> bool:
    """Whether an optimizer may step a parameter in backward, by a hook or by FSDP."""
    return any(p._post_accumulate_grad_hooks or hasattr(p, "_in_backward_optimizers") for p in parameters)


def parameters_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return the modules' own parameters, without walking through their submodules again."""
    return [p for module in modules for p in module._parameters.values() if p is not None]


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is this rank's part of a tensor that is sharded by FSDP or as a `DTensor`."""
    return (
        getattr(tensor, "_local_tensor", False) is not False
        or getattr(tensor, "_fsdp_flattened", False) is not False
        or getattr(tensor, "_is_flat_param", False) is not False
    )


def will_accumulate(parameter: Tensor) -> bool:
    """Whether this thread's current backward adds to the gradient of `parameter`."""
    return parameter.requires_grad and will_run(accumulator(parameter))


def accumulator(parameter: Tensor) -> Any:
    """Return the node that accumulates the gradient of `parameter`, which must require one."""
    return get_gradient_edge(parameter).node


def will_run(node: Any) -> bool:
    """Whether this thread's current backward reaches a node that accumulates a parameter's gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # `autograd.grad` is computing this very gradient
        return False


def used_parameters(ddp: DistributedDataParallel) -> list[bool]:
    """Return which of DDP's parameters some rank used in the last backward with `find_unused_parameters`."""
    return [bool(used) for used in ddp.reducer._get_local_used_map().tolist()]


def has_rebuilt_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether DDP has ordered its buckets by a backward's gradients, or never will."""
    return ddp._has_rebuilt_buckets or (ddp.find_unused_parameters and not ddp.static_graph)


def rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Rebuild buckets, as DDP's next forward would after the first backward that syncs; return whether that was due."""
    # Buckets outlive a loop that runs under `inference_mode`.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        rebuilt: bool = ddp.reducer._rebuild_buckets()
    if rebuilt:
        ddp._has_rebuilt_buckets = True
    return rebuilt


def is_communication_error(error: BaseException) -> bool:
    """Whether `error` comes from a collective (gloo raises plain `RuntimeError`s)."""
    signs = ("gloo", "pair closure", "Connection closed by peer", "Connection reset by peer")
    if isinstance(error, JoinError):  # its message says more already
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def backward_in_progress() -> int:
    """Return a number for the backward that this thread is in, -1 outside of one."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the current backward, after callbacks that were queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def disabled_join_config() -> Any:
    """Return the config that tells `Join.notify_join_context` that there is no context."""
    return _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


def configure(joinable: Joinable, config: Any = None) -> Callable[[], None]:
    """Set the config of `joinable` for torch's `Join.notify_join_context`; return a function that disables it.

    It is disabled even if it was enabled before: torch's Join leaves it enabled when it ends, and then every later
    forward of a model would wait for all ranks.
    """
    before = joinable._join_config
    after = disabled_join_config() if before.enable else before
    joinable._join_config = config or after
    return partial(setattr, joinable, "_join_config", after)


def without_step_hooks(optimizer: Any) -> AbstractContextManager[None]:
    """Make an optimizer's steps run none of its registered hooks inside."""
    return setting(optimizer, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})


def zero_shard(zero: Any, rank: int) -> list[Tensor]:
    """Return the parameters that `rank` steps in a `ZeroRedundancyOptimizer`."""
    return [p for group in zero._partition_parameters()[rank] for p in group["params"]]


# Dynamo's function that returns its callback for the frames of this thread, which is `None` if nothing is compiled.
# Older versions may lack it: hooks cost more then.
compiles_frames: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)


def check_reduced(ddp: DistributedDataParallel, watch: Callable[[], Callable[[], None]]) -> None:
    """Raise the error of DDP's next forward already now, if the backward that has just synced left parameters out.

    Ranks that have used these parameters are waiting for their gradients, so a loop in which ranks meet before the next
    forward would never reach that error. All ranks call this: in DDP's first iteration it agrees on the order of the
    buckets, as the next forward would. For that it waits for the device (see `wait_for_device`).

    Raises:
        RuntimeError: DDP's own error, which lists the parameters and the remedies.
    """
    if not has_rebuilt_buckets(ddp):
        check_reduction_finished(ddp)
        wait_for_device(next(ddp.parameters()).device.type, watch)
    rebuild_buckets(ddp)


check_names(
    "torch",
    TORCH,
    {
        DistributedDataParallel: (
            "mixed_precision modules_buffers parameters_to_ignore reducer static_graph _comm_hooks _has_rebuilt_buckets"
            " _delay_all_reduce_params _static_graph_delay_allreduce_enqueued _sync_buffers _sync_module_buffers"
            " _use_python_reducer"
        ),
        dist.Reducer: (
            "prepare_for_backward _check_reducer_finalized _get_local_used_map _get_zeros_like_grad_buckets"
            " _rebuild_buckets"
        ),
        Joinable: "_join_config",
        Tensor: "_backward_hooks _post_accumulate_grad_hooks",
        dist: "_broadcast_coalesced",
        distributed_c10d: "_world",
        nn.Module: "_buffers _modules _non_persistent_buffers_set _parameters",
        torch: "_foreach_norm",
        torch._C: "_current_graph_task_id _will_engine_execute_node",
        torch.autograd.Variable: "_execution_engine",
        torch.optim.Optimizer: "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
        type(distributed_c10d._world): "pg_group_ranks pg_map pg_names pg_coalesce_state",
    },
)
