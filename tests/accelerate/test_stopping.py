"""`accelerator.stop_requested()`: a signal in one process stops all at the same step."""

import os
import signal
from typing import Any

import pytest
from torch import Tensor

from accelerate_join import Accelerator
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.run import TOLERANCE, Run, difference, reference, same_bits
from tests.support.workers import Workers

RUN = Run((2, 6, 0), epochs=2, optimizer="sgd")
BEHIND = 100


def stopped(rank: int, run: Run, where: tuple[int, int, int], within: bool) -> tuple[list[Any], list[Tensor]]:
    """Train until a signal comes, and return where this process knew of it."""
    found: list[Any] = []
    before = signal.getsignal(signal.SIGTERM)
    with accelerator_of(rank, Accelerator) as accelerator:
        net = run.build()
        model, optimizer = accelerator.prepare(net, *run.optimizers(net))

        def train(epoch: int, batches: Any) -> None:
            for step, batch in enumerate(batches):
                if where == (rank, epoch, step):
                    os.kill(os.getpid(), signal.SIGTERM)
                optimizer.zero_grad()
                for loss in run.losses(model, batch, rank, epoch, step):
                    accelerator.backward(loss)
                optimizer.step()
                if accelerator.stop_requested():
                    found.append((epoch, step))
                    break
            if where == (rank, epoch, BEHIND):
                os.kill(os.getpid(), signal.SIGTERM)

        for epoch in range(run.epochs):
            if within:
                with accelerator.join_uneven_inputs() as join:
                    train(epoch, join.batches(run.batches(rank, epoch)))
            else:
                train(epoch, accelerator.join_batches(run.batches(rank, epoch)))
            if accelerator.stop_requested():
                found.append((epoch, "behind"))
                break
        accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is before
    return found, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize(
    ("where", "within", "left"),
    [
        ((1, 0, 1), False, [(0, 1), (0, 1), None]),
        ((1, 0, 4), False, [None, (0, 4), None]),
        ((1, 1, 3), True, [None, (1, 3), None]),
        ((2, 0, BEHIND), False, [(1, 0), (1, 0), None]),
    ],
)
def test_all_processes_stop_at_one_step(
    workers: Workers, where: tuple[int, int, int], within: bool, left: list[Any]
) -> None:
    results = workers.run(3, stopped, RUN, where, within)
    epoch, step = next(place for place in left if place)
    assert [found for found, _ in results] == [[*filter(None, [place]), (epoch, "behind")] for place in left]
    lengths = [RUN.lengths] * epoch + [[min(length, step + 1) for length in RUN.lengths]]
    expected = reference(RUN.but(lengths=lengths, epochs=epoch + 1)).parameters
    for _, parameters in results:
        assert same_bits(parameters, results[0][1])
        assert difference(parameters, expected) < TOLERANCE
