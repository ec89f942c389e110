"""`Join` in random plain loops: the parameters are those of a single process, and the same bits everywhere."""

import hashlib
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.front_ends import plain
from tests.support.front_ends.plain import COLLECTIVES, Loop, tensors_of
from tests.support.many import check_each, seeds
from tests.support.run import difference, reference
from tests.support.workers import Workers

# torch says so where a GradScaler has skipped the first step.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
BATCH = 12  # programs per call of the workers, whose set-up costs as much as one program
LOOPS = ("sized", "iterable", "wrong length", "plain", "heartbeat")
WEIGHTINGS = ("world", "active", "samples", "count")


@dataclass(frozen=True)
class Found:
    """What one rank holds after a program; no tensors, since each would cost a file descriptor."""

    digest: str
    parameters: list[Any]
    buffers: list[Any]
    lr: list[float]
    scaler: dict[str, Any]
    evaluated: list[float]
    exchanged: list[list[tuple[float, Any]]]  # by epoch and loss: what the rank gave and what it got


def expected_exchange(kind: str | None, given_values: list[float | None]) -> Any:
    """What every active rank gets, from what each rank gives (`None`: it has joined)."""
    values = [value for value in given_values if value is not None]
    if kind == "sum":
        return sum(values)
    if kind == "avg":
        return sum(values) / len(values)
    if kind == "product":
        return math.prod(values)
    if kind in ("max", "min"):
        return max(values) if kind == "max" else min(values)
    if kind == "all_gather":
        return [value or 0.0 for value in given_values]
    if kind == "objects":
        return [None if value is None else {"loss": value} for value in given_values]
    return None


def train(rank: int, program: Loop) -> Found:
    outcome = plain.train(rank, program)
    digest = hashlib.sha256()
    for tensor in tensors_of(outcome):
        digest.update(tensor.cpu().numpy().tobytes())
    digest.update(repr((outcome.scheduler, outcome.lr, outcome.scaler)).encode())
    return Found(
        digest.hexdigest(),
        [p.tolist() for p in outcome.parameters],
        [b.tolist() for b in outcome.buffers],
        outcome.lr,
        outcome.scaler,
        outcome.evaluated,
        outcome.exchanged,
    )


def check(program: Loop, ranks: tuple[Found, ...]) -> None:
    expected = reference(program)
    assert len({found.digest for found in ranks}) == 1, "ranks differ"
    # After a last step of all ranks DDP leaves each its own buffers, until the next forward.
    if len((program.rows(program.epochs - 1) or [{}])[-1]) not in (0, program.world_size):
        assert all(found.buffers == ranks[0].buffers for found in ranks), "buffers differ"
    for mine, theirs in (
        (ranks[0].parameters, expected.parameters),
        (ranks[0].buffers, expected.buffers),
    ):
        held = [torch.tensor(values, dtype=tensor.dtype) for values, tensor in zip(mine, theirs, strict=True)]
        assert not held or difference(held, theirs) < 1e-10
    assert ranks[0].lr == expected.training.rates
    assert ranks[0].scaler == expected.scaler
    for found, values in zip(ranks, expected.losses, strict=True):
        assert same(found.evaluated, values), "evaluation differs"
    for epoch in range(program.epochs):
        by_rank = [found.exchanged[epoch] for found in ranks]
        for index in range(max(map(len, by_rank))):
            here = [values[index] if index < len(values) else None for values in by_rank]
            theirs = expected_exchange(program.collective, [None if one is None else one[0] for one in here])
            for one in here:
                assert one is None or same(one[1], theirs), (epoch, index, one, theirs)


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(same, got, expected))
    return math.isclose(got, expected, rel_tol=1e-10) if isinstance(expected, float) else bool(got == expected)


def options(one: random.Random, world_size: int) -> dict[str, Any]:
    """Return what a loop is made with."""
    epochs, accumulate, loop = one.choice((1, 2, 3)), one.choice((1, 1, 1, 2, 3)), one.choice(LOOPS)
    rebalance = loop in ("sized", "iterable") and one.choice((False, True))
    # What follows a plain `for` in the same `with` would not wait for the other ranks.
    one_context = loop != "plain" and one.choice((False, True))
    counts = ("world", "active", "samples") if loop == "plain" or accumulate > 1 else WEIGHTINGS
    return {
        "lengths": tuple(tuple(one.randint(0, 8) for _ in range(world_size)) for _ in range(epochs)),
        "epochs": epochs,
        "optimizer": one.choice(("sgd", "adam", "adamw", "zero", "sgd", "adam", "adamw", "zero", "zero+sgd")),
        "weighting": one.choice(counts),
        "loss": one.choice(("simple", "penalty", "two forwards", "two models", "two backwards")),
        "clear": one.choice(("before", "after", "before, zeros", "after, zeros", "model")),
        "clip": one.choice((None, 0.3)),
        "scheduler": one.choice((None, "step", "plateau")),
        "scaler": one.choice((0.0, 0.0, 8.0)),
        "accumulate": accumulate,
        "loop": loop,
        "rebalance": rebalance,
        # Under no_sync DDP leaves the buffers of the ranks to themselves.
        "model": one.choice(("mlp", "norm")) if accumulate == 1 else "mlp",
        "ragged": one.choice((False, True)),
        "collective": one.choice(COLLECTIVES),
        "asynchronous": one.choice((False, True)),
        "grouped": one.choice((False, False, True)),
        "evaluation": None if loop == "plain" or rebalance else one.choice((None, None, "no_grad", "inference")),
        "one_context": one_context,
        # A rank that has left would clear its window, between the loops, before the others come to its end.
        "leaves": loop == "heartbeat" and not (one_context and accumulate > 1) and one.choice((False, True)),
    }


@seeds(range(2), 2000, of=BATCH)
def test_random_loops_are_exact(workers: Workers, seed: int) -> None:
    one, world_size = random.Random(seed), 2 + seed % 3
    check_each(workers, train, [Loop(**options(one, world_size)) for _ in range(BATCH)], check)
