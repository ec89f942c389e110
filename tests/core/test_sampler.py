"""Every sample exactly once, in DistributedSampler's order."""

from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from torch_join import UnpaddedDistributedSampler


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
