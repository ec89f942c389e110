"""A rank that leaves out a micro-batch, forward and all, in the steps before DDP has rebuilt its buckets."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.core._participants.test_clearing import Pattern, batch, new_model
from tests.support.front_ends.plain import train
from tests.support.run import Batch, difference, reference
from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join

WINDOW = 2
Epochs = list[tuple[int, ...]]
Skipped = set[tuple[int, int]]  # ranks and steps, of the first epoch


@dataclass(frozen=True)
class Skipping(Pattern):
    """A loop in which ranks leave out batches of the first epoch."""

    accumulate: int = WINDOW
    idiom: str = "zero_grad"
    one_context: bool = True
    left_out: frozenset[tuple[int, int]] = frozenset()

    def losses(self, model: Any, batch: Batch, rank: int, epoch: int, step: int) -> Iterator[Tensor]:
        if epoch or (rank, step) not in self.left_out:
            yield from super().losses(model, batch, rank, epoch, step)


# DDP rebuilds its buckets in the forward that follows the first sync, step 2 here, and waits in there for all ranks.
@pytest.mark.covering(2)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("loop", ["sized", "iterable", "heartbeat"])
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
    run = Skipping(epochs, len(epochs), left_out=frozenset(skipped), loop=loop, ddp={"gradient_as_bucket_view": view})
    for outcome in workers.run(run.world_size, train, run):
        assert difference(outcome.parameters, reference(run).parameters) < 1e-10


def end_amid_a_window(rank: int) -> list[str]:
    ddp = DistributedDataParallel(new_model())
    with warned() as said, Join([ddp], audit=True) as join:
        for step, x in enumerate(join.batches([batch(0, rank, step) for step in range(3)])):
            if step % WINDOW == 0:
                ddp.zero_grad()
            if (rank, step) != (0, 2):
                with nullcontext() if step % WINDOW else ddp.no_sync():
                    ddp(x).pow(2).mean().backward()
    return said


def test_a_gradient_that_one_rank_has_accumulated_is_no_drift(workers: Workers) -> None:
    assert workers.run(2, end_amid_a_window) == [[], []]
