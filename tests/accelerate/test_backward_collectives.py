"""Collectives inside backward under Accelerate: SyncBatchNorm, and a loss over all processes' outputs."""

import pytest
from torch import Tensor

from tests.core.backward.programs import Program, Ranks, assert_exact
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.workers import Workers


def train(rank: int, program: Program) -> list[Tensor]:
    net = program.build()
    with accelerator_of(rank) as accelerator:
        model, optimizer = accelerator.prepare(net, program.make_optimizer(net.parameters()))
        with accelerator.join_uneven_inputs(weighting=program.weighting) as join:
            for epoch in range(program.epochs):
                for batch in join.batches(program.batches(rank, epoch)):
                    accelerator.backward(program.loss_on([model], batch, Ranks(join, rank, "ours"), join.step))
                    optimizer.step()
                    optimizer.zero_grad()
        return [t.detach().clone() for t in (*net.parameters(), *net.buffers())]


@pytest.mark.covering(1)
@pytest.mark.parametrize("weighting", ["world", "active", "samples"])
@pytest.mark.parametrize("options", [(), ("contrast",), ("contrast", "no norm")], ids=str)
def test_parameters_are_those_of_one_process(workers: Workers, weighting: str, options: tuple[str, ...]) -> None:
    for lengths in ((2, 5), (0, 4, 2)):
        program = Program(lengths, weighting=weighting, options=frozenset(options))
        assert_exact(program, workers.run(program.world_size, train, program))
