"""The samplers that Lightning injects, without their padding."""

from collections.abc import Iterator
from typing import Any, cast

from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_join._compat import DistributedSamplerWrapper, wrapped_sampler
from torch_join import UnpaddedDistributedSampler
from torch_join.integration import Dealt, dealt


class InjectedRank(int):
    """A rank number by which a sampler is recognized as Lightning's, not the user's.

    Attributes:
        place: The final rank and number of ranks of the sampler, if different.
    """

    place: tuple[int, int] | None = None


class _UnpaddedWrapper(DistributedSamplerWrapper, UnpaddedDistributedSampler):
    """An unpadded shard of the indices of a user's sampler."""


_UNPADDED = {DistributedSampler: UnpaddedDistributedSampler, DistributedSamplerWrapper: _UnpaddedWrapper}


def mark_injected(kwargs: dict[str, Any], predicting: bool) -> None:
    """Mark the arguments of a sampler that Lightning is about to inject.

    The sampler that it injects in `predict` has no padding, but cannot be made for a rank without a sample. So it is
    made for all samples and gets its rank later.
    """
    rank, replicas = kwargs["rank"], kwargs["num_replicas"]
    kwargs["rank"] = InjectedRank(0 if predicting else rank)
    if predicting:
        kwargs["rank"].place = rank, replicas
        kwargs["num_replicas"] = 1


def without_padding(dataloader: object) -> object:
    """Remove the padding from the sampler of `dataloader` if Lightning has injected it.

    This changes the sampler in place, since a loader of a user-defined class may fail when it is made a second time.
    """
    for sampler in _injected(dataloader):
        if isinstance(sampler, UnrepeatedDistributedSamplerWrapper):
            if (place := cast(InjectedRank, sampler.rank).place) is not None:
                sampler.rank, sampler.num_replicas = InjectedRank(place[0]), place[1]
                sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))
            _draw_alike(sampler)
        elif (unpadded := _UNPADDED.get(type(sampler))) is not None:
            sampler.__class__ = unpadded
            cast(UnpaddedDistributedSampler, sampler).unpad()
    return dataloader


def _draw_alike(sampler: UnrepeatedDistributedSamplerWrapper) -> None:
    """Make all ranks split the samples in the same order: otherwise some would be missing, and others occur twice.

    Lightning shuffles the indices that a `RandomSampler` draws from this rank's random numbers once more, alike on all
    ranks, and splits them. The second shuffle alone is enough.
    """
    inner = wrapped_sampler(sampler)
    if not sampler.shuffle or type(inner) is not RandomSampler or inner.generator is not None or inner.replacement:
        return
    if inner.num_samples == len(inner.data_source):
        wrapper: Any = type(sampler.dataset)
        sampler.dataset = wrapper(SequentialSampler(inner.data_source))


def is_dealt_out(loader: Any) -> bool:
    """Whether a sampler splits a dataset among the ranks, so that its indices refer to a dataset that all ranks have.

    The samplers of torch, Lightning and this project do, and any other that has a `rank` and `num_replicas`.
    """
    parts = [loader]
    for part in parts:  # the loop extends this list
        inner = [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
        parts += [each for each in inner if not any(each is one for one in (None, *parts))]
    return any(
        isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"))
        for sampler in parts[1:]
    )


def sharded_dataset(dataloader: object) -> Dealt | None:
    """Describe the dataset that Lightning's sampler splits among the ranks, if there is such a sampler."""
    sampler = next(_injected(dataloader), None)
    return None if sampler is None else dealt(sampler.dataset)


def _injected(dataloader: object) -> Iterator[DistributedSampler[Any]]:
    """Yield the samplers of `dataloader` that Lightning has made."""
    if isinstance(dataloader, DataLoader):
        for sampler in (dataloader.sampler, getattr(dataloader.batch_sampler, "sampler", None)):
            if isinstance(sampler, DistributedSampler) and isinstance(sampler.rank, InjectedRank):
                yield sampler
