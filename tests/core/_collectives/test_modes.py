"""Collectives under a mode that every function of torch's passes through, as `torch.set_default_device` sets one."""

from typing import Any

import pytest
import torch

from tests.core._collectives.test_join_collectives import train as train_with_all
from tests.core.loops.test_join_protocol import collect
from tests.emulator import place
from tests.support.workers import Workers


def under_default_device(rank: int, lengths: list[int]) -> Any:
    torch.set_default_device(place())
    try:
        return collect(rank, lengths), train_with_all(rank, lengths, True)[0]
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("lengths", [[1, 3], [3, 0, 2]])
def test_collectives_are_mirrored(workers: Workers, lengths: list[int]) -> None:
    for rank, (seen, count) in enumerate(workers.run(len(lengths), under_default_device, lengths)):
        assert len(seen) == lengths[rank]
        assert count > 100 or lengths[rank] <= min(lengths)
        for step, (total, most, objects, active) in enumerate(seen):
            ranks = [r for r, length in enumerate(lengths) if step < length]
            assert active == tuple(ranks)
            assert (total, most) == (float(sum(r + step for r in ranks)), max(ranks))
            assert objects == [{"rank": r} for r in ranks]
