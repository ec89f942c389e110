"""The samples that a rank has read, and their dataset: one that all ranks share, or this rank's shard."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset

from lightning_join._compat import IndexBatchSampler, sized_len
from lightning_join._reading.samplers import is_dealt_out
from torch_join import JoinError, UnsupportedError
from torch_join.integration import gather_objects, name_ranks

Order: TypeAlias = Literal["dataset", "shards"]
_INSTEAD = (
    "Return the samples' indices from predict_step and pass them as `indices` to gather_in_order, or pass"
    " order='shards' to order by rank, and then by each rank's own order."
)


@dataclass(frozen=True)
class Reading:
    """One rank's knowledge of the batches of a dataloader.

    Attributes:
        batches: The number of batches.
        by_rank: Whether each rank has a different dataset.
        has_indices: Whether the rank knows the indices of their samples.
        samples: The length of the dataset, if a sampler distributes it to the ranks.
    """

    batches: int = 0
    by_rank: bool = False
    has_indices: bool = True
    samples: int | None = None


def why_unknown(loader: Any) -> str | None:
    """Return why Lightning does not record the samples of a dataloader; `None` if it does."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is not a DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is iterable"
    if loader.batch_size is None and loader.batch_sampler is None:
        return "with batch_size=None the indices from its sampler are not recorded"
    if not isinstance(loader.batch_sampler, IndexBatchSampler):
        return "the indices from its batch sampler are not recorded"
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        return "with in_order=False its batches do not arrive in its sampler's order"
    return None


def read_indices(loader: Any, batches: Sequence[int]) -> list[list[int]] | None:
    """Return the samples in the batches with these numbers, as recorded when they were read.

    Returns:
        Indices by batch; `None` if they are unknown.
    """
    if why_unknown(loader) is not None:
        return None
    seen = getattr(loader.batch_sampler, "seen_batch_indices", [])
    found = [seen[number] for number in batches]
    known = all(type(index) is int for batch in found for index in batch)
    return found if known else None


def describe(loader: Any, place: int, batches: int, has_indices: bool, order: Order | None) -> Reading:
    """Return this rank's knowledge of the batches of a dataloader.

    Args:
        loader: The dataloader.
        place: The number of the dataloader.
        batches: The number of batches that it has yielded.
        has_indices: Whether this rank knows the indices of their samples.
        order: The order that the user has requested, if any.

    Raises:
        UnsupportedError: The requested order is unknown.
    """
    if not batches:
        return Reading()
    by_rank = order == "shards" or (order is None and not is_dealt_out(loader))
    if not by_rank and not has_indices:
        why = why_unknown(loader) or "its sampler yields objects that are not integers"
        raise UnsupportedError(f"The order of dataloader {place}'s predictions is unknown: {why}. {_INSTEAD}")
    dataset = getattr(loader, "dataset", None)
    dealt_out = order is None and not by_rank
    return Reading(batches, by_rank, has_indices, sized_len(dataset) if dealt_out and dataset is not None else None)


def agree(own: Sequence[Reading] | JoinError) -> list[tuple[bool, bool]]:
    """Return for each dataloader whether predictions are by rank, and whether by index; all ranks call this.

    Args:
        own: This rank's knowledge of each dataloader, or the error because of which it has no predictions.

    Raises:
        JoinError: On all ranks, if some rank has no predictions, or the ranks contradict each other.
    """
    answers = gather_objects(own, "What a rank knows of its predictions", None)
    for rank, each in enumerate(answers):
        if isinstance(each, JoinError):
            raise type(each)(f"Rank {rank}: {each}")
    numbers = [len(each) for each in answers]
    if len({*numbers}) > 1:
        raise UnsupportedError(
            f"The ranks have different numbers of dataloaders with predictions (by rank): {numbers}."
        )
    return [_agree_on(place, each) for place, each in enumerate(zip(*answers, strict=True))]


def _agree_on(place: int, readings: Sequence[Reading]) -> tuple[bool, bool]:
    nonempty = {rank: reading for rank, reading in enumerate(readings) if reading.batches}
    by_rank = [rank for rank, reading in nonempty.items() if reading.by_rank]
    if 0 < len(by_rank) < len(nonempty):
        raise UnsupportedError(
            f"Dataloader {place} reads its own dataset on {name_ranks(by_rank)}, while on other ranks a sampler"
            f" distributes a shared dataset, so indices refer to different datasets. {_INSTEAD}"
        )
    samples = {reading.samples for reading in nonempty.values() if reading.samples is not None}
    if len(samples) > 1:
        raise UnsupportedError(
            f"The ranks' datasets of dataloader {place} have different lengths ({min(samples)} to {max(samples)}),"
            " and a sampler shards each of them, so indices refer to different datasets. If each rank has its own"
            f" shard, pass Trainer(use_distributed_sampler=False). {_INSTEAD}"
        )
    return bool(by_rank), all(reading.has_indices for reading in nonempty.values())


def is_copy(strategy: Any) -> bool:
    """Whether another rank has the same batches: only the first rank of a tensor-parallel group counts."""
    try:
        mesh = getattr(strategy, "device_mesh", None)
    except RuntimeError:  # there is no mesh yet
        return False
    if not isinstance(mesh, DeviceMesh) or "tensor_parallel" not in (mesh.mesh_dim_names or ()):
        return False
    return mesh["tensor_parallel"].get_local_rank() > 0
