"""Validation during fit: at the same steps on every rank, with the values of a single process."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.front_ends.lightning import Fit, Module, build_trainer, fit
from tests.support.run import loss_of, reference
from tests.support.workers import Workers

LOADERS = {  # sizes of the batches, by dataloader and rank
    "uneven": [((3, 2, 1), (4,), (2, 5))],
    "empty": [((), (4, 1), (2,))],
    "two": [((3, 1), (), (2, 2, 1)), ((), (5,), (1, 2))],
}


def batches(loader: int, rank: int, sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * loader + rank)
    return [torch.randn(size, 7, generator=generator, dtype=torch.float64) for size in sizes]


class Endless(IterableDataset[Tensor]):
    def __init__(self, data: list[Tensor]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


class Validated(Module):
    """Validates on uneven loaders and writes down when, and what it logged."""

    loaders = "uneven"
    streams = False

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.at: list[int] = []
        self.buffers_seen: list[list[Tensor]] = []

    def val_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        data = [batches(i, rank, sizes[rank]) for i, sizes in enumerate(LOADERS[self.loaders])]
        loaders = [DataLoader(Endless(each) if self.streams else each, batch_size=None) for each in data]  # type: ignore[arg-type]
        return loaders if len(loaders) > 1 else loaders[0]

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("loss", loss_of(self.net, (batch[:, :4], batch[:, 4:])), sync_dist=True, batch_size=len(batch))
        self.log("least", batch.min(), sync_dist=True, reduce_fx="min")
        self.log("most", batch.max(), sync_dist=True, reduce_fx="max")
        self.log("rows", float(len(batch)), sync_dist=True, reduce_fx="sum")

    def on_validation_start(self) -> None:
        self.at.append(self.trainer.global_step)

    def on_validation_epoch_end(self) -> None:
        self.buffers_seen.append([b.clone() for b in self.net.buffers()])
        self.log("rank", float(self.trainer.global_rank), sync_dist=True)

    def on_validation_end(self) -> None:
        values = {k: float(v) for k, v in self.trainer.callback_metrics.items()}
        self.noted.append((self.at[-1], values, self.buffers_seen[-1]))


@pytest.mark.parametrize(
    ("case", "options", "expected"),
    [
        (Fit((3, 6), epochs=2), {"val_check_interval": 0.5}, [3, 6, 9, 12]),
        (Fit((6, 0, 2), epochs=2), {"val_check_interval": 0.5}, [3, 6, 9, 12]),
        (Fit((2, 7), epochs=2), {"val_check_interval": 4}, [4, 11]),
        (Fit((2, 7), epochs=2, iterable=True), {"val_check_interval": 4}, [4, 11]),
        (Fit((7, 0, 2), epochs=2, iterable=True), {"val_check_interval": 5, "check_val_every_n_epoch": None}, [5, 10]),
        (Fit((2, 4), epochs=2, iterable=True), {}, [4, 8]),
        (Fit((2, 4), epochs=2, iterable=True, accumulate=2), {}, [2, 4]),
        (Fit((1, 5, 3), epochs=4), {"check_val_every_n_epoch": 2}, [10, 20]),
        (Fit(((2, 4), (6, 1))), {"val_check_interval": 0.5}, [2, 4, 7, 10]),
        (Fit((2, 8), epochs=1, limit=6), {"val_check_interval": 3}, [3, 6]),
        (Fit((2, 8), epochs=1, limit=6, iterable=True), {"val_check_interval": 3}, [3, 6]),
        (Fit((2, 4), epochs=2, limit=6, iterable=True), {}, [4, 8]),
        (Fit((1, 7), epochs=2, rebalance=True), {"val_check_interval": 0.5}, [2, 4, 6, 8]),
        (Fit((0, 8, 1), epochs=2, rebalance=True, iterable=True), {"val_check_interval": 2}, [2, 5]),
        (Fit((0, 8, 1), epochs=2, rebalance=True, iterable=True), {}, [3, 6]),
        (
            Fit((1, 6), epochs=2, rebalance=True),
            {"val_check_interval": 3, "check_val_every_n_epoch": None},
            [3, 6],
        ),
    ],
    ids=str,
)
def test_validation_runs_at_the_same_steps(
    workers: Workers, case: Fit, options: dict[str, Any], expected: list[int]
) -> None:
    if isinstance(case.lengths[0], tuple):
        case = Fit(case.lengths, epochs=2)
    for result in workers.run(case.world_size, fit, case, Validated, {}, {**options, "num_sanity_val_steps": 0}):
        assert [step for step, *_ in result.noted] == expected


def single_process_values(case: Fit, loaders: str, step: int) -> dict[str, float]:
    expected = reference(case)
    expected.net.load_state_dict(expected.history[step])
    expected.net.eval()
    values: dict[str, float] = {}
    for index, sizes in enumerate(LOADERS[loaders]):
        rows = torch.cat([b for rank in range(case.world_size) for b in batches(index, rank, sizes[rank])])
        suffix = f"/dataloader_idx_{index}" if len(LOADERS[loaders]) > 1 else ""
        with torch.no_grad():
            values[f"loss{suffix}"] = float(loss_of(expected.net, (rows[:, :4], rows[:, 4:])))
        values[f"least{suffix}"], values[f"most{suffix}"] = float(rows.min()), float(rows.max())
        values[f"rows{suffix}"] = float(len(rows))
    values["rank"] = (case.world_size - 1) / 2
    return values


@pytest.mark.covering(1)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("loaders", LOADERS)
@pytest.mark.parametrize(
    "case",
    [Fit((0, 2, 4), epochs=2), Fit((1, 4, 2), epochs=2, model="norm"), Fit((4, 1, 3), epochs=2, model="norm")],
    ids=["mlp", "norm", "norm-last"],
)
def test_values_equal_those_of_a_single_process(workers: Workers, case: Fit, loaders: str, streams: bool) -> None:
    given, options = {"loaders": loaders, "streams": streams}, {"val_check_interval": 2, "num_sanity_val_steps": 0}
    results = workers.run(3, fit, case, Validated, given, options)
    for result in results:
        assert [step for step, *_ in result.noted] == [2, 4, 6, 8]
        for index, (step, found, seen) in enumerate(result.noted):
            expected = single_process_values(case, loaders, step)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, abs=1e-10), (step, name)
            assert all(torch.equal(mine, its) for mine, its in zip(seen, results[0].noted[index][2], strict=True))


def test_one_process_logs_what_plain_lightning_logs(workers: Workers) -> None:
    case = Fit((3,), epochs=2)
    (joined,), (plain,) = (
        workers.run(1, fit, case, Validated, {"loaders": "two"}, {"strategy": name}) for name in ("ddp_join", "ddp")
    )
    assert joined.noted == plain.noted


def test_a_sanity_check_with_an_empty_rank(workers: Workers) -> None:
    options = {"num_sanity_val_steps": 2, "limit_val_batches": 1}
    results = workers.run(3, fit, Fit((2, 3, 1), epochs=1), Validated, {"loaders": "empty"}, options)
    assert [[step for step, *_ in result.noted] for result in results] == [[0, 3]] * 3


class CountsBatches(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        # Batch sizes 10 and 25: Lightning's mean of integers would be 17, and the value 3 percent off.
        self.log("mean", batch[0].mean(), sync_dist=True)

    def val_dataloader(self) -> DataLoader[Any]:
        size = (10, 25)[self.trainer.global_rank]
        return DataLoader(TensorDataset(torch.full((size, 1), float(self.trainer.global_rank))), batch_size=size)


def validate_with_odd_sizes(rank: int, strategy: str) -> float:
    trainer = build_trainer(Fit((1, 1)), strategy=strategy)
    return float(trainer.validate(CountsBatches(), verbose=False)[0]["mean"])


def test_epoch_means_are_exact(workers: Workers) -> None:
    assert workers.run(2, validate_with_odd_sizes, "ddp_join") == pytest.approx([25 / 35] * 2)
    assert workers.run(2, validate_with_odd_sizes, "ddp") == pytest.approx([25 / 34] * 2), "Lightning has mended it"


def reduce_integers(rank: int) -> list[float]:
    case = Fit((1, 1))
    trainer = build_trainer(case)
    trainer.fit(Module(case))
    ten = torch.tensor((10, 25)[rank])
    return [float(trainer.strategy.reduce(ten.clone(), reduce_op=op)) for op in ("mean", "sum", "max")]


def test_reduce_of_integers_is_exact(workers: Workers) -> None:
    assert workers.run(2, reduce_integers) == [[17.5, 35.0, 25.0]] * 2
