"""A distributed sampler that neither pads nor drops, and a warning that front ends give for others."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, TypeAlias, cast
from zlib import crc32

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, DistributedSampler, Subset, TensorDataset

_VALUES = 64  # the number of each tensor's values that are compared


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


Dealt: TypeAlias = tuple[int, int | None]  # the length of a dataset, and a checksum of its first and last sample


def dealt(dataset: Any) -> Dealt | None:
    """Describe a dataset that is split among the ranks; `None` if it has no length.

    The checksum is `None` where none can be read without the user's code.
    """
    try:
        length = len(dataset)
    except TypeError:
        return None
    try:
        leaves = tree_leaves([_sample(dataset, index) for index in {0, length - 1} if length])
    except Exception:  # raised by the user's data
        leaves = []
    values = [leaf.flatten()[:_VALUES].tolist() if hasattr(leaf, "flatten") else leaf for leaf in leaves]
    plain = [value for value in values if isinstance(value, (bool, int, float, str, bytes, list))]
    return length, crc32(repr(plain).encode()) if plain else None


def _sample(dataset: Any, index: int, depth: int = 3) -> Any:
    """Return a sample, or what the dataset's attributes hold for it, without running the user's `__getitem__`."""
    if isinstance(dataset, Subset):
        return _sample(dataset.dataset, int(dataset.indices[index]))
    if hasattr(dataset, "with_format"):  # of the package datasets; without a transform, which may draw random numbers
        return dataset.with_format(None)[index]
    if isinstance(dataset, (list, tuple, TensorDataset)) or hasattr(dataset, "flatten"):  # a tensor, or an array
        return dataset[index]
    held = [*vars(dataset).values()] if isinstance(dataset, Dataset) and depth else []
    held += [column for part in held if isinstance(part, Mapping) for column in part.values()]
    alike = [part for part in held if isinstance(part, Sized) and len(part) == len(dataset)]
    return [_sample(part, index, depth - 1) for part in alike]


def dealt_again(datasets: Sequence[Dealt | None], dealer: str, remedy: str, which: str = "") -> str | None:
    """Return a warning if the ranks' datasets differ, so are probably shards, but are each split among all ranks again.

    Args:
        datasets: By rank, the dataset that is split; `None` without one.
        dealer: The sampler that splits it.
        remedy: How to turn that off for a loader, as an imperative.
        which: " of", and the loader's name, if there are several.
    """
    known = [each for each in datasets if each is not None]
    lengths, checksums = {length for length, _ in known}, {checksum for _, checksum in known}
    if len(known) < len(datasets) or (len(lengths) < 2 and (len(checksums) < 2 or None in checksums)):
        return None
    unlike = f"have different lengths ({min(lengths)} to {max(lengths)})"
    if len(lengths) < 2:
        unlike = "have the same length, but their first or last samples differ"
    return (
        f"The ranks' datasets{which} {unlike}, so each dataset seems to"
        f" be a rank's own shard. {dealer} shards each of them again, so each rank runs only 1 of every {len(known)}"
        f" samples in its shard. {remedy} to run all samples, or give all ranks the same dataset, in the same order."
    )
