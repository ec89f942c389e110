"""A rank that leaves out a micro-batch, forward and all, in the steps before DDP has rebuilt its buckets."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.core.joinables.test_clearing import batch, new_model
from tests.support.cases import difference
from tests.support.workers import Workers
from torch_join import Join

WINDOW = 2
Epochs = list[tuple[int, ...]]
Skipped = set[tuple[int, int]]  # ranks and steps, of the first epoch


def train(rank: int, epochs: Epochs, skipped: Skipped, loop: str, view: bool) -> list[Tensor]:
    model = new_model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Join([ddp, optimizer], may_break=loop == "heartbeat") as join:
        for epoch, lengths in enumerate(epochs):
            batches = [batch(epoch, rank, step) for step in range(lengths[rank])]
            for step, x in enumerate(join.batches(iter(batches) if loop == "unsized" else batches)):
                ends = step % WINDOW == WINDOW - 1
                if step % WINDOW == 0:
                    optimizer.zero_grad()
                if epoch == 0 and (rank, step) in skipped:
                    continue
                with nullcontext() if ends else ddp.no_sync():
                    ddp(x).pow(2).mean().backward()
                if ends:
                    optimizer.step()
    return [p.detach() for p in model.parameters()]


def reference(epochs: Epochs, skipped: Skipped) -> list[Tensor]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch, lengths in enumerate(epochs):
        for step in range(max(lengths)):
            if step % WINDOW == 0:
                optimizer.zero_grad()
            for rank, length in enumerate(lengths):
                if step < length and not (epoch == 0 and (rank, step) in skipped):
                    (model(batch(epoch, rank, step)).pow(2).mean() / len(lengths)).backward()
            if step % WINDOW == WINDOW - 1:
                optimizer.step()
    return [p.detach() for p in model.parameters()]


# DDP rebuilds its buckets in the forward that follows the first sync, step 2 here, and waits in there for all ranks.
@pytest.mark.covering(2)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("loop", ["sized", "unsized", "heartbeat"])
@pytest.mark.parametrize(
    ("epochs", "skipped"),
    [
        ([(4, 4), (0, 4), (2, 2)], {(1, 2)}),
        ([(3, 6), (2, 2)], {(1, 2)}),
        ([(2, 5), (2, 2)], {(1, 2)}),
        ([(4, 6, 4), (0, 2, 1)], {(0, 2), (2, 2)}),
        ([(2, 2, 4), (0, 2, 2)], {(2, 2)}),
    ],
)
def test_a_forward_that_is_left_out(workers: Workers, epochs: Epochs, skipped: Skipped, loop: str, view: bool) -> None:
    for parameters in workers.run(len(epochs[0]), train, epochs, skipped, loop, view):
        assert difference(parameters, reference(epochs, skipped)) < 1e-10


def end_amid_a_window(rank: int) -> list[str]:
    ddp = DistributedDataParallel(new_model())
    with warnings.catch_warnings(record=True) as said, Join([ddp], audit=True) as join:
        warnings.simplefilter("always")
        for step, x in enumerate(join.batches([batch(0, rank, step) for step in range(3)])):
            if step % WINDOW == 0:
                ddp.zero_grad()
            if (rank, step) != (0, 2):
                with nullcontext() if step % WINDOW else ddp.no_sync():
                    ddp(x).pow(2).mean().backward()
    return [str(one.message) for one in said]


def test_a_gradient_that_one_rank_has_accumulated_is_no_drift(workers: Workers) -> None:
    assert workers.run(2, end_amid_a_window) == [[], []]
