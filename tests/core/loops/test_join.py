"""`Join` in plain loops: the parameters are those of a single process. And the same loops under torch's Join."""

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.covering import others_long
from tests.support.cases import Batch, difference
from tests.support.inside import channel_of, delay_next_wait
from tests.support.loops import Expected, Models, Outcome, Program, Training, outcome_of, reference, tensors_of, train
from tests.support.workers import Workers, connect
from torch_join import Join

OPTIMIZERS = ("sgd", "adam", "adamw", "zero")
# What a loop may do besides; each is done with each optimizer.
FEATURES: dict[str, dict[str, Any]] = {
    "clip": {"clip": 0.3},
    "step": {"scheduler": "step"},
    "plateau": {"scheduler": "plateau"},
    "penalty": {"loss": "penalty", "clip": 0.3},
    "two-models": {"loss": "two models"},
    "two-forwards": {"loss": "two forwards"},
    "two-backwards": {"loss": "two backwards"},
    "window": {"accumulate": 3, "lengths": (4, 7, 0)},
    "zeros": {"clear": "after, zeros", "scheduler": "step"},
    "zeros-first": {"clear": "before, zeros"},
    "model-zero": {"clear": "model", "clip": 0.3},
    "scaler": {"scaler": True},
    "scaler-clip": {"scaler": True, "clip": 0.3, "clear": "after"},
    "in-turns": {"lengths": ((2, 5, 3), (4, 1, 4), (0, 3, 6))},
    "no-grad": {"evaluation": "no_grad"},
    "inference": {"evaluation": "inference", "one_context": True},
    "one-context": {"one_context": True, "scheduler": "step"},
    "breaks": {"leaves": True, "loop": "heartbeat"},
}
LENGTHS = ((3, 6), (6, 3), (0, 4, 2), (5, 2))  # the same rank is first in each epoch
WEIGHTINGS = ("world", "active", "samples")
LOOPS = ("sized", "plain", "iterable", "heartbeat", "wrong length")


def crossed() -> dict[str, Program]:
    """Each feature with each optimizer; lengths, weightings and loops take turns."""
    programs = {}
    for i, (name, feature) in enumerate(FEATURES.items()):
        for j, optimizer in enumerate(OPTIMIZERS):
            turns = {"lengths": LENGTHS[(i + j) % 4], "weighting": WEIGHTINGS[(i + j) % 3], "loop": LOOPS[(i + j) % 5]}
            options = {"optimizer": optimizer, **turns, **feature}
            # What follows a plain `for` in the same `with` would not wait for the other ranks.
            if options["loop"] == "plain" and (feature.get("evaluation") or feature.get("one_context")):
                options["loop"] = "sized"
            programs[f"{optimizer}-{name}"] = Program(**options)
    return programs


PROGRAMS = {
    "plain-sgd": Program((3, 6), optimizer="plain"),
    "sgd": Program((3, 6), optimizer="sgd"),
    "adam": Program((3, 6)),
    "adamw": Program((3, 6), optimizer="adamw"),
    "zero": Program((3, 6), optimizer="zero"),
    "zero-plain": Program((6, 0, 3), optimizer="zero", loop="plain", clear="after"),
    "two-backwards-zeros": Program(
        (5, 0, 2), loss="two backwards", clear="after, zeros", weighting="samples", loop="iterable"
    ),
    "norm": Program((2, 5), norm=True),
    "norm-plain": Program((2, 5, 3), norm=True, loop="plain", optimizer="sgd"),
    "norm-evaluated": Program((0, 4, 3), norm=True, evaluation="no_grad"),
    "sgd-and-adam": Program((3, 6), optimizer="sgd+adam", scheduler="step"),
    "adam-and-zero": Program((6, 0, 3), optimizer="adam+zero", clip=0.3, scaler=True, loss="two models"),
    "wrong-length-window": Program((3, 6, 0), accumulate=5, loop="wrong length", weighting="active"),
    "wrong-length-evaluated": Program((5, 6, 3), loop="wrong length", evaluation="no_grad"),
    "window-in-one-context": Program((4, 7), accumulate=3, one_context=True, optimizer="sgd"),
    "two-models-window": Program((5, 2), loss="two models", accumulate=2, loop="plain", weighting="active"),
    # A rank that leaves its loop serves the others at the beginning of the next one.
    "served-in-inference": Program(
        ((4, 1), (3, 5), (7, 2)), accumulate=3, loop="heartbeat", leaves=True, evaluation="inference"
    ),
    "zero-served-in-inference": Program(
        ((4, 1), (0, 5), (3, 2)), optimizer="zero", loop="heartbeat", leaves=True, evaluation="inference"
    ),
    "even": Program((4, 4), scheduler="step"),
    "empty": Program((0, 0), optimizer="sgd"),
    "one": Program((3,), clip=0.3),
    **crossed(),
}
# Optimizers take turns.
SOME = [f"{OPTIMIZERS[i % 4]}-{feature}" for i, feature in enumerate(FEATURES)]
SOME += [name for name in PROGRAMS if name not in crossed()]


