"""`Join` in random plain loops: the parameters are those of a single process, and the same bits everywhere.

The longer run (world sizes up to 4) is asked for with TORCH_JOIN_LONG=1 in the environment.
"""

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.cases import difference, flatten
from tests.loops import (
    Apply,
    Models,
    Program,
    build_optimizer,
    build_scheduler,
    clear,
    context,
    finish_step,
    loop,
    losses,
    optimizer_state,
    reference,
)
from tests.workers import WorkerError, Workers

BATCH = 12  # programs per call of the workers, whose set-up costs as much as one program
# Shrinking would run for an hour, and a failure names its program anyway.
PROFILE = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
LONG = pytest.mark.skipif(not os.environ.get("TORCH_JOIN_LONG"), reason="takes minutes: set TORCH_JOIN_LONG=1")


@dataclass(frozen=True)
class Found:
    """What one rank holds after a program; no tensors, since each would cost a file descriptor."""

    digest: str
    parameters: list[Any]
    buffers: list[Any]
    lr: float
    exchanged: list[list[tuple[float, Any]]]  # by epoch and loss: what the rank gave and what it got


def exchange(kind: str | None, value: Tensor) -> Any:
    """The collective of a step, as a user would write it."""
    value, world_size = value.detach(), dist.get_world_size()
    if kind == "all_reduce":
        total = value.clone()
        dist.all_reduce(total)
        return total.item()
    if kind == "all_gather":
        gathered = [torch.zeros_like(value) for _ in range(world_size)]
        dist.all_gather(gathered, value)
        return [tensor.item() for tensor in gathered]
    if kind == "objects":
        objects: list[Any] = [None] * world_size
        dist.all_gather_object(objects, {"loss": value.item()})
        return objects
    if kind == "barrier":
        dist.barrier()
    return None


def expected_exchange(kind: str | None, given_values: list[float | None]) -> Any:
    """What every active rank gets, from what each rank gives (`None`: it has joined)."""
    if kind == "all_reduce":
        return sum(value for value in given_values if value is not None)
    if kind == "all_gather":
        return [value or 0.0 for value in given_values]
    if kind == "objects":
        return [None if value is None else {"loss": value} for value in given_values]
    return None


def train(rank: int, program: Program) -> Found:
    models = Models(program)
    two = program.loss == "two models"
    wrapped: list[nn.Module] = [
        DistributedDataParallel(m) for m in ((models.encoder, models.head) if two else (models,))
    ]
    model: Apply = (lambda x: wrapped[1](wrapped[0](x))) if two else wrapped[0]
    optimizer = build_optimizer(program, models.parameters(), sharded=True)
    scheduler = build_scheduler(program, optimizer)
    exchanged: list[list[tuple[float, Any]]] = []
    for epoch in range(program.epochs):
        exchanged.append([])
        if program.accumulate > 1:
            models.zero_grad()
        with context(program, "ours", wrapped, optimizer, scheduler) as join:
            for step, batch in enumerate(loop(program, join, program.data.batches(rank, epoch))):
                if program.clear == "before" and step % program.accumulate == 0:
                    clear(program, models, optimizer)
                syncs = (step + 1) % program.accumulate == 0
                with ExitStack() as unsynced:
                    for ddp in wrapped:
                        unsynced.enter_context(nullcontext() if syncs else ddp.no_sync())  # type: ignore[operator]
                    for loss in losses(program, model, batch):
                        exchanged[-1].append((loss.item(), exchange(program.collective, loss)))
                        loss.backward()
                if syncs:
                    finish_step(program, models, optimizer, scheduler, step)
    parameters = [p.detach() for p in models.parameters()]
    buffers = list(models.buffers())
    lr = optimizer.param_groups[0]["lr"]
    digest = hashlib.sha256()
    for tensor in (*parameters, *flatten(optimizer_state(rank, optimizer))):
        digest.update(tensor.numpy().tobytes())
    if scheduler is not None:
        digest.update(repr({k: v for k, v in scheduler.state_dict().items() if not callable(v)}).encode())
    digest.update(repr(lr).encode())
    return Found(digest.hexdigest(), [p.tolist() for p in parameters], [b.tolist() for b in buffers], lr, exchanged)


def train_all(rank: int, programs: list[Program]) -> list[Found]:
    found = []
    for program in programs:
        try:
            found.append(train(rank, program))
        except BaseException as error:
            raise AssertionError(repr(program)) from error
    return found


def check(program: Program, ranks: tuple[Found, ...]) -> None:
    expected, lr = reference(program)
    assert len({found.digest for found in ranks}) == 1, "ranks differ"
    # Of even inputs DDP leaves each rank its own buffers, until the next forward.
    if len(set(program.data.lengths_in(program.epochs - 1))) > 1:
        assert all(found.buffers == ranks[0].buffers for found in ranks), "buffers differ"
    parameters, buffers = (
        [torch.tensor(values, dtype=t.dtype) for values, t in zip(mine, theirs, strict=True)]
        for mine, theirs in (
            (ranks[0].parameters, list(expected.parameters())),
            (ranks[0].buffers, list(expected.buffers())),
        )
    )
    assert difference(parameters, [p.detach() for p in expected.parameters()]) < 1e-10
    assert ranks[0].lr == lr
    if buffers:
        assert difference(buffers, list(expected.buffers())) < 1e-10
    for epoch in range(program.epochs):
        by_rank = [found.exchanged[epoch] for found in ranks]
        for index in range(max(map(len, by_rank))):
            here = [values[index] if index < len(values) else None for values in by_rank]
            theirs = expected_exchange(program.collective, [None if one is None else one[0] for one in here])
            for one in here:
                assert one is None or same(one[1], theirs), (epoch, index, one, theirs)


def same(got: Any, expected: Any) -> bool:
    return math.isclose(got, expected, rel_tol=1e-12) if isinstance(expected, float) else bool(got == expected)


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
    return Program(
        draw(st.tuples(*[st.tuples(*[st.integers(0, 8)] * world_size)] * epochs)),
        optimizer=draw(st.sampled_from(("sgd", "adam", "adamw", "zero"))),
        weighting=draw(st.sampled_from(("world", "active", "samples"))),
        loss=draw(st.sampled_from(("simple", "penalty", "two forwards", "two models", "two backwards"))),
        clear=draw(st.sampled_from(("before", "after", "zeros", "model"))),
        clip=draw(st.sampled_from((None, 0.3))),
        scheduler=draw(st.sampled_from((None, "step", "plateau"))),
        accumulate=accumulate,
        loop=draw(st.sampled_from(("sized", "iterable", "plain", "heartbeat"))),
        # Under no_sync DDP leaves the buffers of the ranks to themselves.
        norm=accumulate == 1 and draw(st.booleans()),
        epochs=epochs,
        ragged=draw(st.booleans()),
        collective=draw(st.sampled_from((None, "all_reduce", "all_gather", "objects", "barrier"))),
    )


def batches(most: int) -> st.SearchStrategy[list[Program]]:
    return st.integers(2, most).flatmap(lambda size: st.lists(programs(size), min_size=BATCH, max_size=BATCH))


@given(batch=batches(3))
@settings(PROFILE, max_examples=17)
def test_random_loops_are_exact(workers: Workers, batch: list[Program]) -> None:
    check_all(workers, batch)


@pytest.fixture
def four_workers() -> Iterator[Workers]:
    pool = Workers(4)
    yield pool
    pool.close()


@LONG
@given(batch=batches(4))
@settings(PROFILE, max_examples=170)
def test_many_random_loops_are_exact(four_workers: Workers, batch: list[Program]) -> None:
    check_all(four_workers, batch)
