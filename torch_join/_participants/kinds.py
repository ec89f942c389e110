"""The kinds of objects passed to `Join`."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import UnsupportedError
from torch_join._compat import ddp as _compat
from torch_join._compat import metrics as _compat_metrics
from torch_join._handover.buffers import Unsynced
from torch_join._handover.optimizers import is_optimizer
from torch_join._handover.state import has_state
from torch_join._participants.clears import innermost_optimizer


def holds_metrics(thing: Any) -> bool:
    """Whether `thing` is a torchmetrics metric, or computes values from metrics (a `MetricCollection`)."""
    if not isinstance(thing, nn.Module) or not callable(getattr(thing, "compute", None)):
        return False
    return any(_compat_metrics.is_metric(module) for module in thing.modules())


def is_sharded_model(thing: Any) -> bool:
    """Whether `thing` is a module that FSDP1 or FSDP2 has sharded, or holds such modules."""
    return isinstance(thing, nn.Module) and _has_sharded([*thing.modules()])


def _has_sharded(modules: Sequence[nn.Module]) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes long
    if fsdp is None:
        return False
    kinds = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    return any(isinstance(module, kinds) for module in modules)


def holds_shards(thing: Any) -> bool:
    """Whether some parameters of a model or an optimizer are shards."""
    if isinstance(thing, nn.Module):
        modules = [*thing.modules()]
        return _has_sharded(modules) or any(map(_compat.is_shard, _compat.parameters_of(modules)))
    groups = getattr(innermost_optimizer(thing), "param_groups", ())
    return any(any(map(_compat.is_shard, group["params"])) for group in groups)


def refuse_engines(things: Iterable[Any]) -> None:
    """Raise if the objects for a loop with placeholders include a DeepSpeed engine.

    Raises:
        UnsupportedError: One of `things` is an engine.
    """
    if any(map(is_engine, things)):
        raise UnsupportedError(
            "placeholder= does not support DeepSpeed engines. Remove placeholder=: without it, a finished rank"
            " follows the engines of the other ranks."
        )


def is_engine(thing: Any) -> bool:
    """Whether `thing` is a DeepSpeed engine."""
    deepspeed = sys.modules.get("deepspeed")  # importing it takes long
    return deepspeed is not None and isinstance(thing, deepspeed.DeepSpeedEngine)


def holds_parts(thing: Any) -> bool:
    """Whether `thing` is a model whose parameters are distributed over the ranks."""
    return is_sharded_model(thing) or (is_engine(thing) and thing.zero_optimization_stage() == 3)


def of_engines(objects: Sequence[Any]) -> set[int]:
    """Return the `id` of each engine among `objects`, and of its optimizers, whose state differs between ranks.

    These are ZeRO's optimizer, the user's optimizer inside it, which now steps this rank's shard, and any wrappers
    around them, such as Accelerate's.
    """
    if not (engines := [thing for thing in objects if is_engine(thing)]):
        return set()
    inner = {id(innermost_optimizer(engine.optimizer)) for engine in engines}
    own = {id(each) for engine in engines for each in (engine, engine.optimizer)} | inner
    return own | {id(each) for each in objects if is_optimizer(each) and id(innermost_optimizer(each)) in inner}


def stateful(objects: Sequence[Any]) -> list[Any]:
    """Return the objects whose state is handed over; each rank keeps its own shards and metric states."""
    own = of_engines(objects)
    return [
        thing
        for thing in objects
        if has_state(thing) and not (id(thing) in own or holds_metrics(thing) or holds_shards(thing))
    ]


def unsynced_models(objects: Sequence[Any]) -> list[Unsynced]:
    """Return the models with buffers that no wrapper synchronizes."""
    found: list[Unsynced] = [(thing, None) for thing in objects if is_sharded_model(thing)]
    found += [(thing.module, None) for thing in objects if is_engine(thing)]
    for ddp in (thing for thing in objects if isinstance(thing, DistributedDataParallel)):
        if not ddp.broadcast_buffers:
            found.append((ddp.module, None))
        elif ddp.parameters_to_ignore:
            found.append((ddp.module, ddp.parameters_to_ignore))
    return found
