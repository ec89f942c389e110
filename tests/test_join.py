"""`Join` in plain loops: the parameters are those of a single process."""

from collections.abc import Sequence

import pytest
import torch

from tests.cases import difference, flatten
from tests.loops import Outcome, Program, reference, train
from tests.workers import Workers

# Pairwise over optimizer, weighting, loss, clearing, clipping, scheduler, accumulation, loop and lengths.
PROGRAMS = {
    "sgd": Program((3, 6), optimizer="sgd", clip=0.3),
    "sgd-plain": Program((6, 3), optimizer="sgd", loop="plain", clear="after", scheduler="step"),
    "adam": Program((3, 6), loop="plain"),
    "adam-iterable": Program((0, 4, 7), loop="iterable", clear="zeros", clip=0.3),
    "adamw": Program((6, 3), optimizer="adamw", scheduler="plateau", loop="heartbeat"),
    "zero": Program((3, 6), optimizer="zero", clip=0.3, scheduler="step"),
    "zero-plain": Program((6, 0, 3), optimizer="zero", loop="plain", clear="after"),
    "zero-window": Program((5, 2), optimizer="zero", accumulate=2, loop="iterable"),
    "penalty": Program((3, 6), loss="penalty", weighting="active", clip=0.3),
    "penalty-samples": Program((6, 2), loss="penalty", weighting="samples", optimizer="sgd"),
    "two-forwards": Program((2, 5), loss="two forwards", weighting="active"),
    "two-forwards-plain": Program((0, 4, 2), loss="two forwards", loop="plain", clear="model"),
    "two-backwards": Program((2, 5), loss="two backwards"),
    "two-backwards-zeros": Program(
        (5, 0, 2), loss="two backwards", clear="zeros", weighting="samples", loop="iterable"
    ),
    "two-models": Program((3, 5), loss="two models", clip=0.3),
    "two-models-plain": Program((5, 0, 3), loss="two models", loop="plain", optimizer="adamw", weighting="active"),
    "window": Program((3, 6), accumulate=2, clear="after"),
    "window-left": Program((4, 7, 0), accumulate=3, optimizer="sgd", weighting="active", clip=0.3),
    "window-samples": Program((7, 4), accumulate=3, weighting="samples", optimizer="adamw"),
    "model-zero": Program((3, 6), clear="model", optimizer="sgd", scheduler="plateau", loop="iterable"),
    "norm": Program((2, 5), norm=True),
    "norm-plain": Program((5, 0, 3), norm=True, loop="plain", optimizer="sgd"),
    "in-turns": Program(((2, 5, 3), (4, 1, 4), (0, 3, 6)), optimizer="adam", clip=0.3),
    "in-turns-zero": Program(((5, 2), (1, 4), (3, 3)), optimizer="zero", loop="heartbeat", weighting="active"),
    "even": Program((4, 4), scheduler="step"),
    "empty": Program((0, 0), optimizer="sgd"),
    "one": Program((3,), clip=0.3),
}


def assert_same_bits(outcomes: Sequence[Outcome]) -> None:
    first = outcomes[0]
    for other in outcomes[1:]:
        for name in ("parameters", "buffers"):
            assert all(torch.equal(a, b) for a, b in zip(getattr(first, name), getattr(other, name), strict=True)), name
        mine, its = flatten(first.optimizer), flatten(other.optimizer)
        assert len(mine) == len(its)
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
        assert first.lr == other.lr
        assert first.scheduler == other.scheduler


@pytest.mark.parametrize("name", PROGRAMS)
def test_parameters_are_those_of_a_single_process(workers: Workers, name: str) -> None:
    program = PROGRAMS[name]
    outcomes = workers.run(program.world_size, train, program)
    expected, lr = reference(program)
    assert_same_bits(outcomes)
    assert difference(outcomes[0].parameters, list(expected.parameters())) < 1e-10
    assert outcomes[0].lr == lr
    if program.norm:
        assert difference(outcomes[0].buffers, list(expected.buffers())) < 1e-10


@pytest.mark.parametrize("program", [PROGRAMS["in-turns"], PROGRAMS["in-turns-zero"]], ids=["adam", "zero"])
def test_plain_ddp_goes_on_in_step(workers: Workers, program: Program) -> None:
    assert_same_bits(workers.run(program.world_size, train, program, "ours", 3))
