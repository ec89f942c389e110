"""What takes part in the loop but was not passed to `Join`, so that joined ranks do not follow it."""

import sys
from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import JoinDriftWarning, UnsupportedError, name_ranks
from torch_join._compat import metrics as _compat_metrics
from torch_join._participants.hook import untraced
from torch_join._participants.participant import Driver, Participant


class UnregisteredModelParticipant(Participant):
    """Raises when an unregistered DDP model is about to train while ranks of its process group have joined.

    Its buckets would wait for joined ranks, or be paired with another model's. A search through all objects of the
    process would find such models, but takes 40 ms in each tail. So in the first step of a tail, hooks watch the
    forwards of all modules, and then the gradients of such a model, since it may be a teacher that is not trained.
    Models that run later are noticed when their first bucket is due and no model passed to `Join` is in backward.
    """

    def __init__(self, driver: Driver, index: int, joinables: Sequence[Any]) -> None:
        super().__init__(driver, index)
        self._joinables = joinables

    def enter_tail(self) -> None:
        first, seen = self.driver.step_number, set[int]()

        def before_forward(module: nn.Module, _: Any) -> None:
            if self.driver.step_number != first:
                self.exit()
                return
            if not isinstance(module, DistributedDataParallel) or any(module is one for one in self._joinables):
                return
            if id(module) not in seen and torch.is_grad_enabled() and not self.members.serves:
                seen.add(id(module))
                self._watch(module)

        self._undo.append(register_module_forward_pre_hook(untraced(before_forward)).remove)

    def leave_tail(self) -> None:
        self.exit()

    def _watch(self, ddp: DistributedDataParallel) -> None:
        world = dist.get_process_group_ranks(self.members.group)
        group_ranks = set(dist.get_process_group_ranks(ddp.process_group))

        def trains(*_: Any) -> None:
            joined = sorted(group_ranks.intersection(world[rank] for rank in self.members.joined_ranks))
            if joined and ddp.require_backward_grad_sync:
                raise missing_model(joined)

        if any(p.grad is not None for p in ddp.parameters()):
            trains()  # now, since its forward may issue a collective
        for parameter in ddp.parameters():
            if parameter.requires_grad:
                self._undo.append(get_gradient_edge(parameter).node.register_prehook(trains).remove)


def missing_model(joined: Sequence[int]) -> UnsupportedError:
    """Return the error for a model that was not passed to `Join`."""
    return UnsupportedError(
        "The loop trains a DistributedDataParallel model that was not passed to Join, so the all-reduce of its"
        f" gradients would hang: {name_ranks(joined)} finished and cannot follow this model. Pass every such model to"
        " Join, wrapped before the `with`: Join([model_a, model_b, optimizer, ...])."
    )


_warned: dict[int, "ReferenceType[Any]"] = {}  # a metric's hash changes with its state


def notice_metric(operation: str) -> None:
    """Warn, once per metric, if a torchmetrics metric in this thread gathers.

    Joined ranks contribute zeros to the collectives of its sync, and the metric counts them: the minimum becomes 0, a
    mean is over too many values. Metrics passed to `Join` sync in their own way, so this check does not see them. It
    runs only when the active ranks gather while some rank has joined.

    Args:
        operation: The name of the collective that the active ranks are about to issue.
    """
    if not operation.startswith("all_gather"):
        return
    metric = _compat_metrics.syncing(sys._getframe(1))
    if metric is None or ((known := _warned.get(id(metric))) is not None and known() is metric):
        return
    _warned[id(metric)] = ref(metric)
    JoinDriftWarning.warn(
        f"{type(metric).__name__} synced after some ranks finished and was not passed to Join. Zeros replace the"
        " state of the finished ranks, so its value is wrong. Pass it to Join ([model, optimizer, metric]), in"
        " Lightning make it an attribute of the module, or compute it only after the loop."
    )
