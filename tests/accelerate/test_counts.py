"""Weighting by what a function counts, in Accelerate."""

from contextlib import nullcontext
from typing import Any

import pytest
from accelerate.data_loader import DataLoaderShard
from torch import Tensor

from accelerate_join import Accelerator
from tests import counted
from tests.counted import Case, count, mean_loss, total_loss
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.inside import planned_rows
from tests.support.workers import Workers
from torch_join import JoinError, windows


def train(rank: int, case: Case, way: str = "with", weighting: Any = count, accumulate: int = 1) -> list[Tensor]:
    with accelerator_of(rank, Accelerator, gradient_accumulation_steps=accumulate) as accelerator:
        net = counted.make_model()
        model, optimizer = accelerator.prepare(net, counted.make_optimizer(net.parameters()))
        loader: Any = own_shard(accelerator, case.batches(rank))
        options: dict[str, Any] = {"weighting": weighting, "rebalance": case.rebalance}

        def step(batches: list[Any], n_step: float | None) -> None:
            for batch in batches:
                with nullcontext() if batch is batches[-1] else accelerator.no_sync(model):
                    loss = mean_loss(model, batch) if n_step is None else total_loss(model, batch) / n_step
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        if way == "join_batches":
            for _ in range(case.epochs):
                for batch in accelerator.join_batches(loader, **options):
                    step([batch], None)
            accelerator.end_training()
        else:
            with accelerator.join_uneven_inputs(**options) as join:
                for _ in range(case.epochs):
                    for batch in join.batches(windows(loader, case.window)) if case.window > 1 else loader:
                        step(*((batch, count(batch)) if case.window > 1 else ([batch], None)))
        return [p.detach() for p in net.parameters()]


def own_shard(accelerator: Any, batches: list[Any]) -> Any:
    """Return a prepared loader of this process's own batches."""
    loader: Any = DataLoaderShard(batches, batch_size=None, device=accelerator.device)  # type: ignore[arg-type]
    loader._is_accelerate_prepared = True
    return accelerator.prepare(loader)


CASES = {
    "with": (Case((1, 4, 2), fractions=True, empty=((0, 0), (1, 1), (2, 1), (1, 3))), "with"),
    "join_batches, rank 0 has none": (Case((0, 3), empty=((1, 1),)), "join_batches"),
    "windows": (Case((0, 7, 4), window=3, empty=((1, 3), (2, 3), (1, 6))), "with"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mean_is_over_all_processes_items(workers: Workers, name: str) -> None:
    case, way = CASES[name]
    counted.check(case, workers.run(len(case.lengths), train, case, way))


def test_what_is_given_away_counts_where_it_is_trained(workers: Workers) -> None:
    case = Case((1, 6, 0), fractions=True, empty=((1, 2), (1, 5)), rebalance=True)
    steps = [{r: [case.batch(*place)] for r, place in row.items()} for row in planned_rows([1, 6, 0])]
    counted.check(case, workers.run(3, train, case), steps)


def train_wrongly(rank: int, accumulate: int = 1) -> str:
    try:
        train(rank, Case((1, 4)), "with", counted.wrong_at(1, 1, "nan"), accumulate)
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_windows_of_accelerates_own_are_refused(workers: Workers) -> None:
    for error in workers.run(2, train_wrongly, 2):
        assert error.startswith(
            "UnsupportedError: A weighting function cannot be used with gradient_accumulation_steps > 1"
        )


def test_what_is_no_count_raises_on_all_processes(workers: Workers) -> None:
    other, own = workers.run(2, train_wrongly)
    assert own.startswith("JoinValueError")
    assert "broken returned nan" in own
    assert "broken returned nan" in other
