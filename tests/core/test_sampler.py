"""Every sample exactly once, in DistributedSampler's order; datasets that are probably shards."""

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, Subset, TensorDataset

from torch_join import UnpaddedDistributedSampler
from torch_join.integration import dealt, dealt_again


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("samples", "ranks"), [(12, 3), (13, 3), (2, 3), (0, 2), (1, 1)])
def test_every_sample_once_in_the_order_of_distributed_sampler(samples: int, ranks: int, shuffle: bool) -> None:
    dataset: Any = range(samples)
    shards = []
    for rank in range(ranks):
        ours = UnpaddedDistributedSampler(dataset, ranks, rank, shuffle=shuffle, seed=5)
        ours.set_epoch(3)
        shards.append(list(ours))
        assert len(ours) == len(shards[-1])
        if samples:
            theirs = DistributedSampler(dataset, ranks, rank, shuffle=shuffle, seed=5)
            theirs.set_epoch(3)
            assert list(theirs)[: len(ours)] == shards[-1]
    assert sorted(index for shard in shards for index in shard) == list(range(samples))


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid rank"):
        UnpaddedDistributedSampler(range(3), 2, 2)  # type: ignore[arg-type]


class Held(Dataset[int]):
    """A dataset whose `__getitem__` must not be called before training, for example because it opens a file."""

    def __init__(self, held: Any) -> None:
        self.held, self.name, self.itself = held, "abc", self

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        raise AssertionError


DATASETS = {
    "tensors": lambda first: TensorDataset(torch.arange(first, 12).double()[-3:] + first),
    "a list": lambda first: [{"path": f"{first}"}, {}, {}],
    "an attribute": lambda first: Held([first, 1, 2]),
    "columns": lambda first: Held({"x": torch.tensor([0, 1, first]), "y": [0, 0, 0]}),
    "a wrapped one": lambda first: Held(Subset(Held([0, 1, first]), [2, 1, 1])),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_datasets_are_told_apart_without_code_of_the_users(kind: str) -> None:
    own, same, other = (dealt(DATASETS[kind](first)) for first in (4, 4, 5))
    assert own is not None
    assert own[1] is not None
    assert own == same != other
    assert dealt_again([own, same], "It", "Stop it") is None
    assert "have the same length, but" in str(dealt_again([own, other], "It", "Stop it"))
    assert dealt_again([own, dealt(Held(None))], "It", "Stop it") is None  # nothing is known of that one
