"""A distributed sampler that neither pads nor drops."""

from collections.abc import Iterator, Sized
from typing import cast

import torch
from torch.utils.data import Dataset, DistributedSampler


class UnpaddedDistributedSampler(DistributedSampler[int]):
    """Show every sample exactly once per epoch, whatever the world size.

    The order is that of `torch.utils.data.DistributedSampler` with the same seed and epoch; only
    the duplicates that it appends (or the samples that it drops) to make ranks even are missing, so
    ranks may differ by one sample, and a rank has none where there are fewer samples than ranks.

    Args:
        dataset: The dataset, which must have a length.
        num_replicas: Number of ranks, by default the world size.
        rank: This rank, by default that of the default process group.
        shuffle: Whether to shuffle, with a generator seeded by `seed` plus the epoch.
        seed: The seed, the same on all ranks.

    Raises:
        ValueError: `rank` is not in the interval [0, `num_replicas` - 1].
    """

    def __init__(
        self,
        dataset: Dataset[int],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last=False)
        self.unpad()

    def unpad(self) -> None:
        """Count this rank's samples anew, without padding."""
        self.total_size = len(cast(Sized, self.dataset))
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.total_size, generator=generator).tolist()
        else:
            order = list(range(self.total_size))
        return iter(order[self.rank :: self.num_replicas])
