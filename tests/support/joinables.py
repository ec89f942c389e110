"""What a joinable written against torch's documentation has besides its collectives."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable

from tests.emulator import place


class WorldJoinable(Joinable):
    """A `Joinable` of all ranks, on the CPU."""

    @property
    def join_device(self) -> torch.device:
        return place()

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD
