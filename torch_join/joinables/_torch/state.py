"""Anything with a state: it does nothing in a step, and is handed over at the end."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import JoinTypeError
from torch_join._handover.compat import is_sharded
from torch_join._handover.state import has_state
from torch_join.joinables._torch.joinable import WrappingJoinable
from torch_join.joinables.kinds import holds_metrics


class JoinableState(WrappingJoinable):
    """Anything with `state_dict` and `load_state_dict` as a `Joinable`: an LR scheduler, a `GradScaler`, an average.

    `Join([JoinableState(thing)])` of this package is the same as `Join([thing])`. In torch's, too, the last
    rank's state replaces the others' at the end.

    Args:
        thing: The object, which may also be a plain module or optimizer.
        process_group: The process group, by default the whole world.

    Raises:
        JoinTypeError: `thing` has no state to hand over, or takes part in each step and has a joinable of
            its own.

    Limits:
        In torch's `Join` it comes after whatever announces each step of the loop, as a rule a model.
    """

    def __init__(self, thing: Any, process_group: dist.ProcessGroup | None = None) -> None:
        if isinstance(thing, DistributedDataParallel) or is_sharded(thing) or holds_metrics(thing):
            raise JoinTypeError(
                f"A {type(thing).__name__} takes part in each step: give it as JoinableModel, JoinableOptimizer or"
                " JoinableMetric."
            )
        if not has_state(thing):
            raise JoinTypeError(
                f"JoinableState takes something with state_dict and load_state_dict, not {type(thing).__name__}."
            )
        super().__init__(thing, process_group, torch.device("cpu"))
