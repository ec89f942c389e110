"""What processes have computed, in the dataset's order, after loops of Accelerate's of each kind."""

from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, TensorDataset

from accelerate_join import gather_in_order, join_batches
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.rows import assert_same, rows_of
from tests.support.run import Run
from tests.support.workers import Workers

SAMPLES = 13


def numbers(first: int, count: int) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + count))


def gather(rank: int, how: str, to: int | None) -> Any:
    rows: list[Any] = []
    indices: list[Any] = []

    def note(index: Any) -> None:
        rows.append(rows_of(index.tolist()))
        indices.append(index)

    with accelerator_of(rank) as accelerator, torch.no_grad():
        model, loader = accelerator.prepare(Run().build(), DataLoader(numbers(0, SAMPLES), batch_size=2, shuffle=True))
        if how == "even":  # with some samples twice
            for (index,) in loader:
                note(index)
        elif how == "join_batches":
            for (index,) in accelerator.join_batches(loader):
                note(index)
        elif how == "left":  # by all at the same step
            for step, (index,) in enumerate(join_batches(accelerator, loader)):
                note(index)
                if step == 1:
                    break
        else:
            with accelerator.join_uneven_inputs():
                for (index,) in loader:
                    model(torch.ones(1, 4).double())
                    note(index)
                if how == "in the context":
                    return gather_in_order(accelerator, rows, indices, to)
        return accelerator.gather_in_order(rows, indices, to)


@pytest.mark.parametrize(
    ("how", "to", "ranks"),
    [("even", None, 3), ("join_batches", 1, 2), ("in the context", 0, 3), ("after it", None, 2), ("left", None, 2)],
)
def test_each_sample_once(workers: Workers, how: str, to: int | None, ranks: int) -> None:
    for rank, found in enumerate(workers.run(ranks, gather, how, to)):
        if how == "left":
            assert len(found["x"]) == 8
            assert found["x"][:, 0].tolist() == sorted({*found["x"][:, 0].tolist()})
        else:
            assert_same(found, rows_of(range(SAMPLES)) if to in (None, rank) else None)


def gather_shards(rank: int) -> Any:
    with accelerator_of(rank) as accelerator:
        data = numbers(100 * rank, [3, 0, 4][rank])
        rows = [rows_of(index.tolist()) for (index,) in DataLoaderShard(data, batch_size=2)]
        return accelerator.gather_in_order(rows)


def test_shards(workers: Workers) -> None:
    for found in workers.run(3, gather_shards):
        assert_same(found, rows_of([0, 1, 2, 200, 201, 202, 203]))
