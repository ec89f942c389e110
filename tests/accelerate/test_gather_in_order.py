"""What processes have computed, in the dataset's order, after loops of Accelerate's of each kind."""

from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, TensorDataset

from accelerate_join import JoinError, gather_in_order, join_batches
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


def refuse(rank: int) -> tuple[list[str], Any]:
    said = []
    with accelerator_of(rank) as accelerator:
        loader = accelerator.prepare(DataLoader(numbers(0, 3), batch_size=2))
        rows = [rows_of([rank])] * rank
        for order in (None, "dataset"):
            with pytest.raises(ValueError, match="rank 1 cannot be joined") as error:
                gather_in_order(accelerator, rows, order=order)
            said.append(str(error.value))
        in_order = gather_in_order(accelerator, rows, order="shards")
        assert len(loader) == 1
        return said, in_order


def test_without_indices_of_a_dataset_that_is_dealt_out(workers: Workers) -> None:
    for said, rows in workers.run(2, refuse):
        assert all("Have the dataset return the index" in text and "order='shards'" in text for text in said)
        assert_same(rows, rows_of([1]))


def gather_in_a_step(rank: int) -> None:
    with accelerator_of(rank) as accelerator:
        loader = accelerator.prepare(DataLoader(numbers(0, 6), batch_size=2))
        with accelerator.join_uneven_inputs([torch.optim.SGD([torch.ones(1)], 0.1)]):
            for step, (index,) in enumerate(loader):
                if step == 1:
                    gather_in_order(accelerator, index)


def test_in_a_step_that_some_do_not_have(workers: Workers) -> None:
    first, second = workers.outcomes(2, gather_in_a_step)
    assert f"{JoinError.__name__}: gather_in_order was called in a step for which rank 1 had no batch" in first.error
    assert "PeerFailedError" in second.error
