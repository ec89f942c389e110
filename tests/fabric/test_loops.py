"""Loops over Fabric's loaders: nested, left, zipped, evaluating; and what cannot be right raises on all ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_join.fabric import DDPJoinStrategy
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.workers import Workers


class Stream(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


class Job:
    """A small training: what most of these tests have."""

    def __init__(self, rank: int, world_size: int, **options: Any) -> None:
        self.rank = rank
        self.fabric = fabric_of(world_size, DDPJoinStrategy(**options))
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1)).double()
        adam = torch.optim.Adam(self.net.parameters(), lr=0.05)
        self.model, self.optimizer = self.fabric.setup(self.net, adam)

    def loader(self, lengths: tuple[int, ...], stream: bool = False, seed: int = 0) -> Any:
        generator = torch.Generator().manual_seed(7 * seed + self.rank)
        data: Any = torch.randn(2 * lengths[self.rank], 3, generator=generator, dtype=torch.float64)
        loader: Any = DataLoader(Stream(data) if stream else data, batch_size=2)
        return self.fabric.setup_dataloaders(loader, use_distributed_sampler=False)

    def step(self, batch: Any) -> None:
        self.fabric.backward(self.model(batch).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, loader: Any) -> float:
        self.model.eval()
        with torch.no_grad():
            found = [self.model(batch).sum() for batch in loader]
        self.model.train()
        return float(self.fabric.all_reduce(torch.stack(found).sum(), reduce_op="sum"))

    def state(self) -> list[Any]:
        self.fabric.barrier()
        moments = [v for state in self.optimizer.optimizer.state.values() for v in state.values()]
        return [v.tolist() for v in [*self.net.parameters(), *moments]]


def validate_within(rank: int, lengths: tuple[int, ...], stream: bool, inner: tuple[int, ...], until: int) -> Any:
    job = Job(rank, len(lengths))
    training, validation = job.loader(lengths, stream), job.loader(inner, seed=1)
    values = []
    for step, batch in enumerate(training):
        job.step(batch)
        if step < until:
            values.append(job.evaluate(validation))
    return values, job.state(), job.evaluate(validation)


@pytest.mark.parametrize("inner", [(2, 2), (1, 3)], ids=["even", "uneven"])
@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
def test_a_nested_loop_is_right_while_no_rank_has_joined(
    workers: Workers, stream: bool, inner: tuple[int, ...]
) -> None:
    lengths = (2, 4) if stream else (3, 3)
    first, second = workers.run(2, to_the_end, validate_within, lengths, stream, inner, 2)
    assert first == second
    # The same without a loop inside; of a model whose parameters are the same.
    plain, _ = workers.run(2, to_the_end, validate_within, lengths, stream, inner, 0)
    assert plain[1:] == first[1:]
    assert len({*first[0]}) == 2


def refused(outcomes: list[Any], *texts: str) -> None:
    for outcome in outcomes:
        assert all(text in outcome.error for text in texts), outcome.error


@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
def test_a_nested_loop_raises_where_some_ranks_run_out(workers: Workers, stream: bool) -> None:
    until = 1 if not stream else 4  # where lengths are certain, at the first
    outcomes = workers.outcomes(2, to_the_end, validate_within, (2, 4), stream, (2, 2), until)
    refused(outcomes, "started inside another loop", "fabric.strategy.batches(zip(a, b))", "Evaluate after")


def train_within(rank: int, does: str) -> None:
    job = Job(rank, 2)
    outer, inner = job.loader((2, 2)), job.loader((1, 3))
    for _ in outer:
        for batch in inner:
            if does == "train":
                job.step(batch)
            else:
                job.fabric.all_reduce(torch.ones(1))


@pytest.mark.parametrize("does", ["train", "reduce"])
def test_an_uneven_nested_loop_does_nothing_together(workers: Workers, does: str) -> None:
    text = "with gradients" if does == "train" else "in a loop over a Fabric dataloader, inside another"
    refused(workers.outcomes(2, to_the_end, train_within, does), text)


def pair(rank: int, how: str, stream: bool) -> Any:
    job = Job(rank, 2)
    a, b = job.loader((2, 4), stream), job.loader((3, 5), stream, seed=1)
    pairs = zip(a, b, strict=False)
    for x, y in job.fabric.strategy.batches(pairs) if how == "batches" else pairs:
        job.step(torch.cat([x, y]))
    return job.state()


@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
def test_loaders_are_zipped_by_batches(workers: Workers, stream: bool) -> None:
    first, second = workers.run(2, to_the_end, pair, "batches", stream)
    assert first == second
    refused(workers.outcomes(2, to_the_end, pair, "zip", stream), "fabric.strategy.batches(zip(a, b))")


def reading_ahead(loader: Any) -> Iterator[Any]:
    iterator = iter(loader)
    following = next(iterator, None)
    while following is not None:
        batch, following = following, next(iterator, None)
        yield batch


def prefetch(rank: int, lengths: tuple[int, ...], how: str) -> Any:
    job = Job(rank, 3)
    loader = job.loader(lengths)
    for _ in range(2):
        if how == "inside":
            batches = job.fabric.strategy.batches(reading_ahead(loader))
        else:
            batches = loader if how == "not" else reading_ahead(loader)
        for batch in batches:
            job.step(batch)
    return job.state()


def test_what_reads_ahead_goes_inside(workers: Workers) -> None:
    """Around an uneven loop its last batches would be trained in no step of the others."""
    for how, lengths in [("inside", (2, 5, 3)), ("around", (3, 3, 3))]:
        assert workers.run(3, prefetch, lengths, how) == workers.run(3, prefetch, lengths, "not")
    refused(workers.outcomes(3, prefetch, (2, 5, 3), "around"), "fabric.strategy.batches(prefetcher(loader))")
    refused(workers.outcomes(3, prefetch, (1, 2, 2), "around"), "fabric.strategy.batches(prefetcher(loader))")


def leave(rank: int, how: str, stream: bool) -> Any:
    job = Job(rank, 3, may_break=how == "at its own step")
    loader = job.loader((2, 6, 3), stream)
    for _ in range(2):
        context = job.fabric.strategy.joining(loader) if how == "joining" else None
        if context is not None:
            context.__enter__()
        for step, batch in enumerate(loader):
            job.step(batch)
            if step == (1 + rank if how == "at its own step" else 4):
                break
        if context is not None:
            context.__exit__(None, None, None)
            first = [p.tolist() for p in job.net.parameters()]
            assert job.fabric.broadcast(first) == first
    return job.state()


@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
@pytest.mark.parametrize("how", ["break", "joining", "at its own step"])
def test_a_loop_may_be_left(workers: Workers, how: str, stream: bool) -> None:
    first, second, third = workers.run(3, to_the_end, leave, how, stream)
    assert first == second == third


class CycleIterator:
    """LitGPT's: goes through a loader without an end."""

    def __init__(self, iterable: Any) -> None:
        self.iterable, self.epoch = iterable, 0
        self._iterator: Any = None

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.iterable)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.iterable)
            self.epoch += 1
            return next(self._iterator)


