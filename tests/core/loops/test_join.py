"""`Join` in plain loops: the parameters are those of a single process. And the same loops under torch's Join."""

from typing import Any

import pytest

from tests.covering import others_long
from tests.support.front_ends.plain import (
    Loop,
    assert_exact,
    assert_same_bits,
    go_on,
    train,
)
from tests.support.run import difference, reference
from tests.support.workers import Workers

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
    "scaler": {"scaler": 8.0},
    "scaler-clip": {"scaler": 8.0, "clip": 0.3, "clear": "after"},
    "in-turns": {"lengths": ((2, 5, 3), (4, 1, 4), (0, 3, 6))},
    "no-grad": {"evaluation": "no_grad"},
    "inference": {"evaluation": "inference", "one_context": True},
    "one-context": {"one_context": True, "scheduler": "step"},
    "breaks": {"leaves": True, "loop": "heartbeat"},
}
LENGTHS = ((3, 6), (6, 3), (0, 4, 2), (5, 2))  # the same rank is first in each epoch
WEIGHTINGS = ("world", "active", "samples")
LOOPS = ("sized", "plain", "iterable", "heartbeat", "wrong length")


def crossed() -> dict[str, Loop]:
    """Each feature with each optimizer; lengths, weightings and loops take turns."""
    programs = {}
    for i, (name, feature) in enumerate(FEATURES.items()):
        for j, optimizer in enumerate(OPTIMIZERS):
            turns = {"lengths": LENGTHS[(i + j) % 4], "weighting": WEIGHTINGS[(i + j) % 3], "loop": LOOPS[(i + j) % 5]}
            options = {"optimizer": optimizer, **turns, **feature}
            # What follows a plain `for` in the same `with` would not wait for the other ranks.
            if options["loop"] == "plain" and (feature.get("evaluation") or feature.get("one_context")):
                options["loop"] = "sized"
            programs[f"{optimizer}-{name}"] = Loop(**options)
    return programs


PROGRAMS = {
    "plain-sgd": Loop((3, 6), optimizer="plain"),
    "sgd": Loop((3, 6), optimizer="sgd"),
    "adam": Loop((3, 6)),
    "adamw": Loop((3, 6), optimizer="adamw"),
    "zero": Loop((3, 6), optimizer="zero"),
    "zero-plain": Loop((6, 0, 3), optimizer="zero", loop="plain", clear="after"),
    "two-backwards-zeros": Loop(
        (5, 0, 2), loss="two backwards", clear="after, zeros", weighting="samples", loop="iterable"
    ),
    "norm": Loop((2, 5), model="norm"),
    "norm-plain": Loop((2, 5, 3), model="norm", loop="plain", optimizer="sgd"),
    "norm-evaluated": Loop((0, 4, 3), model="norm", evaluation="no_grad"),
    "sgd-and-adam": Loop((3, 6), optimizer="sgd+adam", scheduler="step"),
    "adam-and-zero": Loop((6, 0, 3), optimizer="adam+zero", clip=0.3, scaler=8.0, loss="two models"),
    "wrong-length-window": Loop((3, 6, 0), accumulate=5, loop="wrong length", weighting="active"),
    "wrong-length-evaluated": Loop((5, 6, 3), loop="wrong length", evaluation="no_grad"),
    "window-in-one-context": Loop((4, 7), accumulate=3, one_context=True, optimizer="sgd"),
    "two-models-window": Loop((5, 2), loss="two models", accumulate=2, loop="plain", weighting="active"),
    # A rank that leaves its loop serves the others at the beginning of the next one.
    "served-in-inference": Loop(
        ((4, 1), (3, 5), (7, 2)), accumulate=3, loop="heartbeat", leaves=True, evaluation="inference"
    ),
    "zero-served-in-inference": Loop(
        ((4, 1), (0, 5), (3, 2)), optimizer="zero", loop="heartbeat", leaves=True, evaluation="inference"
    ),
    "even": Loop((4, 4), scheduler="step"),
    "empty": Loop((0, 0), optimizer="sgd"),
    "one": Loop((3,), clip=0.3),
    **crossed(),
}
# Optimizers take turns.
SOME = [f"{OPTIMIZERS[i % 4]}-{feature}" for i, feature in enumerate(FEATURES)]
SOME += [name for name in PROGRAMS if name not in crossed()]


@pytest.mark.parametrize("name", others_long(PROGRAMS, *SOME))
def test_parameters_are_those_of_a_single_process(workers: Workers, name: str) -> None:
    program = PROGRAMS[name]
    outcomes = workers.run(program.world_size, train, program, "ours", True)
    expected = reference(program)
    assert_exact(outcomes, expected)
    # Then three epochs of plain DDP. Of its buffers each rank has its own until the next forward.
    plain = [outcome.plain for outcome in outcomes]
    assert_same_bits(plain, buffers=False)
    assert difference(plain[0].parameters, go_on(expected)) < 1e-10


def test_the_programs_do_what_they_are_there_for() -> None:
    scalers = [reference(program).scaler for program in PROGRAMS.values() if program.scaler]
    assert any(state["scale"] > 8 for state in scalers)
    assert any(state["scale"] < 8 for state in scalers)
    assert any(state["_growth_tracker"] for state in scalers)
    sizes = {program.world_size for program in PROGRAMS.values()}
    assert sizes == {1, 2, 3}
    for feature in FEATURES:
        mine = [PROGRAMS[f"{optimizer}-{feature}"] for optimizer in OPTIMIZERS]
        assert {program.weighting for program in mine} == set(WEIGHTINGS)
