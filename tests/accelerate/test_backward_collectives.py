"""Collectives inside backward under Accelerate: SyncBatchNorm, and a loss over all processes' outputs."""

import pytest
from torch import Tensor

from tests.core.backward.programs import ROWS, Net, Program, contrast, optimizer_of
from tests.core.backward.test_exact import assert_exact
from tests.support.accelerated import accelerator_of
from tests.support.workers import Workers


def train(rank: int, program: Program) -> list[Tensor]:
    net = Net(program)
    with accelerator_of(rank) as accelerator:
        model, optimizer = accelerator.prepare(net, optimizer_of(program, net))
        with accelerator.join_uneven_inputs(weighting=program.weighting) as join:
            for epoch in range(program.epochs):
                batches = [program.batch(rank, step, epoch) for step in range(program.lengths[rank])]
                for x, y in join.batches(batches):
                    output = model(x, join.step)
                    loss = (output - y).square().mean()
                    if "contrast" in program.options:
                        everyone = join.all_gather(output[:ROWS], sync_grads=True).flatten(0, 1)
                        loss = loss + contrast(output[:ROWS], everyone, join.active_ranks.index(rank) * ROWS)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return [t.detach().clone() for t in (*net.parameters(), *net.buffers())]


@pytest.mark.covering(1)
@pytest.mark.parametrize("weighting", ["world", "active", "samples"])
@pytest.mark.parametrize("options", [(), ("contrast",), ("contrast", "no norm")], ids=str)
def test_parameters_are_those_of_one_process(workers: Workers, weighting: str, options: tuple[str, ...]) -> None:
    for lengths in ((2, 5), (0, 4, 2)):
        program = Program(lengths, weighting, frozenset(options))
        assert_exact(program, workers.run(program.world_size, train, program))
