"""The public joinables."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import JoinTypeError, UnsupportedError
from torch_join._compat import metrics as _compat_metrics
from torch_join._compat.optimizer_state import is_sharded
from torch_join._handover.state import has_state
from torch_join._participants._metrics.metric import MetricParticipant
from torch_join._participants._torch.joinable import WrappingJoinable
from torch_join._participants.ddp_model import ModelParticipant
from torch_join._participants.kinds import holds_metrics
from torch_join._participants.participant import Driver, Participant
from torch_join._participants.zero_optimizer import ShardedOptimizerParticipant
from torch_join._shadow.synced_norms import has_synced_norms


class JoinableModel(WrappingJoinable):
    """Wrap a DDP model as a `Joinable`, for exact gradients and buffers in torch's `Join` too.

    In this package, `Join([JoinableModel(ddp)])` is the same as `Join([ddp])`. In torch's `Join`, each forward of `ddp`
    tells the other ranks that this rank has an input. Finished ranks take part in the model's collectives with a
    zero-gradient pass. At the end, all ranks have the last rank's parameters and buffers.

    Args:
        ddp: The model. Call it, not this object, in the loop.

    Raises:
        JoinTypeError: `ddp` is not a `DistributedDataParallel`.

    Limits:
        In torch's `Join`, pass `divide_by_initial_world_size` or `weighting` to `Join`, and list a model first; a step
        is one forward of the model. Other packages' joinables with collectives come after the model and are called
        after its backward. Finished ranks do not mirror other collectives in the step. If a rank raises, the others
        wait until the process group's timeout, and the hooks stay until the `Join` object is freed. `torch_join.Join`
        has none of these limits.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise JoinTypeError(f"JoinableModel takes a DistributedDataParallel model, not {type(ddp).__name__}.")
        super().__init__(ddp, ddp.process_group, ddp.device)

    def make_participant(self, driver: Driver, index: int) -> Participant:
        if has_synced_norms(self.wrapped):
            raise UnsupportedError(
                "SyncBatchNorm calls collectives in forward and backward, which a finished rank under torch's Join"
                " cannot take part in. Use torch_join.Join, or BatchNorm."
            )
        if index > 0 and not isinstance(driver.tail_log.participants[0], ModelParticipant):
            raise self.misplaced("pass it before any JoinableMetric")
        participant = ModelParticipant(driver, index, self.wrapped)
        participant.meets = index == 0
        return participant

    def leads(self) -> bool:
        return True

    def is_done(self, kind: str, payload: Any) -> bool:
        return kind != "forward" or not payload[0]  # a forward with gradients waits for its backward


class JoinableOptimizer(WrappingJoinable):
    """Wrap an optimizer as a `Joinable`.

    In this package, `Join([JoinableOptimizer(optimizer)])` is the same as `Join([optimizer])`. In torch's `Join`, all
    ranks get the last rank's optimizer state at the end, bit for bit, even a rank that never stepped. A finished rank
    steps its shard of a `ZeroRedundancyOptimizer` in each step, with an active rank's gradients and hyperparameters.

    Args:
        optimizer: The optimizer.
        process_group: The process group. The default is the group of a sharded optimizer, otherwise the whole world.

    Raises:
        JoinTypeError: `optimizer` is not an optimizer.

    Limits:
        In torch's `Join`, list a `ZeroRedundancyOptimizer` after a `JoinableModel` and after other packages' joinables
        with collectives, and step it at most once after each backward.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JoinTypeError(f"JoinableOptimizer takes an optimizer, not {type(optimizer).__name__}.")
        if process_group is None and is_sharded(optimizer):
            process_group = optimizer.process_group  # type: ignore[attr-defined]
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        super().__init__(optimizer, process_group, next(parameters).device)

    def make_participant(self, driver: Driver, index: int) -> Participant | None:
        return ShardedOptimizerParticipant(driver, index, self.wrapped) if is_sharded(self.wrapped) else None


class JoinableState(WrappingJoinable):
    """Wrap an object with a `state_dict` (an LR scheduler, a `GradScaler`, an average) as a `Joinable`.

    In this package, `Join([JoinableState(thing)])` is the same as `Join([thing])`. In torch's `Join` too, all ranks get
    the last rank's state at the end.

    Args:
        thing: The object, which may also be a plain module or optimizer.
        process_group: The process group, by default the whole world.

    Raises:
        JoinTypeError: `thing` has no state to hand over, or takes part in each step and needs another wrapper class.

    Limits:
        In torch's `Join`, list it after the joinable that announces each step of the loop, usually a model.
    """

    def __init__(self, thing: Any, process_group: dist.ProcessGroup | None = None) -> None:
        if isinstance(thing, DistributedDataParallel) or is_sharded(thing) or holds_metrics(thing):
            raise JoinTypeError(
                f"A {type(thing).__name__} takes part in each step, so JoinableState does not work. Pass it as"
                " JoinableModel, JoinableOptimizer or JoinableMetric."
            )
        if not has_state(thing):
            raise JoinTypeError(
                f"JoinableState takes an object with state_dict and load_state_dict, not {type(thing).__name__}."
            )
        super().__init__(thing, process_group, torch.device("cpu"))


class JoinableMetric(WrappingJoinable):
    """Wrap a torchmetrics metric or `MetricCollection` as a `Joinable`.

    In this package, `Join([JoinableMetric(metric)])` is the same as `Join([metric])`. In torch's `Join` too, only
    active ranks contribute to a sync in a forward (`dist_sync_on_step=True`), and all ranks that have updated the
    metric contribute to a `compute()` in a step. A `reset()` also resets the metric on finished ranks.

    Args:
        metric: The metric.

    Raises:
        JoinTypeError: `metric` is not a torchmetrics metric.

    Limits:
        In torch's `Join`, ranks leave the loop one by one, so call `compute()` in a step or after the `with`; in
        between, it would wait for ranks that do not call it. Without a model before the metric, one of its metrics must
        have `dist_sync_on_step=True`, and you must call the first such metric once per step. List other packages'
        joinables first.
    """

    is_replicated = False

    def __init__(self, metric: nn.Module) -> None:
        if not holds_metrics(metric):
            raise JoinTypeError(f"JoinableMetric takes a torchmetrics metric, not {type(metric).__name__}.")
        self._metrics: list[Any] = [module for module in metric.modules() if _compat_metrics.is_metric(module)]
        super().__init__(metric, self._metrics[0].process_group, self._metrics[0].device)

    def make_participant(self, driver: Driver, index: int) -> Participant:
        return MetricParticipant(driver, index, self.wrapped)

    def leads(self) -> bool:
        return any(metric.dist_sync_on_step for metric in self._metrics)

    def is_done(self, kind: str, payload: Any) -> bool:
        return False  # until the next step starts
