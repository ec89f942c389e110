"""Weighting by what a function counts, in plain loops, and steps that are windows of batches."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests import counted
from tests.counted import Case, count, make_model, make_optimizer, mean_loss, total_loss
from tests.support.inside import planned_rows
from tests.support.workers import Workers
from torch_join import Join, JoinableModel, JoinError, JoinValueError, windows

LOADERS: dict[str, Callable[[list[Any]], Iterable[Any]]] = {"list": list, "stream": iter}


def train(rank: int, case: Case, loader: str = "list", weighting: Any = count, sharded: bool = False) -> list[Tensor]:
    model: Any = make_model()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (len(case.lengths),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = make_optimizer(model.parameters())
    with Join([model, optimizer], weighting=weighting, rebalance=case.rebalance, timeout=timedelta(0, 20)) as join:
        for _ in range(case.epochs):
            batches: Any = LOADERS[loader](case.batches(rank))
            if case.window == 1:
                for batch in join.batches(batches):
                    optimizer.zero_grad()
                    mean_loss(model, batch).backward()
                    optimizer.step()
            else:
                for window in join.batches(windows(batches, case.window)):
                    optimizer.zero_grad()
                    n_window = count(window)
                    for batch in window:
                        with nullcontext() if batch is window[-1] else model.no_sync():
                            (total_loss(model, batch) / n_window).backward()
                    optimizer.step()
    return [(p.full_tensor() if sharded else p).detach() for p in model.parameters()]


CASES = {
    "two": (Case((2, 5)), "list"),
    "rank 0 has none": (Case((0, 4, 3), fractions=True), "stream"),
    "rank 0 ends first, some count nothing": (Case((1, 4, 3), empty=((1, 1), (2, 1), (1, 3), (2, 2))), "list"),
    "windows": (Case((0, 7, 4), window=3, fractions=True, empty=((1, 3), (1, 4), (1, 5), (2, 0))), "list"),
    "windows, stream": (Case((8, 2), window=3, empty=((0, 1), (1, 0), (1, 1))), "stream"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mean_is_over_all_ranks_items(workers: Workers, name: str) -> None:
    case, loader = CASES[name]
    counted.check(case, workers.run(len(case.lengths), train, case, loader))


def test_a_tensor_is_a_number(workers: Workers) -> None:
    case = Case((1, 3))
    counted.check(case, workers.run(2, train, case, "list", counted.as_tensor))


def test_the_mean_of_a_sharded_model(workers: Workers) -> None:
    case = Case((4, 1, 0), fractions=True, empty=((0, 0), (0, 3)))
    counted.check(case, workers.run(3, train, case, "list", count, True))


class Counting:
    """Notes on which rank each batch is counted."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, batch: Any) -> float:
        self.sizes.append(len(batch["x"]) + 1000 * int(batch["x"][0, 0] * 1e6))
        return count(batch)


def train_counting(rank: int, case: Case, loader: str) -> tuple[list[Tensor], list[int]]:
    counting = Counting()
    return train(rank, case, loader, counting), counting.sizes


@pytest.mark.parametrize(("rebalance", "loader"), [(False, "list"), (True, "list"), (True, "stream")])
def test_a_batch_is_counted_once_where_it_is_trained(workers: Workers, rebalance: bool, loader: str) -> None:
    case = Case((1, 6, 0), fractions=True, empty=((1, 2),), rebalance=rebalance)
    ranks = workers.run(3, train_counting, case, loader)
    rows = planned_rows([1, 6, 0], None if loader == "list" else [None] * 3) if rebalance else []
    rows = rows or [{r: (r, step) for r, n in enumerate(case.lengths) if step < n} for step in range(6)]
    steps = [{r: [case.batch(*place)] for r, place in row.items()} for row in rows]
    counted.check(case, [parameters for parameters, _ in ranks], steps)
    for rank, (_, sizes) in enumerate(ranks):
        expected = Counting()
        for row in steps:
            for batch in row.get(rank, ()):
                expected(batch)
        assert sizes == expected.sizes * case.epochs


def train_wrong(rank: int, returned: str, rebalance: bool) -> str:
    try:
        train(rank, Case((1, 4), rebalance=rebalance), "list", counted.wrong_at(1, 1, returned))
    except (JoinError, ZeroDivisionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize(
    ("returned", "rebalance"), [("-1", False), ("nan", True), ("inf", False), ("None", False), ("3", True)]
)
def test_what_is_no_count_raises_on_all_ranks(workers: Workers, returned: str, rebalance: bool) -> None:
    other, own = workers.run(2, train_wrong, returned, rebalance)
    words = f"broken returned {returned} (of type {type(counted.WRONG[returned]).__name__}) for a batch of rank 1."
    assert own.startswith("JoinValueError")
    assert words in own
    assert other.startswith("PeerFailedError")
    assert words in other


@pytest.mark.parametrize("raised", ["ZeroDivisionError", "StopIteration"])
def test_what_a_count_raises_is_told(workers: Workers, raised: str) -> None:
    other, own = workers.run(2, train_wrong, raised, False)
    assert raised in own
    assert raised in other


def train_in_a_plain_for(rank: int, joins: str) -> str:
    model = DistributedDataParallel(make_model())
    try:
        context: Any = Join([model], weighting=count)
        if joins == "torch":
            context = TorchJoin([JoinableModel(model)], weighting=count)
        with context:
            for batch in Case((1, 2)).batches(rank):
                mean_loss(model, batch).backward()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("joins", ["ours", "torch"])
def test_where_nobody_sees_the_batch_it_raises(workers: Workers, joins: str) -> None:
    for error in workers.run(2, train_in_a_plain_for, joins):
        assert "weighting=count needs to see the batches, which Join cannot see in a plain `for`" in error


def refill(batches: list[Any]) -> Iterable[Tensor]:
    buffer = torch.zeros(2)
    for number in batches:
        yield buffer.fill_(number)


def test_windows() -> None:
    made = windows([1, 2, 3, 4, 5], 2)
    assert [*made] == [*made] == [[1, 2], [3, 4], [5]]
    assert len(made) == 3
    assert [*windows(iter([1, 2]), 2)] == [[1, 2]]
    loader = torch.utils.data.DataLoader([1, 2, 3])  # type: ignore[arg-type]
    assert windows(loader, 2).sampler is loader.sampler
    with pytest.raises(JoinValueError, match="A window must have at least 1 batch, not 0"):
        windows([], 0)
    with pytest.raises(JoinValueError, match="reuses the memory of one batch"):
        [*windows(refill([1, 2, 3]), 2)]


def train_samples(rank: int) -> list[Tensor]:
    """Train on windows that "samples" weighs: a mean over rows."""
    model = DistributedDataParallel(make_model())
    case = Case((0, 5, 2), window=2)
    with Join([model], weighting="samples") as join:
        for window in join.batches(windows(case.batches(rank), 2)):
            rows = sum(len(batch["x"]) for batch in window)
            for batch in window:
                with nullcontext() if batch is window[-1] else model.no_sync():
                    (model(batch["x"]).square().sum() / rows).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_samples_of_a_window_add_up(workers: Workers) -> None:
    model = make_model()
    for row in Case((0, 5, 2), window=2).steps():
        x = torch.cat([batch["x"] for window in row.values() for batch in window])
        model(x).square().mean().backward()
    for gradients in workers.run(3, train_samples):
        for mine, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, atol=1e-12, rtol=0)
