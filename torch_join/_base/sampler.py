"""A distributed sampler that neither pads nor drops, and a warning that front ends give for others."""

from collections.abc import Iterator, Sequence, Sized
from typing import cast

import torch
from torch.utils.data import Dataset, DistributedSampler


class UnpaddedDistributedSampler(DistributedSampler[int]):
    """Sampler that yields every sample exactly once per epoch, for any world size.

    The order is that of `torch.utils.data.DistributedSampler` with the same seed and epoch, but without its padding or
    dropped samples, so ranks may differ by one sample. With fewer samples than ranks, some ranks have none.

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
        """Recompute this rank's number of samples, without padding."""
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


def dealt_again(samples: Sequence[int | None], dealer: str, remedy: str, which: str = "") -> str | None:
    """Return a warning if datasets of different lengths, so probably shards, are each split among all ranks again.

    Args:
        samples: By rank, the length of the dataset that is split; `None` without one.
        dealer: The sampler that splits it.
        remedy: How to turn that off for a loader, as an imperative.
        which: " of", and the loader's name, if there are several.
    """
    known = [each for each in samples if each is not None]
    if len(known) < len(samples) or len({*known}) < 2:
        return None
    return (
        f"The ranks' datasets{which} have different lengths ({min(known)} to {max(known)}), so each dataset seems to"
        f" be a rank's own shard. {dealer} shards each of them again, so each rank runs only 1 of every {len(known)}"
        f" samples in its shard. {remedy} to run all samples, or give all ranks the same dataset."
    )
