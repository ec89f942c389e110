"""Refuses objects with which training would be wrong or wait forever, when a `Join` is created."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import UnsupportedError
from torch_join._compat import ddp as _compat

# Modules whose classes shard a model, or an optimizer's state, by their own collectives (DeepSpeed's: as of 0.19.8).
_SHARDING = (
    *("deepspeed.runtime.zero", "deepspeed.runtime.bf16_optimizer", "deepspeed.runtime.pipe"),
    *("fairscale.nn.data_parallel", "fairscale.optim.oss", "megatron.core.optimizer.distrib_optimizer"),
    *("colossalai.zero", "apex.contrib.optimizers.distributed_fused"),
)
_LOCAL_SGD = "torch.distributed.optim.post_localSGD_optimizer"


def check_supported(thing: Any, joinables: Sequence[Any]) -> None:
    """Raise if `thing` cannot take part.

    Raises:
        UnsupportedError: It is a `DataParallel`; or it holds a `DistributedDataParallel` that is not among `joinables`;
            or it is trained by post-local SGD; or a package other than torch shards it.
    """
    name = type(thing).__name__
    modules = [*thing.modules()] if isinstance(thing, nn.Module) else []
    if what := _sharded_elsewhere(thing, modules):
        raise UnsupportedError(
            f"{name} is sharded by {what}, whose collectives need the shards of finished ranks. With DeepSpeed, pass"
            " the engine to Join. Otherwise use fully_shard, FullyShardedDataParallel or ZeroRedundancyOptimizer, or"
            " train without Join and give every rank the same number of batches."
        )
    if isinstance(thing, nn.DataParallel):
        raise UnsupportedError(
            "DataParallel uses the devices of a single process and does not average anything between processes. Use"
            " DistributedDataParallel."
        )
    local_sgd = getattr(sys.modules.get(_LOCAL_SGD), "PostLocalSGDOptimizer", ())  # importing it takes long
    averages_later = isinstance(thing, DistributedDataParallel) and _compat.has_local_sgd_hook(thing)
    if averages_later or isinstance(thing, local_sgd):
        raise UnsupportedError(
            f"{name} is trained by post-local SGD: ranks average their parameters only every few steps, but a"
            " finished rank no longer trains. Remove the hook and PostLocalSGDOptimizer, so that gradients are"
            " averaged in each step, or train without Join."
        )
    for module in modules:
        if isinstance(module, DistributedDataParallel) and not any(module is one for one in joinables):
            raise UnsupportedError(
                f"{name} holds a DistributedDataParallel model that was not passed to Join, so finished ranks would"
                f" miss its calls. Pass the DDP model itself to Join, and keep calling it through {name}. An object"
                " that only keeps a copy, like an AveragedModel, must hold `ddp.module` instead."
            )


def _sharded_elsewhere(thing: Any, modules: Sequence[nn.Module]) -> str:
    """Return the name of the package or ZeRO stage, other than torch, that shards `thing`; else an empty string."""
    if callable(stage := getattr(thing, "zero_optimization_stage", None)) and (number := stage()):
        return f"ZeRO stage {number}"
    if any(hasattr(parameter, "ds_id") for parameter in _compat.parameters_of(modules)):
        return "ZeRO stage 3"
    for kind in type(thing).__mro__:
        if kind.__module__.startswith(_SHARDING):
            return kind.__module__.partition(".")[0]
    return ""
