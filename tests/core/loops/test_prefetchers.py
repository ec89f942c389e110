"""Loops that ask for a batch before they have used the one before it."""

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

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


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def network(*_: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def reference(ranks: int, steps: list[list[tuple[int, int]]]) -> list[float]:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for present in steps:
        optimizer.zero_grad()
        for rank, step in present:
            (loss(net, batch(rank, step)) / ranks).backward()
        optimizer.step()
    return net.weight.flatten().tolist()


def train(rank: int, lengths: tuple[int, ...], way: str, kind: str = "list", inside: bool = False) -> Any:
    net = network()
    model: Any = net
    if kind == "sharded":
        fully_shard(net, mesh=init_device_mesh("cpu", (len(lengths),)))
    else:
        model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    weighting: Any = "samples" if kind == "samples" else "world"
    ahead = WAYS[way]
    loader: Any = [batch(rank, step) for step in range(lengths[rank])]
    if kind == "stream":
        loader = iter(loader)
    try:
        with Join(
            [model, optimizer], weighting=weighting, heartbeat=kind == "heartbeat", timeout=timedelta(0, 20)
        ) as join:
            for x in join.batches(ahead(loader)) if inside else ahead(join.batches(loader)):
                optimizer.zero_grad()
                loss(model, x).backward()
                optimizer.step()
    except JoinError as error:
        return str(error)
    weight: Any = net.weight
    return (weight.full_tensor() if kind == "sharded" else weight).flatten().tolist()


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
        assert "runs a backward after the end of a loop over join.batches that asks for a batch before" in error
        assert "join.batches(prefetcher(loader))" in error


def test_what_reads_ahead_inside_is_exact(workers: Workers) -> None:
    steps = [[(0, 0), (1, 0)], *([(1, step)] for step in range(1, 4))]
    for weight in workers.run(2, train, (1, 4), "look ahead", "list", True):
        assert weight == pytest.approx(reference(2, steps), abs=1e-12)


@pytest.mark.parametrize(
    ("lengths", "way", "steps"),
    [
        ((4, 2), "skip", [[(0, 1), (1, 1)], [(0, 2)], [(0, 3)]]),
        ((2, 4), "windows", [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [(1, 2)], [(1, 3)]]),
        ((3, 3), "look ahead", [[(0, step), (1, step)] for step in range(3)]),
    ],
)
def test_what_has_been_right_stays_so(
    workers: Workers, lengths: tuple[int, ...], way: str, steps: list[list[tuple[int, int]]]
) -> None:
    for weight in workers.run(2, train, lengths, way):
        assert weight == pytest.approx(reference(2, steps), abs=1e-12)


def train_late(rank: int, lengths: tuple[int, ...], sums: bool) -> Any:
    """Run a loss's backward when the next batch is here; or one of all, after the loop."""
    net = network()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
    before: Tensor | None = None
    try:
        with Join([ddp, optimizer], timeout=timedelta(0, 20)) as join:
            for x in join.batches([batch(rank, step) for step in range(lengths[rank])]):
                if before is not None and not sums:
                    before.backward()
                here = loss(ddp, x)
                before = here if before is None or not sums else before + here
            if before is not None:
                before.backward()
                optimizer.step()
    except JoinError as error:
        return str(error)
    return net.weight.flatten().tolist()


def test_a_backward_that_comes_after_its_loop_raises(workers: Workers) -> None:
    for error in workers.run(2, train_late, (1, 3), False):
        assert "runs the backward of a forward in a loop over join.batches that has ended on all ranks" in error


def test_one_backward_of_all_batches_may_come_after_the_loop(workers: Workers) -> None:
    together = [[(0, 0), (1, 0), (1, 1), (1, 2)]]
    for weight in workers.run(2, train_late, (1, 3), True):
        assert weight == pytest.approx(reference(2, together), abs=1e-12)


def train_apart(rank: int, lengths: tuple[int, ...], way: str) -> list[list[float]]:
    """Train one model in each step and another once after the loop, or evaluate and then train in a plain `for`."""
    nets = [network(), network()]
    ddps = [DistributedDataParallel(net) for net in nets]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
    batches = [batch(rank, step) for step in range(lengths[rank])]
    with Join([*ddps, *optimizers], timeout=timedelta(0, 20)) as join:
        total = torch.zeros((), dtype=torch.float64)
        for x in join.batches(batches):
            if way == "evaluates":
                nets[0](x)
                continue
            optimizers[0].zero_grad()
            loss(ddps[0], x).backward()
            optimizers[0].step()
            total = total + loss(ddps[1], x)
        if way == "once":
            total.backward()
            optimizers[1].step()
        for x in batches if way == "evaluates" else ():
            for ddp, optimizer in zip(ddps, optimizers, strict=True):
                optimizer.zero_grad()
                loss(ddp, x).backward()
                optimizer.step()
    return [net.weight.flatten().tolist() for net in nets]


@pytest.mark.parametrize("way", ["once", "evaluates"])
def test_a_backward_after_a_loop_that_leaves_nothing_behind(workers: Workers, way: str) -> None:
    steps = [[(0, 0), (1, 0)], [(1, 1)], [(1, 2)]]
    other = [[place for present in steps for place in present]] if way == "once" else steps
    for first, second in workers.run(2, train_apart, (1, 3), way):
        assert first == pytest.approx(reference(2, steps), abs=1e-12)
        assert second == pytest.approx(reference(2, other), abs=1e-12)
