"""Who takes part in a step, and what follows from it for this rank."""

from typing import Any

import torch.distributed as dist

from torch_join._base.weighting import Weighting, loss_factor


class Standing:
    """The ranks that have an input at the current step, as the parts see them.

    Args:
        group: The process group; a single process needs none.
        weighting: How the gradients of the active ranks are combined.
    """

    def __init__(self, group: Any, weighting: Weighting) -> None:
        self.group = group
        self.weighting = weighting
        self.may_break = weighting == "samples"  # which has ranks meet at every step anyway
        alone = not dist.is_initialized()  # or `enable=False`
        self.rank = 0 if alone else dist.get_rank(group)
        self._members = [0] if alone else dist.get_process_group_ranks(group)
        self._world_size = len(self._members)
        self._reset()

    def _reset(self) -> None:
        """Begin anew, as before the first step."""
        self._active: tuple[int, ...] = tuple(range(self._world_size))
        self._leader = 0
        self._tail = self.serving = False
        self._has_said = False  # this rank has come to a meeting, and waits for what the others say
        self._samples = self._total_samples = 0

    @property
    def clears(self) -> list[Any]:
        """The calls of the given optimizers' `zero_grad`, which tell what becomes of gradients."""
        return []

    @property
    def joined_ranks(self) -> list[int]:
        """The ranks that have run out of inputs."""
        return [rank for rank in range(self._world_size) if rank not in self._active]

    @property
    def leader(self) -> int:
        """The lowest active rank, which speaks for all; once all have joined, the one whose state all take."""
        return self._leader

    @property
    def loss_factor(self) -> float:
        """What to multiply this rank's gradients with, as DDP divides their sum by the world size."""
        return loss_factor(self.weighting, self._world_size, len(self._active), self._samples, self._total_samples)
