"""Plain loops in which batches are rebalanced: the parameters are those of one process that follows the schedule."""

from typing import Any

import pytest

from tests.core.loops.test_join import assert_exact
from tests.support.loops import Program, reference, train
from tests.support.workers import Workers

OPTIMIZERS = ("sgd", "adam", "adamw", "zero")
FEATURES: dict[str, dict[str, Any]] = {
    "clip": {"clip": 0.3},
    "step": {"scheduler": "step"},
    "plateau": {"scheduler": "plateau"},
    "penalty": {"loss": "penalty", "clip": 0.3},
    "two-models": {"loss": "two models"},
    "two-forwards": {"loss": "two forwards"},
    "two-backwards": {"loss": "two backwards"},
    "window": {"accumulate": 3, "lengths": (4, 7, 0)},
    "scaler": {"scaler": True, "clip": 0.3, "clear": "after"},
    "in-turns": {"lengths": ((2, 5, 3), (4, 1, 4), (0, 3, 6))},
    "one-context": {"one_context": True, "scheduler": "step"},
    "sum": {"collective": "sum"},
    "norm": {"norm": True},
}
LENGTHS = ((3, 6), (9, 1), (0, 4, 2), (7, 0), (2, 0, 0), (1, 9, 2), (3, 3), (0, 1))
WEIGHTINGS = ("world", "active", "samples")
LOOPS = ("sized", "iterable")


def crossed() -> dict[str, Program]:
    programs = {}
    for i, (name, feature) in enumerate(FEATURES.items()):
        for j, optimizer in enumerate(OPTIMIZERS):
            turns = {
                "lengths": LENGTHS[(3 * i + j) % 8],
                "weighting": WEIGHTINGS[(i + j) % 3],
                "loop": LOOPS[(i + j // 2) % 2],
            }
            programs[f"{optimizer}-{name}"] = Program(**{"optimizer": optimizer, "rebalance": True, **turns, **feature})
    return programs


PROGRAMS = {
    "empty": Program((0, 0), rebalance=True),
    "even": Program((4, 4), rebalance=True),
    "even-stream": Program((4, 4), rebalance=True, loop="iterable"),
    "one": Program((3,), rebalance=True),
    **crossed(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_parameters_are_those_of_one_process_with_the_same_schedule(workers: Workers, name: str) -> None:
    program = PROGRAMS[name]
    outcomes = workers.run(program.world_size, train, program)
    assert_exact(program, outcomes, *reference(program))
