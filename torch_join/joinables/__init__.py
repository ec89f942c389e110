"""Every mechanism is a joinable: what an active rank announces and how a joined rank answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import JoinTypeError
from torch_join._handover.compat import is_sharded
from torch_join.joinables._gradients.clears import Clears, innermost_optimizer
from torch_join.joinables._metrics.metric import JoinableMetric, MetricPart, holds_metrics
from torch_join.joinables._metrics.module_metrics import ModuleMetrics
from torch_join.joinables._torch.joinable import unwrap
from torch_join.joinables._torch.joinable_model import JoinableModel
from torch_join.joinables.custom import CustomPart
from torch_join.joinables.gather import GatherPart
from torch_join.joinables.missing import ForgottenPart
from torch_join.joinables.model import ModelPart
from torch_join.joinables.optimizer import JoinableOptimizer, ShardedOptimizerPart
from torch_join.joinables.part import Part
from torch_join.joinables.refused import check_supported
from torch_join.joinables.state import JoinableState
from torch_join.joinables.ungiven import UngivenModelPart, ungiven

if TYPE_CHECKING:
    from torch_join.join import Join

__all__ = [
    "Clears",
    "CustomPart",
    "GatherPart",
    "JoinableMetric",
    "JoinableModel",
    "JoinableOptimizer",
    "JoinableState",
    "MetricPart",
    "ModelPart",
    "ModuleMetrics",
    "Part",
    "ShardedOptimizerPart",
    "holds_metrics",
    "innermost_optimizer",
    "make_parts",
    "ungiven",
    "unwrap",
]


def make_parts(join: "Join", joinables: Sequence[Any], options: dict[str, Any]) -> list[Part]:
    """Wrap each of `joinables` that does something in a step; the others are only handed over.

    The last parts watch for what was not given.

    Raises:
        JoinTypeError: One of them is of a type that cannot take part.
        UnsupportedError: One of them is of a kind that cannot be trained exactly.
    """
    parts: list[Part] = []
    for thing in joinables:
        check_supported(thing, joinables)
        if isinstance(thing, DistributedDataParallel):
            parts.append(ModelPart(join, len(parts), thing))
        elif is_sharded(thing):
            parts.append(ShardedOptimizerPart(join, len(parts), thing))
        elif isinstance(thing, Joinable):
            parts.append(CustomPart(join, len(parts), thing, options))
        elif holds_metrics(thing):
            parts.append(MetricPart(join, len(parts), thing))
        elif not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise JoinTypeError(
                f"Join takes DDP models, optimizers, schedulers, torch Joinables and anything with state_dict and"
                f" load_state_dict, not {type(thing).__name__}."
            )
    parts.append(ForgottenPart(join, len(parts), joinables))
    parts.append(UngivenModelPart(join, len(parts), joinables))
    return parts
