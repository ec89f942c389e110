"""Weighting by what a function counts, in Fabric."""

from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_join.fabric import DDPJoinStrategy
from tests import counted
from tests.counted import Case, count, mean_loss, total_loss
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.workers import Workers
from torch_join import JoinError, windows


def train(rank: int, case: Case, weighting: Any = count) -> list[Tensor]:
    fabric = fabric_of(len(case.lengths), DDPJoinStrategy(weighting=weighting))
    net = counted.make_model()
    model, optimizer = fabric.setup(net, counted.make_optimizer(net.parameters()))
    data: Any = DataLoader(case.batches(rank), batch_size=None)  # type: ignore[arg-type]
    loader: Any = fabric.setup_dataloaders(data, use_distributed_sampler=False)
    for _ in range(case.epochs):
        if case.window == 1:
            for batch in loader:
                optimizer.zero_grad()
                fabric.backward(mean_loss(model, batch))
                optimizer.step()
            continue
        for window in fabric.strategy.batches(windows(loader, case.window)):  # type: ignore[attr-defined]
            optimizer.zero_grad()
            for batch in window:
                with fabric.no_backward_sync(model, enabled=batch is not window[-1]):
                    fabric.backward(total_loss(model, batch) / count(window))
            optimizer.step()
    fabric.barrier()
    return [p.detach() for p in net.parameters()]


CASES = {
    "batches": Case((1, 4, 2), fractions=True, empty=((0, 0), (1, 1), (2, 1), (1, 3))),
    "windows": Case((0, 7, 4), window=3, empty=((1, 3), (2, 3), (1, 6))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mean_is_over_all_ranks_items(workers: Workers, name: str) -> None:
    case = CASES[name]
    counted.check(case, workers.run(len(case.lengths), to_the_end, train, case))


def train_wrongly(rank: int) -> str:
    try:
        to_the_end(rank, train, Case((1, 4)), counted.wrong_at(1, 1, "nan"))
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_what_is_no_count_raises_on_all_ranks(workers: Workers) -> None:
    other, own = workers.run(2, train_wrongly)
    assert own.startswith("JoinValueError")
    assert "broken returned nan" in own
    assert "broken returned nan" in other
