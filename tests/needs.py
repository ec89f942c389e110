"""What tests need that not every version of torch or a framework has: it is asked itself, never for its version."""

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel

from torch_join._shadow.lost_hooks import are_lost


def _gloo_can(issue: Callable[[Any], Any]) -> Callable[[], bool]:
    def try_it() -> bool:
        group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))  # type: ignore[call-arg]
        try:
            issue(group).wait()
        except RuntimeError:
            return False
        return True

    return try_it


def _average(group: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
    return group.allreduce([torch.ones(1)], options)


def _scatter_bits(group: Any) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.BAND  # type: ignore[assignment]
    return group._reduce_scatter_base(torch.ones(1), torch.ones(1), options)


def known(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the arguments that a function has parameters for: older versions of a framework may lack some."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(function).parameters}


def _validates_by_a_clock() -> bool:
    from lightning.pytorch import Trainer

    return "timedelta" in str(inspect.signature(Trainer.__init__).parameters["val_check_interval"].annotation)


def _shards_by_parameter() -> bool:
    from accelerate.utils import FullyShardedDataParallelPlugin

    return bool(known(FullyShardedDataParallelPlugin, fsdp_version=2))


def _loads_a_state_that_is_empty() -> bool:
    from accelerate.utils.fsdp_utils import load_fsdp_optimizer

    return "load_sharded_optimizer_state_dict" not in load_fsdp_optimizer.__code__.co_names


_RUNS_ON_THE_CPU = hasattr(torch.cpu.Stream, "record_event")  # before any is lent
# By what is needed, whether it is there.
_FEATURES: dict[str, Callable[[], bool]] = {
    "gloo's ReduceOp.AVG": _gloo_can(_average),
    "gloo's reduce_scatter": _gloo_can(lambda group: group.reduce_scatter([torch.ones(1)], [[torch.ones(1)]])),
    # Where it always adds up, it does so with bits of floats too.
    "gloo's reduce_scatter_tensor by another operation than a sum": lambda: not _gloo_can(_scatter_bits)(),
    "operators that expose their reduce operation": lambda: hasattr(torch.classes.c10d.ReduceOp(), "op"),
    "FSDPModule.set_reduce_scatter_unused_params": lambda: hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    "fully_shard over tensor parallelism in uneven parts": lambda: (
        "FSDP+TP sharding does not support uneven" not in inspect.getsource(_fsdp_param)
    ),
    "a val_check_interval in seconds": _validates_by_a_clock,
    "Accelerate's fsdp_version=2": _shards_by_parameter,
    "Accelerate's loading of a sharded optimizer without a state": _loads_a_state_that_is_empty,
    "Accelerate's ParallelismConfig": lambda: importlib.util.find_spec("accelerate.parallelism_config") is not None,
    "gloo's all_to_all": _gloo_can(lambda group: group.alltoall([torch.ones(1)], [torch.ones(1)])),
    "parameter hooks that a checkpoint's rerun keeps": lambda: not are_lost(),
    "a backend of one's own that can be aborted": lambda: hasattr(dist.Backend, "abort"),
    "a process group that can be bound to any device": lambda: (
        "must be a cuda device" not in inspect.getsource(dist.distributed_c10d)
    ),
    "a store that lists its keys": lambda: hasattr(dist.Store, "list_keys"),
    "a record of gloo's collectives": lambda: hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
    "gloo's complex numbers": _gloo_can(
        lambda group: group.allreduce([torch.ones(1, dtype=torch.complex64)], dist.AllreduceOptions())
    ),
    "fully_shard on the CPU": lambda: _RUNS_ON_THE_CPU,
    "fully_shard's ignored_params": lambda: "ignored_params" in inspect.signature(fully_shard).parameters,
    # Else what a module that is not in the window's last backward has accumulated stays unreduced, on any inputs.
    "fully_shard's reduction of what the last backward does not come to": lambda: (
        "is_unsharded" not in FSDPState._root_post_backward_final_callback.__code__.co_names
    ),
    # Else its connections keep the one that they were made with.
    "gloo's timeout that can be set later": lambda: hasattr(dist.ProcessGroupGloo, "set_timeout"),
    # Else what DDP sends before the second changes what the first has saved for backward.
    "DDP's two forwards with BatchNorm before a backward": lambda: (
        "_unsafe_preserve_version_counter" in DistributedDataParallel._sync_buffers.__code__.co_names
    ),
}


@functools.cache
def has(feature: str) -> bool:
    """Whether it is there."""
    return _FEATURES[feature]()


def needs(feature: str) -> pytest.MarkDecorator:
    """Mark what is skipped where a feature is not there."""
    return pytest.mark.skipif(not has(feature), reason=f"needs {feature}")


def lend_events_to_the_cpu() -> None:
    """Have `fully_shard` run on the CPU where torch has no events there (2.6): so tests need no accelerator.

    Gloo has no mean there either, and FSDP asks for one: what it does for half precision, a sum, is right for all. What
    is gathered anew counts as changed there, as it does on no accelerator.
    """
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    stream: Any = torch.cpu.Stream
    stream.record_event = lambda _: None
    stream.wait_event = lambda *_: None
    collectives: Any = _fsdp_collectives
    divide = collectives._get_gradient_divide_factors
    collectives._get_gradient_divide_factors = lambda *groups: divide(*groups[:2], torch.float16)
    param_group: Any = _fsdp_param_group
    copy_out, reduce = param_group.foreach_all_gather_copy_out, param_group.foreach_reduce

    def copy_unseen(result: Any, params: list[Any], group: Any) -> None:
        with contextlib.ExitStack() as stack:
            for tensor in (each for param in params for each in param.all_gather_outputs):
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))  # type: ignore[attr-defined]
            copy_out(result, params, group)

    def reduce_with_event(*given: Any) -> tuple[Any, ...]:
        *others, event, output = reduce(*given)
        return *others, event or object(), output  # of the all-reduce FSDP insists on one

    param_group.foreach_all_gather_copy_out = copy_unseen
    param_group.foreach_reduce = reduce_with_event
