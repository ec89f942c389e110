"""Which samples ranks have, and in which batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from torch_join import UnpaddedDistributedSampler


def shards(kind: str, samples: int, ranks: int) -> list[list[int]]:
    """Which samples each rank has."""
    data: Any = range(samples)
    if kind == "padded":
        return [[*DistributedSampler(data, ranks, rank)] for rank in range(ranks)]
    if kind == "unpadded":
        return [[*UnpaddedDistributedSampler(data, ranks, rank, seed=3)] for rank in range(ranks)]
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(samples)).tolist()
    return [[], *(order[rank :: ranks - 1] for rank in range(ranks - 1))]  # the first rank has nothing


def batched(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [indices[first : first + size] for first in range(0, len(indices), size)]
