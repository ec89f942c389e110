"""The samplers that Lightning injects, without their padding."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from lightning_join._compat import DistributedSamplerWrapper, update_dataloader
from torch_join import UnpaddedDistributedSampler


class InjectedRank(int):
    """A rank that marks the sampler it was given to as one that Lightning, not the user, made."""


class _UnpaddedWrapper(UnpaddedDistributedSampler):
    """An unpadded shard of what a sampler of the user's yields."""

    def __init__(self, wrapper: DistributedSamplerWrapper) -> None:
        super().__init__(wrapper.dataset, wrapper.num_replicas, int(wrapper.rank), wrapper.shuffle, wrapper.seed)
        self._wrapper = wrapper

    def __iter__(self) -> Iterator[Any]:
        samples: Any = self._wrapper.dataset
        samples.reset()
        return (samples[index] for index in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._wrapper.set_epoch(epoch)


def without_padding(dataloader: object) -> object:
    """Replace the sampler of `dataloader` by an unpadded one if Lightning has injected it."""
    if not isinstance(dataloader, DataLoader):
        return dataloader
    sampler = dataloader.sampler
    if not (isinstance(sampler, DistributedSampler) and isinstance(sampler.rank, InjectedRank)):
        return dataloader
    if isinstance(sampler, DistributedSamplerWrapper):
        return update_dataloader(dataloader, _UnpaddedWrapper(sampler))
    if type(sampler) is not DistributedSampler:  # predict's own is unpadded already
        return dataloader
    unpadded = UnpaddedDistributedSampler(
        sampler.dataset, sampler.num_replicas, int(sampler.rank), sampler.shuffle, sampler.seed
    )
    return update_dataloader(dataloader, unpadded)
