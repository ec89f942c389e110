"""Loops by `iter` and `next` over `len(loader)`, which never ask for the end, and loops left by `break`."""

from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accelerate_join import _batches, join_uneven_inputs
from tests.support.accelerated import accelerator_of
from tests.support.inside import accelerate_loops
from tests.support.workers import Workers
from torch_join import Join

EPOCHS = 2


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def reference(steps: list[list[tuple[int, int]]]) -> list[float]:
    """Train one process; each step has the batches of some ranks, of two."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for present in steps:
            optimizer.zero_grad()
            for rank, step in present:
                (loss(net, batch(rank, step)) / 2).backward()
            optimizer.step()
    return net.weight.flatten().tolist()


def all_steps(lengths: tuple[int, ...], last: int | None = None) -> list[list[tuple[int, int]]]:
    steps = range(max(lengths) if last is None else last)
    return [[(rank, step) for rank, length in enumerate(lengths) if step < length] for step in steps]


def train(rank: int, lengths: tuple[int, ...], how: str, breaks: int, heartbeat: bool = False) -> list[float]:
    net = network()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
    batches = [batch(rank, step) for step in range(lengths[rank])]

    def step_on(x: Tensor) -> None:
        optimizer.zero_grad()
        loss(ddp, x).backward()
        optimizer.step()

    kept: list[Any] = []
    with Join([ddp, optimizer], heartbeat=heartbeat) as join:
        for _ in range(EPOCHS):
            if how == "for" or (how == "mixed" and rank == 0):
                for step, x in enumerate(join.batches(batches)):
                    step_on(x)
                    if step + 1 == breaks:
                        break
            else:
                iterator = iter(join.batches(batches))
                for _ in range(len(batches)):
                    step_on(next(iterator))
                if how == "kept":
                    kept.append(iterator)
    for iterator in kept:
        assert next(iterator, None) is None
    return net.weight.flatten().tolist()


@pytest.mark.parametrize("heartbeat", [False, True])
@pytest.mark.parametrize("how", ["next", "kept", "mixed"])
@pytest.mark.parametrize("lengths", [(3, 7), (5, 2), (4, 4), (1, 2)])
def test_a_loop_that_never_asks_for_the_end(
    workers: Workers, lengths: tuple[int, ...], how: str, heartbeat: bool
) -> None:
    for weights in workers.run(2, train, lengths, how, 0, heartbeat):
        assert weights == pytest.approx(reference(all_steps(lengths)), abs=1e-12)


@pytest.mark.parametrize("lengths", [(3, 7), (2, 2), (7, 3), (1, 5), (4, 3)])
def test_a_break_at_the_same_step_may_be_some_ranks_last(workers: Workers, lengths: tuple[int, ...]) -> None:
    last = min(lengths)
    for weights in workers.run(2, train, lengths, "for", last):
        assert weights == pytest.approx(reference(all_steps(lengths, last)), abs=1e-12)


def train_three(rank: int, lengths: tuple[int, ...]) -> list[float]:
    """Two ranks leave in the tail, one of them by `next`."""
    net = network()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
    with Join([ddp, optimizer]) as join:
        for _ in range(EPOCHS):
            iterator = iter(join.batches([batch(rank, step) for step in range(lengths[rank])]))
            for x in iterator if rank == 2 else (next(iterator) for _ in range(lengths[rank])):
                optimizer.zero_grad()
                loss(ddp, x).backward()
                optimizer.step()
    return net.weight.flatten().tolist()


def test_three_ranks(workers: Workers) -> None:
    lengths = (2, 4, 6)
    expected = network()
    optimizer = torch.optim.Adam(expected.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for present in all_steps(lengths):
            optimizer.zero_grad()
            for rank, step in present:
                (loss(expected, batch(rank, step)) / 3).backward()
            optimizer.step()
    for weights in workers.run(3, train_three, lengths):
        assert weights == pytest.approx(expected.weight.flatten().tolist(), abs=1e-12)


Epochs = list[tuple[int, ...]]


def train_by_next(rank: int, epochs: Epochs, heartbeat: bool, keeps: bool) -> list[float]:
    net = network()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
    kept = []
    with Join([ddp, optimizer], heartbeat=heartbeat) as join:
        for lengths in epochs:
            batches = [batch(rank, step) for step in range(lengths[rank])]
            iterator = iter(join.batches(batches))
            kept += [iterator] if keeps else []
            for _ in range(len(batches)):
                optimizer.zero_grad()
                loss(ddp, next(iterator)).backward()
                optimizer.step()
    return net.weight.flatten().tolist()


# A rank without a batch never calls `next`, and must not take the others' next loop for this one.
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("heartbeat", [False, True])
@pytest.mark.parametrize(
    "epochs",
    [
        [(0, 2), (2, 2)],
        [(2, 2), (0, 2)],
        [(2, 1), (0, 2), (0, 1), (3, 1)],
        [(0, 0), (0, 2), (0, 0)],
        [(2, 0, 3), (0, 2, 0), (2, 2, 2)],
        [(2, 2, 2), (0, 0, 1)],
    ],
)
def test_a_loop_that_a_rank_never_asks_for_a_batch(
    workers: Workers, epochs: Epochs, heartbeat: bool, keeps: bool
) -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for lengths in epochs:
        for present in all_steps(lengths):
            optimizer.zero_grad()
            for rank, step in present:
                (loss(net, batch(rank, step)) / len(lengths)).backward()
            optimizer.step()
    for weights in workers.run(len(epochs[0]), train_by_next, epochs, heartbeat, keeps):
        assert weights == pytest.approx(net.weight.flatten().tolist(), abs=1e-12)


def ask(rank: int, how: str) -> str:
    ddp = DistributedDataParallel(network())
    with Join([ddp]) as join:
        first = iter(join.batches([batch(rank, step) for step in range(3)]))
        if how == "none":
            return ""
        if how == "other order":
            second = iter(join.batches([batch(rank, 9)]))
            assert sum(1 for _ in second) == 1
            return str(sum(1 for _ in first))
        for _ in range(rank):
            loss(ddp, next(first)).backward()
    return ""


def test_batches_that_no_rank_or_only_some_ask_for(workers: Workers) -> None:
    assert workers.run(2, ask, "none") == ["", ""]
    for how, text in (
        ("one rank", "Rank 0 made an iterator over join.batches and asked it for no batch"),
        ("other order", "went on after it had been left"),
    ):
        for outcome in workers.outcomes(2, ask, how):
            assert text in outcome.error, (how, outcome)


def resume(rank: int, how: str) -> int:
    ddp = DistributedDataParallel(network())
    join = Join([ddp])
    if how == "outside":
        return sum(1 for _ in join.batches([1, 2]))
    with join:
        iterator = iter(join.batches([batch(rank, step) for step in range(3)]))
        next(iterator)
        if how == "another":
            del iterator
            iterator = iter(join.batches([batch(rank, step) for step in range(5)]))
            next(iterator)
    return sum(1 for _ in iterator)


def test_a_loop_outside_of_its_with(workers: Workers) -> None:
    for how, text in (
        ("outside", "begun outside of its `with`"),
        ("after", "went on after it had been left"),
    ):
        for outcome in workers.outcomes(2, resume, how):
            assert text in outcome.error, (how, outcome)


# ---------------------------------------------------------------- Accelerate


def accelerated(rank: int, lengths: tuple[int, ...], form: str, how: str) -> tuple[list[float], int, list[float]]:
    with accelerator_of(rank) as accelerator:
        net = network()
        model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
        loader: Any = DataLoaderShard([batch(rank, step) for step in range(lengths[rank])], batch_size=None)  # type: ignore[arg-type]
        counts: list[float] = []

        def step_on(x: Tensor) -> None:
            counts.append(float(accelerator.gather(torch.tensor([len(x)])).sum()))
            accelerator.backward(loss(model, x))
            optimizer.step()
            optimizer.zero_grad()

        def epochs(batches: Any) -> None:
            for _ in range(EPOCHS):
                if how == "next":
                    iterator = iter(batches())
                    for _ in range(len(loader)):
                        step_on(next(iterator))
                    continue
                for step, x in enumerate(batches()):
                    step_on(x)
                    if how == "break" and step == 1:
                        break

        if form == "decorator":
            join_uneven_inputs(accelerator)(epochs)(lambda: loader)
        elif form == "with":
            with accelerator.join_uneven_inputs():
                epochs(lambda: loader)
        else:
            epochs(lambda: accelerator.join_batches(loader))
        _batches.finish(accelerator)  # as end_training does, which ends the group too
        assert not accelerate_loops()
        assert type(accelerator).__name__ == "Accelerator"
        return net.weight.flatten().tolist(), loader.iteration, counts


@pytest.mark.parametrize("form", ["with", "batches", "decorator"])
@pytest.mark.parametrize("how", ["for", "next", "break"])
@pytest.mark.parametrize("lengths", [(3, 7), (5, 2), (4, 4)])
def test_with_accelerate(workers: Workers, lengths: tuple[int, ...], form: str, how: str) -> None:
    last = 2 if how == "break" else None
    for weights, epochs, counts in workers.run(2, accelerated, lengths, form, how):
        assert weights == pytest.approx(reference(all_steps(lengths, last)), abs=1e-12)
        assert epochs == EPOCHS or how == "break"
        assert set(counts) <= {2.0, 4.0}


def raise_within(rank: int) -> str:
    with accelerator_of(rank) as accelerator:
        model = accelerator.prepare(network())
        loader: Any = DataLoaderShard([batch(rank, step) for step in range((2, 5)[rank])], batch_size=None)  # type: ignore[arg-type]

        class Broken:
            def __len__(self) -> int:
                return 4

            def __iter__(self) -> Any:
                yield from loader
                raise KeyError("in the loader")

        for x in accelerator.join_batches(Broken()):
            accelerator.backward(loss(model, x))
    return ""


def test_a_loader_that_raises_ends_the_context(workers: Workers) -> None:
    first, second = workers.outcomes(2, raise_within)
    assert "in the loader" in first.error
    assert "in the loader" in second.error
