"""Loops that ask for a batch before they have used the one before it."""

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.small import Training, alone, batches_of, loss, steps_of
from tests.support.workers import Workers
from torch_join import Join, JoinError

Ahead = Callable[[Iterable[Tensor]], Iterator[Tensor]]


def look_ahead(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Know whether a batch is the last."""
    iterator = iter(batches)
    now = next(iterator, None)
    while now is not None:
        ahead = next(iterator, None)
        yield now
        now = ahead


def windows(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    iterator = iter(batches)
    while window := list(islice(iterator, 2)):
        yield from window


def skip_one(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    return islice(batches, 1, None)


WAYS: dict[str, Ahead] = {"look ahead": look_ahead, "windows": windows, "skip": skip_one}


def train(rank: int, lengths: tuple[int, ...], way: str, kind: str = "list", inside: bool = False) -> Any:
    shard = partial(fully_shard, mesh=init_device_mesh("cpu", (len(lengths),)))
    training = Training(shard if kind == "sharded" else DistributedDataParallel)
    options: dict[str, Any] = {"weighting": "samples"} if kind == "samples" else {"may_break": kind == "heartbeat"}
    ahead, mine = WAYS[way], batches_of(rank, lengths)
    loader = iter(mine) if kind == "stream" else mine
    try:
        with Join(training.given, timeout=timedelta(0, 20), **options) as join:
            for x in join.batches(ahead(loader)) if inside else ahead(join.batches(loader)):
                training.step(x)
    except JoinError as error:
        return str(error)
    return training.weight


@pytest.mark.parametrize(
    ("lengths", "way", "kind"),
    [
        ((1, 4), "look ahead", "list"),
        ((5, 0), "look ahead", "heartbeat"),
        ((3, 4), "windows", "stream"),
        ((4, 2), "look ahead", "sharded"),
        ((0, 1, 3), "windows", "samples"),
    ],
)
def test_a_batch_that_would_be_trained_after_its_loop_raises(
    workers: Workers, lengths: tuple[int, ...], way: str, kind: str
) -> None:
    for error in workers.run(len(lengths), train, lengths, way, kind):
        assert "ran a backward after the end of its loop over join.batches: a prefetcher requests a batch" in error
        assert "join.batches(prefetcher(loader))" in error


def test_what_reads_ahead_inside_is_exact(workers: Workers) -> None:
    steps = steps_of((1, 4))
    for weight in workers.run(2, train, (1, 4), "look ahead", "list", True):
        assert weight == pytest.approx(alone(2, steps), abs=1e-12)


@pytest.mark.parametrize(
    ("lengths", "way", "steps"),
    [
        ((4, 2), "skip", [[(0, 1), (1, 1)], [(0, 2)], [(0, 3)]]),
        ((2, 4), "windows", steps_of((2, 4))),
        ((3, 3), "look ahead", steps_of((3, 3))),
    ],
)
def test_what_has_been_right_stays_so(
    workers: Workers, lengths: tuple[int, ...], way: str, steps: list[list[tuple[int, int]]]
) -> None:
    for weight in workers.run(2, train, lengths, way):
        assert weight == pytest.approx(alone(2, steps), abs=1e-12)


def train_late(rank: int, lengths: tuple[int, ...], sums: bool) -> Any:
    """Run a loss's backward when the next batch is here; or one of all, after the loop."""
    training = Training(DistributedDataParallel)
    before: Tensor | None = None
    try:
        with Join(training.given, timeout=timedelta(0, 20)) as join:
            for x in join.batches(batches_of(rank, lengths)):
                if before is not None and not sums:
                    before.backward()
                here = loss(training.model, x)
                before = here if before is None or not sums else before + here
            if before is not None:
                before.backward()
                training.optimizer.step()
    except JoinError as error:
        return str(error)
    return training.weight


def test_a_backward_that_comes_after_its_loop_raises(workers: Workers) -> None:
    for error in workers.run(2, train_late, (1, 3), False):
        assert "ran a backward whose forward belongs to an uneven loop over join.batches that has ended" in error


def test_one_backward_of_all_batches_may_come_after_the_loop(workers: Workers) -> None:
    together = [[(0, 0), (1, 0), (1, 1), (1, 2)]]
    for weight in workers.run(2, train_late, (1, 3), True):
        assert weight == pytest.approx(alone(2, together), abs=1e-12)


def train_apart(rank: int, lengths: tuple[int, ...], way: str) -> list[list[float]]:
    """Train one model in each step and another once after the loop, or evaluate and then train in a plain `for`."""
    first, second = Training(DistributedDataParallel), Training(DistributedDataParallel)
    batches = batches_of(rank, lengths)
    with Join([*first.given, *second.given], timeout=timedelta(0, 20)) as join:
        total = torch.zeros((), dtype=torch.float64)
        for x in join.batches(batches):
            if way == "evaluates":
                first.net(x)
                continue
            first.step(x)
            total = total + loss(second.model, x)
        if way == "once":
            total.backward()
            second.optimizer.step()
        for x in batches if way == "evaluates" else ():
            first.step(x)
            second.step(x)
    return [first.weight, second.weight]


@pytest.mark.parametrize("way", ["once", "evaluates"])
def test_a_backward_after_a_loop_that_leaves_nothing_behind(workers: Workers, way: str) -> None:
    steps = steps_of((1, 3))
    other = [[place for present in steps for place in present]] if way == "once" else steps
    for first, second in workers.run(2, train_apart, (1, 3), way):
        assert first == pytest.approx(alone(2, steps), abs=1e-12)
        assert second == pytest.approx(alone(2, other), abs=1e-12)
