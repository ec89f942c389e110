"""The samplers that Lightning injects, without their padding."""

from typing import cast

from torch.utils.data import DataLoader, DistributedSampler

from lightning_join._compat import DistributedSamplerWrapper
from torch_join import UnpaddedDistributedSampler


class InjectedRank(int):
    """A rank that marks the sampler it was given to as one that Lightning, not the user, made."""


class _UnpaddedWrapper(DistributedSamplerWrapper, UnpaddedDistributedSampler):
    """An unpadded shard of what a sampler of the user's yields."""


_UNPADDED = {DistributedSampler: UnpaddedDistributedSampler, DistributedSamplerWrapper: _UnpaddedWrapper}


def without_padding(dataloader: object) -> object:
    """Take the padding off the sampler of `dataloader` if Lightning has injected it.

    In place, since a loader of a class of the user's own may not stand being made a second time. What
    `predict` injects has no padding.
    """
    sampler = dataloader.sampler if isinstance(dataloader, DataLoader) else None
    if isinstance(sampler, DistributedSampler) and isinstance(sampler.rank, InjectedRank):
        unpadded = _UNPADDED.get(type(sampler))
        if unpadded is not None:
            sampler.__class__ = unpadded
            cast(UnpaddedDistributedSampler, sampler).unpad()
    return dataloader
