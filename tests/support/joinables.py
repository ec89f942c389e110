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