def cycle(rank: int) -> Any:
    job = Job(rank, 2)
    batches, steps = CycleIterator(job.loader((2, 3))), 0
    while batches.epoch < 3:
        job.step(next(batches))
        steps += 1
    del batches  # amid an epoch, which is left here
    return steps, job.state()


def test_a_cycle_goes_on_with_all_ranks(workers: Workers) -> None:
    (steps, first), (more, second) = workers.run(2, to_the_end, cycle)
    assert first == second
    assert (steps, more) == (7, 10)


def evaluate(rank: int, wraps: bool) -> Any:
    """Gather all predictions over shards of which one is empty."""
    fabric = fabric_of(3)
    model = nn.Linear(1, 1)
    if wraps:
        model = fabric.setup(model)
    data = torch.arange(5 * rank, dtype=torch.float32)[:, None] + 100 * rank
    rows = []
    with torch.no_grad():
        loader: Any = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
        for batch in fabric.setup_dataloaders(loader, use_distributed_sampler=False):
            model(batch)
            rows.append(fabric.strategy.gather_rows(batch))
    last = fabric.broadcast(torch.cat(rows) if rows else None, src=2)
    return sorted(last.flatten().tolist())


@pytest.mark.parametrize("wraps", [True, False], ids=["set up", "not set up"])
def test_an_evaluation_sees_the_union_once(workers: Workers, wraps: bool) -> None:
    for found in workers.run(3, to_the_end, evaluate, wraps):
        assert found == [float(n) for n in (*range(100, 105), *range(200, 210))]


def set_up_within(rank: int) -> None:
    job = Job(rank, 2)
    for step, batch in enumerate(job.loader((2, 4))):
        job.step(batch)
        if step == 3:
            job.fabric.setup(nn.Linear(2, 2))


def test_a_set_up_inside_a_loop_raises(workers: Workers) -> None:
    refused(workers.outcomes(2, to_the_end, set_up_within), "A model was set up inside a loop")


def fail(rank: int, how: str) -> None:
    job = Job(rank, 3)
    loader = job.loader((1, 6, 3))
    if how == "joining":
        with job.fabric.strategy.joining(loader):
            for step, batch in enumerate(loader):
                job.step(batch)
                if step == 2 and rank == 2:
                    raise ValueError("of the user's")
        return
    for step, batch in enumerate(loader):
        job.step(batch)
        if step == 2 and rank == 2:
            raise ValueError("of the user's")


@pytest.mark.parametrize("how", ["joining", "the process's end"])
def test_a_failure_is_told_to_all(workers: Workers, how: str) -> None:
    outcomes = workers.outcomes(3, to_the_end, fail, how)
    refused(outcomes[2:], "ValueError: of the user's")
    refused(outcomes[:2], "Rank 2", "of the user's")
