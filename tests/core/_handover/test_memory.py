"""What an active rank allocates in the tail and in the handover does not grow with the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from tests.support.inside import LARGE, TILE
from tests.support.workers import Workers
from torch_join import Join
from torch_join._handover.transfer import BUCKET_BYTES

JOINS, STEPS = 3, 6  # batches of the rank that joins, and of the other
ROUNDS = 3
SLACK = 2**17  # bytes: hooks, counters, learning rates
DIGEST = 3 * 8 * TILE  # what the audit reads a piece of a model into, whatever the model's size
BYTES = 4  # of an element


class Peak:
    """By how many bytes the tensors of this process had grown at the most, in one round."""

    value = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            yield
        events = run.profiler.kineto_results.events()  # type: ignore[union-attr]
        held = 0
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            held += event.nbytes()
            self.value = max(self.value, held)


def build(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def allocate(rank: int, active: int, layers: int, width: int, optimizer: str, weighting: str) -> list[int]:
    """Return the peaks of an ordinary step, of one in the tail, and of the handover."""
    model = DistributedDataParallel(build(layers, width))
    kind: Any = ZeroRedundancyOptimizer if optimizer == "zero" else torch.optim.Adam
    options = {"optimizer_class": torch.optim.Adam} if optimizer == "zero" else {}
    adam = kind(model.parameters(), lr=1e-3, foreach=False, **options)
    inputs = torch.ones(2, width)
    rounds = []
    with Join([model, adam], weighting=weighting) as join:
        for _ in range(ROUNDS):
            ordinary, tail, handover = Peak(), Peak(), Peak()
            rounds.append((ordinary, tail, handover))
            batches = iter(join.batches([inputs] * (STEPS if rank == active else JOINS)))
            for step in range(STEPS + 1):
                peak = ordinary if step < JOINS else tail if step < STEPS else handover
                # The first steps make DDP's buckets and the optimizer's state.
                peak = Peak() if step + 1 < JOINS else peak
                with peak.measured():
                    batch = next(batches, None)
                if batch is None:
                    break
                with peak.measured():
                    adam.zero_grad()
                    model(batch).mean().backward()
                    adam.step()
    # What the threads of the process group free is not seen: the least is right, of what was seen at all.
    return [min((peak.value for peak in peaks if peak.value), default=0) for peaks in zip(*rounds, strict=True)]


# Many small tensors, which are packed to be sent, and few large ones, which are sent from where they are.
@pytest.mark.covering(1)
@pytest.mark.parametrize(("layers", "width"), [(20, 256), (60, 256), (2, 1200), (2, 2000)])
@pytest.mark.parametrize(("active", "optimizer", "weighting"), [(1, "adam", "world"), (0, "zero", "active")])
def test_an_active_rank_needs_no_more_in_the_tail(
    workers: Workers, active: int, layers: int, width: int, optimizer: str, weighting: str
) -> None:
    ordinary, tail, handover = workers.run(2, allocate, active, layers, width, optimizer, weighting)[active]
    tensor = BYTES * width**2
    # A weighted gradient is a new tensor, for as long as it takes to add it up.
    assert tail <= ordinary + SLACK + (tensor if weighting == "active" else 0), (ordinary, tail)
    assert handover <= max(min(BUCKET_BYTES, 3 * layers * tensor), DIGEST) + SLACK, handover
    if tensor >= LARGE:
        assert handover < DIGEST + SLACK, handover
    # What was measured is the training of the model.
    assert ordinary > tensor, ordinary