def assert_same_bits(outcomes: Sequence[Outcome], buffers: bool = True) -> None:
    first = outcomes[0]
    for other in outcomes[1:]:
        mine, its = tensors_of(first), tensors_of(other)
        if buffers:
            mine, its = [*mine, *first.buffers], [*its, *other.buffers]
        assert len(mine) == len(its)
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
        assert first.lr == other.lr
        assert first.scheduler == other.scheduler
        assert first.scaler == other.scaler


def assert_exact(program: Program, outcomes: Sequence[Outcome], models: Models, expected: Expected) -> None:
    # After a last step of all ranks each has its own buffers until the next forward, as in plain DDP.
    assert_same_bits(outcomes, buffers=not program.rebalance)
    assert difference(outcomes[0].parameters, list(models.parameters())) < 1e-10
    assert outcomes[0].lr == expected.lr
    assert outcomes[0].scaler == expected.scaler
    if program.norm:
        assert difference(outcomes[0].buffers, list(models.buffers())) < 1e-10
    for outcome, values in zip(outcomes, expected.evaluated, strict=True):
        assert outcome.evaluated == pytest.approx(values, rel=1e-10)


@pytest.mark.parametrize("name", others_long(PROGRAMS, *SOME))
def test_parameters_are_those_of_a_single_process(workers: Workers, name: str) -> None:
    program = PROGRAMS[name]
    outcomes = workers.run(program.world_size, train, program, "ours", True)
    models, expected = reference(program)
    assert_exact(program, outcomes, models, expected)
    # Then three epochs of plain DDP. Of its buffers each rank has its own until the next forward.
    plain = [outcome.plain for outcome in outcomes]
    assert_same_bits(plain, buffers=False)
    assert difference(plain[0].parameters, expected.plain) < 1e-10


def test_the_programs_do_what_they_are_there_for() -> None:
    scalers = [reference(program)[1].scaler for program in PROGRAMS.values() if program.scaler]
    assert any(state["scale"] > 8 for state in scalers)
    assert any(state["scale"] < 8 for state in scalers)
    assert any(state["_growth_tracker"] for state in scalers)
    sizes = {program.world_size for program in PROGRAMS.values()}
    assert sizes == {1, 2, 3}
    for feature in FEATURES:
        mine = [PROGRAMS[f"{optimizer}-{feature}"] for optimizer in OPTIMIZERS]
        assert {program.weighting for program in mine} == set(WEIGHTINGS)


