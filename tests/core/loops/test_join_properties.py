"""`Join` in random plain loops: the parameters are those of a single process, and the same bits everywhere.

`-m long` runs 2,000 of them, or as many as TORCH_JOIN_CASES says, from the seed TORCH_JOIN_SEED on.
"""

import hashlib
import math
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support import loops
from tests.support.cases import difference
from tests.support.loops import COLLECTIVES, Program, reference, tensors_of
from tests.support.workers import WorkerError, Workers

# torch says so where a GradScaler has skipped the first step.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
BATCH = 12  # programs per call of the workers, whose set-up costs as much as one program
CASES = int(os.environ.get("TORCH_JOIN_CASES", 2000))
FIRST = int(os.environ.get("TORCH_JOIN_SEED", 0))
# Shrinking would run for an hour, and a failure names its program anyway.
PROFILE = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


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


def train(rank: int, program: Program) -> Found:
    outcome = loops.train(rank, program)
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


def train_all(rank: int, programs: list[Program]) -> list[Found]:
    found = []
    for program in programs:
        try:
            found.append(train(rank, program))
        except BaseException as error:
            raise AssertionError(repr(program)) from error
    return found


def check(program: Program, ranks: tuple[Found, ...]) -> None:
    models, expected = reference(program)
    assert len({found.digest for found in ranks}) == 1, "ranks differ"
    # Of even inputs DDP leaves each rank its own buffers, until the next forward.
    if len(set(program.data.lengths_in(program.epochs - 1))) > 1:
        assert all(found.buffers == ranks[0].buffers for found in ranks), "buffers differ"
    for mine, theirs in (
        (ranks[0].parameters, list(models.parameters())),
        (ranks[0].buffers, list(models.buffers())),
    ):
        held = [torch.tensor(values, dtype=tensor.dtype) for values, tensor in zip(mine, theirs, strict=True)]
        assert not held or difference(held, theirs) < 1e-10
    assert ranks[0].lr == expected.lr
    assert ranks[0].scaler == expected.scaler
    for found, values in zip(ranks, expected.evaluated, strict=True):
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


def check_all(workers: Workers, programs: list[Program]) -> None:
    by_rank = workers.outcomes(programs[0].world_size, train_all, programs, deadline=90.0, timeout=20.0)
    errors = [
        f"--- rank {rank}: {outcome.trace or outcome.error}" for rank, outcome in enumerate(by_rank) if outcome.error
    ]
    if errors:
        raise WorkerError("\n".join(errors))
    for program, ranks in zip(programs, zip(*(outcome.value for outcome in by_rank), strict=True), strict=True):
        try:
            check(program, ranks)
        except AssertionError as error:
            raise AssertionError(f"{program}: {error}") from error


@st.composite
def programs(draw: st.DrawFn, world_size: int) -> Program:
    epochs = draw(st.integers(1, 2))
    accumulate = draw(st.sampled_from((1, 1, 1, 2, 3)))
    loop = draw(st.sampled_from(("sized", "iterable", "wrong length", "plain", "heartbeat")))
    # What follows a plain `for` in the same `with` would not wait for the other ranks.
    one_context = loop != "plain" and draw(st.booleans())
    return Program(
        draw(st.tuples(*[st.tuples(*[st.integers(0, 8)] * world_size)] * epochs)),
        optimizer=draw(st.sampled_from(("sgd", "adam", "adamw", "zero", "sgd", "adam", "adamw", "zero", "zero+sgd"))),
        weighting=draw(
            st.sampled_from(("world", "active", "samples", "count")[: 3 if loop == "plain" or accumulate > 1 else 4])
        ),
        loss=draw(st.sampled_from(("simple", "penalty", "two forwards", "two models", "two backwards"))),
        clear=draw(st.sampled_from(("before", "after", "before, zeros", "after, zeros", "model"))),
        clip=draw(st.sampled_from((None, 0.3))),
        scheduler=draw(st.sampled_from((None, "step", "plateau"))),
        scaler=draw(st.sampled_from((False, False, True))),
        accumulate=accumulate,
        loop=loop,
        # Under no_sync DDP leaves the buffers of the ranks to themselves.
        norm=accumulate == 1 and draw(st.booleans()),
        epochs=epochs,
        ragged=draw(st.booleans()),
        collective=draw(st.sampled_from(COLLECTIVES)),
        asynchronous=draw(st.booleans()),
        grouped=draw(st.sampled_from((False, False, True))),
        evaluation=None if loop == "plain" else draw(st.sampled_from((None, None, "no_grad", "inference"))),
        one_context=one_context,
        # A rank that has left would clear its window, between the loops, before the others come to its end.
        leaves=loop == "heartbeat" and not (one_context and accumulate > 1) and draw(st.booleans()),
    )


def batches(most: int) -> st.SearchStrategy[list[Program]]:
    return st.integers(2, most).flatmap(lambda size: st.lists(programs(size), min_size=BATCH, max_size=BATCH))


@given(batch=batches(4))
@settings(PROFILE, max_examples=3)
def test_random_loops_are_exact(workers: Workers, batch: list[Program]) -> None:
    check_all(workers, batch)


@pytest.mark.long
@seed(FIRST)
@given(batch=batches(4))
@settings(PROFILE, max_examples=-(-CASES // BATCH))
def test_many_random_loops_are_exact(workers: Workers, batch: list[Program]) -> None:
    check_all(workers, batch)
