"""The participants for the objects passed to `Join`; refuses objects with which training would be wrong or hang."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import JoinTypeError, UnsupportedError
from torch_join._compat import ddp as _compat
from torch_join._compat.optimizer_state import is_sharded
from torch_join._participants._metrics.metric import MetricParticipant
from torch_join._participants.custom import CustomParticipant
from torch_join._participants.ddp_model import ModelParticipant
from torch_join._participants.kinds import holds_metrics, holds_shards, is_engine, of_engines
from torch_join._participants.participant import Driver, Participant
from torch_join._participants.ray import RayParticipant, Report, ReportParticipant, runs_in_ray
from torch_join._participants.unregistered import UnregisteredModelParticipant
from torch_join._participants.zero_optimizer import ShardedOptimizerParticipant


def make_participants(driver: Driver, joinables: Sequence[Any], options: dict[str, Any]) -> list[Participant]:
    """Return participants for those of `joinables` that act in a step; the others are only handed over.

    The last participants watch for models that were not passed to `Join`, and for calls of Ray Train.

    Raises:
        JoinTypeError: A joinable has a type that cannot take part.
        UnsupportedError: A joinable cannot be trained exactly.
    """
    participants: list[Participant] = []
    engines = of_engines(joinables)
    sharded = {id(thing) for thing in joinables if holds_shards(thing)}
    if sharded:
        # Importing FSDP takes long.
        from torch_join._participants._sharded.make_sharded import make_sharded_participants

        participants += make_sharded_participants(driver, joinables)
    for thing in joinables:
        if id(thing) in sharded:
            continue
        if is_engine(thing):
            # Importing DeepSpeed takes long.
            from torch_join._participants._deepspeed.loop_engine import LoopEngineParticipant

            participants.append(LoopEngineParticipant(driver, len(participants), thing))
        if id(thing) in engines:
            continue
        _check_supported(thing, joinables)
        if isinstance(thing, DistributedDataParallel):
            participants.append(ModelParticipant(driver, len(participants), thing))
        elif is_sharded(thing):
            participants.append(ShardedOptimizerParticipant(driver, len(participants), thing))
        elif isinstance(thing, Joinable):
            participants.append(custom_participant(driver, len(participants), thing, options))
        elif holds_metrics(thing):
            participants.append(MetricParticipant(driver, len(participants), thing))
        elif not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise JoinTypeError(
                f"Join takes DDP models, optimizers, schedulers, torch Joinables and anything with state_dict and"
                f" load_state_dict, not {type(thing).__name__}."
            )
    participants.append(UnregisteredModelParticipant(driver, len(participants), joinables))
    if runs_in_ray():
        participants.append(RayParticipant(driver, len(participants)))
    return participants


def custom_participant(
    driver: Driver, index: int, joinable: Joinable, options: dict[str, Any]
) -> CustomParticipant | ReportParticipant:
    """Return the participant of a joinable that is neither a DDP model nor a sharded optimizer."""
    if isinstance(joinable, Report):
        return ReportParticipant(driver, index, joinable)
    return CustomParticipant(driver, index, joinable, options)


# ---------------------------------------------------------------- objects that are refused

# Modules whose classes shard a model, or an optimizer's state, by their own collectives (DeepSpeed's: as of 0.19.8).
_SHARDING = (
    *("deepspeed.runtime.zero", "deepspeed.runtime.bf16_optimizer", "deepspeed.runtime.pipe"),
    *("fairscale.nn.data_parallel", "fairscale.optim.oss", "megatron.core.optimizer.distrib_optimizer"),
    *("colossalai.zero", "apex.contrib.optimizers.distributed_fused"),
)
_LOCAL_SGD = "torch.distributed.optim.post_localSGD_optimizer"


def _check_supported(thing: Any, joinables: Sequence[Any]) -> None:
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