class Late:
    """A loader that is empty, does not say so, and takes its time."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Batch]:
        time.sleep(0.5)
        yield from ()


def train_without(rank: int, lengths: tuple[int, ...]) -> Outcome:
    training = Training(Program(lengths), sharded=True)
    ddp = DistributedDataParallel(training.models)
    batches = Program(lengths).data.batches(rank, 0)
    with Join([ddp, *training.optimizers]) as join:
        for step, batch in enumerate(join.batches(batches or Late())):
            training.begin_step(step)
            (ddp(batch[0]) - batch[1]).pow(2).mean().backward()
            training.finish_step(step)
    return outcome_of(rank, training)


def test_a_loader_that_turns_out_empty_is_exact(workers: Workers) -> None:
    outcomes = workers.outcomes(3, train_without, (0, 4, 1), deadline=20.0, timeout=3.0)
    assert not any(outcome.error for outcome in outcomes), outcomes
    program = Program((0, 4, 1), epochs=1)
    assert_exact(program, [outcome.value for outcome in outcomes], *reference(program))


def evaluate_slowly(rank: int, lengths: tuple[int, ...]) -> int:
    """The rank that joins hears of it late, while the others' steps wait for nobody."""
    connect()
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    steps = 0
    with Join([ddp], may_break=True, timeout=timedelta(seconds=4)) as join, torch.no_grad():
        for _ in join.batches([torch.ones(1, 1)] * lengths[rank]):
            ddp(torch.ones(1, 1))
            steps += 1
            if steps == lengths[0] and rank == 0:
                delay_next_wait(channel_of(join), 1.0)
            elif steps == lengths[0]:
                time.sleep(0.3)  # so that the rank that joins comes first, and waits
    return steps


def test_a_rank_may_hear_late_that_it_has_joined(workers: Workers) -> None:
    outcomes = workers.outcomes(3, evaluate_slowly, (2, 9, 9), deadline=20.0, timeout=4.0)
    assert not any(outcome.error for outcome in outcomes), outcomes
    assert [outcome.value for outcome in outcomes] == [2, 9, 9]


# ---------------------------------------------------------------- the same loops under torch's Join

# It is right where nothing has a state besides the parameters, and where no rank runs out before the others.
RIGHT = ("plain-sgd", "even", "empty", "one")
# It knows of one forward per step and model, and of no other collectives: ranks abort or wait for each other.
FAILS = (
    *("adam-two-models", "two-models-window", "adam-and-zero", "adam-two-forwards"),
    *("adam-no-grad", "norm-evaluated", "sgd-inference", "window-in-one-context", "zero-scaler", "zero-window"),
)
# The same as others of these, and some take seconds.
LEFT_OUT = [
    f"{optimizer}-{feature}"
    for feature in ("two-models", "two-forwards", "no-grad", "inference")
    for optimizer in OPTIMIZERS
    if f"{optimizer}-{feature}" not in FAILS
] + [
    "zero-two-backwards",
    "zero-scaler-clip",
    "served-in-inference",
    "zero-served-in-inference",
    "wrong-length-evaluated",
]


def under_torch(workers: Workers, program: Program) -> list[Any]:
    return workers.outcomes(program.world_size, train, program, "torch", deadline=20.0, timeout=2.0)


OFF = [name for name in PROGRAMS if name not in (*FAILS, *LEFT_OUT)]


# What torch's Join does is no change of ours.
@pytest.mark.parametrize("name", others_long(OFF, *RIGHT, "adam", "zero", "adamw-step", "norm"))
def test_torchs_join_is_off_but_for_the_simplest_loops(workers: Workers, name: str) -> None:
    program = PROGRAMS[name]
    outcomes = under_torch(workers, program)
    assert not any(outcome.error for outcome in outcomes), outcomes
    models, expected = reference(program)
    worst = max(difference(outcome.value.parameters, list(models.parameters())) for outcome in outcomes)
    if name in RIGHT:
        assert worst < 1e-10
    else:
        assert worst > 1e-4
    if program.scheduler and name not in RIGHT:
        assert any(outcome.value.lr != expected.lr for outcome in outcomes)


@pytest.mark.parametrize("name", others_long(FAILS, "adam-two-models", "norm-evaluated"))
def test_torchs_join_fails(workers: Workers, name: str) -> None:
    """Some ranks end in an error, or their processes abort, at the latest after the process group's timeout."""
    assert any(outcome.error for outcome in under_torch(workers, PROGRAMS[name]))
