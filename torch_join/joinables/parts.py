"""Which part each of the things given to `Join` gets."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import JoinTypeError
from torch_join._handover.compat import is_sharded
from torch_join.joinables._metrics.metric import MetricPart
from torch_join.joinables.custom import CustomPart
from torch_join.joinables.kinds import holds_metrics, holds_shards, is_engine, of_engines
from torch_join.joinables.missing_model import MissingModelPart
from torch_join.joinables.missing_optimizer import MissingOptimizerPart
from torch_join.joinables.model import ModelPart
from torch_join.joinables.optimizer import ShardedOptimizerPart
from torch_join.joinables.part import Driver, Part
from torch_join.joinables.refused import check_supported


def make_parts(driver: Driver, joinables: Sequence[Any], options: dict[str, Any]) -> list[Part]:
    """Wrap each of `joinables` that does something in a step; the others are only handed over.

    The last parts watch for what was not given.

    Raises:
        JoinTypeError: One of them is of a type that cannot take part.
        UnsupportedError: One of them is of a kind that cannot be trained exactly.
    """
    parts: list[Part] = []
    engines = of_engines(joinables)
    sharded = {id(thing) for thing in joinables if holds_shards(thing)}
    if sharded:
        from torch_join.joinables._sharded.make import make_sharded_parts  # FSDP takes long to import

        parts += make_sharded_parts(driver, joinables)
    for thing in joinables:
        if id(thing) in sharded:
            continue
        if is_engine(thing):
            from torch_join.joinables._deepspeed.loop import LoopEnginePart  # DeepSpeed takes long to import

            parts.append(LoopEnginePart(driver, len(parts), thing))
        if id(thing) in engines:
            continue
        check_supported(thing, joinables)
        if isinstance(thing, DistributedDataParallel):
            parts.append(ModelPart(driver, len(parts), thing))
        elif is_sharded(thing):
            parts.append(ShardedOptimizerPart(driver, len(parts), thing))
        elif isinstance(thing, Joinable):
            parts.append(CustomPart(driver, len(parts), thing, options))
        elif holds_metrics(thing):
            parts.append(MetricPart(driver, len(parts), thing))
        elif not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise JoinTypeError(
                f"Join takes DDP models, optimizers, schedulers, torch Joinables and anything with state_dict and"
                f" load_state_dict, not {type(thing).__name__}."
            )
    parts.append(MissingOptimizerPart(driver, len(parts), joinables))
    parts.append(MissingModelPart(driver, len(parts), joinables))
    return parts
