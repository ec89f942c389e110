"""Joinables written against torch's documentation."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.emulator import place
from tests.support.workers import connect
from torch_join import JoinableModel, JoinableOptimizer


class WorldJoinable(Joinable):
    """What a `Joinable` of all ranks has besides its collectives."""

    def __init__(self) -> None:
        super().__init__()

    @property
    def join_device(self) -> torch.device:
        return place()

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class Counter(WorldJoinable, JoinHook):
    """As in torch's tutorial: counts, at each call, the ranks that count; notes the verdicts of its post-hook."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.verdicts = 0, list[bool]()

    def count(self) -> int:
        Join.notify_join_context(self)
        self.total += (found := self.add(1))
        return found

    def add(self, number: int) -> int:
        total = torch.tensor(number)
        dist.all_reduce(total)
        return int(total)

    def join_hook(self, **_: Any) -> JoinHook:
        return self

    def main_hook(self) -> None:
        self.add(0)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.verdicts.append(is_last_joiner)


class Logged(Counter):
    """Writes down its hooks."""

    def __init__(self, name: str = "", log: list[str] | None = None) -> None:
        super().__init__()
        self.name, self.log = name, [] if log is None else log

    def main_hook(self) -> None:
        self.log.append(f"main {self.name}")
        super().main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.log.append(f"post {self.name} {is_last_joiner}")


LOG: list[str] = []


class AllReducer(Joinable):
    """All-reduces a one each step, in `times` pieces."""

    def __init__(self, name: str = "a", times: int = 1, group: Any = None, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.name, self.times, self.group = name, times, group or dist.group.WORLD
        self.options: dict[str, Any] = {}
        self.last: list[bool] = []
        self.hooks = 0

    def __call__(self) -> float:
        Join.notify_join_context(self)
        total = 0.0
        for _ in range(self.times):
            one = torch.ones(1)
            dist.all_reduce(one, group=self.group)
            total = float(one)
        return total

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.options = kwargs
        return AllReducerHook(self)

    @property
    def join_device(self) -> torch.device:
        return place()

    @property
    def join_process_group(self) -> Any:
        return self.group


class AllReducerHook(JoinHook):
    def __init__(self, reducer: AllReducer) -> None:
        self.reducer = reducer

    def main_hook(self) -> None:
        self.reducer.hooks += 1
        if self.reducer.breaks:
            raise MINE
        LOG.append(self.reducer.name)
        for _ in range(self.reducer.times):
            dist.all_reduce(torch.zeros(1), group=self.reducer.group)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.reducer.last.append(is_last_joiner)


def state_of(model: DistributedDataParallel) -> list[Any]:
    return [
        dict(model._forward_pre_hooks),
        dict(model.module._forward_pre_hooks),
        model._join_config,
        model.module,
        set(vars(model)),
    ]


class MineError(Exception):
    """A user's."""


MINE = MineError("mine", 3)


def step_too_often(rank: int, backwards: int, steps: int) -> None:
    connect()
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([JoinableModel(model), JoinableOptimizer(optimizer)]):
        for _ in range(2 * min(rank, 1)):
            loss = model(torch.ones(1, 1)).sum()
            for _ in range(backwards):
                loss.backward(retain_graph=True)
            for _ in range(steps):
                optimizer.step()
