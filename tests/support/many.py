"""Random runs, each from a seed: a few by default, and with `-m long` many.

`TORCH_JOIN_SEED` is the first of many, `TORCH_JOIN_CASES` how many runs there are.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.workers import WorkerError, Workers


def seeds(few: range, many: int = 300, *, of: int = 1) -> pytest.MarkDecorator:
    """Give a test a `seed`: each of `few`, and those of `many` runs, which are `long`; a seed stands for `of` runs."""
    first, cases = (int(os.environ.get(f"TORCH_JOIN_{name}", n)) for name, n in (("SEED", few.stop), ("CASES", many)))
    more = range(first, first + -(-cases // of))
    short = [seed for seed in few if seed not in more]
    return pytest.mark.parametrize("seed", [*short, *(pytest.param(seed, marks=pytest.mark.long) for seed in more)])


def note(seed: int, what: object, ended: str, seconds: float) -> None:
    """Write a line on a run into the log that `TORCH_JOIN_SOAK_LOG` names."""
    if path := os.environ.get("TORCH_JOIN_SOAK_LOG"):
        with open(path, "a") as log:
            log.write(f"{seed}\t{ended}\t{seconds:.1f} s\t{what}\n")


def train_each(rank: int, train: Callable[[int, Any], Any], runs: Sequence[Any]) -> list[Any]:
    """Train by each in turn, and say in which one something was raised."""
    found = []
    for run in runs:
        try:
            found.append(train(rank, run))
        except BaseException as error:
            raise AssertionError(str(run)) from error
    return found


def check_each(
    workers: Workers,
    train: Callable[[int, Any], Any],
    runs: Sequence[Any],
    check: Callable[[Any, tuple[Any, ...]], Any],
    deadline: float = 90.0,
    timeout: float = 20.0,
) -> None:
    """Train by each of some runs of as many ranks in one call of the workers, and check what its ranks have then."""
    outcomes = workers.outcomes(runs[0].world_size, train_each, train, runs, deadline=deadline, timeout=timeout)
    errors = [f"--- rank {rank}: {one.trace or one.error}" for rank, one in enumerate(outcomes) if one.error]
    if errors:
        raise WorkerError("\n".join(errors))
    for run, ranks in zip(runs, zip(*(outcome.value for outcome in outcomes), strict=True), strict=True):
        try:
            check(run, ranks)
        except AssertionError as error:
            raise AssertionError(f"{run}: {error}") from error
