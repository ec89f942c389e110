"""Joinables written against torch's documentation."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from tests.emulator import place


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
