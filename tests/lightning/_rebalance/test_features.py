"""What else a training may have, where batches are rebalanced: the numbers are those of the same schedule."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.aggregation import CatMetric

from lightning_join import DDPJoinStrategy, FSDPJoinStrategy, JoinCallback
from tests.core.backward.synced import SyncNorm
from tests.covering import others_long
from tests.lightning._loops import test_loop, test_none
from tests.lightning._training import test_manual, test_step_collectives
from tests.support import sharded_fits
from tests.support.front_ends.lightning import (
    Fit,
    Module,
    Result,
    assert_exact,
    assert_same_bits,
    build_trainer,
    fit,
    result_of,
)
from tests.support.inside import planned_rows
from tests.support.joint import joint_reference
from tests.support.run import TOLERANCE, Batch, Net, difference, flatten, loss_of, reference
from tests.support.workers import Workers
from torch_join import JoinValueError


def name_of(case: Fit) -> str:
    return "-".join(map(str, case.lengths)) + (" iterable" if case.iterable else "")


# ---------------------------------------------------------------- other ways to train

MANUAL = {
    "gan": ("gan", Fit((2, 5), ddp=test_manual.UNUSED)),
    "gan-samples": ("gan", Fit((0, 5, 2), weighting="samples", ragged=True, ddp=test_manual.UNUSED)),
    "window-streams": ("window", Fit((1, 6, 0), iterable=True, weighting="active")),
    "closures": ("closures", Fit((7, 0, 1), ddp=test_manual.UNUSED)),
    "local": ("local", Fit((1, 6), ddp=test_manual.UNUSED)),
}


@pytest.mark.parametrize("name", MANUAL)
def test_manual_optimization(workers: Workers, name: str) -> None:
    program, case = MANUAL[name]
    case = replace(case, epochs=2, rebalance=True)
    results = workers.run(case.world_size, test_manual.fit_manual, case, program, None)
    expected = test_manual.Alone(case).run(program)
    first, progress, hooks, _ = results[0]
    assert len(first) == len(expected) == sum(case.length(epoch) for epoch in range(2))
    for rank, (history, its_progress, its_hooks, trained) in enumerate(results):
        assert trained == [(e, i) for e in range(2) for i, row in enumerate(case.rows(e)) if rank in row]
        assert (its_progress, its_hooks) == (progress, hooks)
        for step, (mine, theirs) in enumerate(zip(history, first, strict=True)):
            names = [key for key in mine[0] if "running" not in key and "num_batches" not in key]
            test_manual.assert_equal_bits(*({key: state[0][key] for key in names} for state in (mine, theirs)), step)
            test_manual.assert_equal_bits(*(test_manual.as_dict(state[1]) for state in (mine, theirs)), step)
    for step, (ours, wanted) in enumerate(zip(first, expected, strict=True)):
        assert difference(flatten(ours[0]), flatten(wanted[0])) < TOLERANCE, step
        test_manual.assert_close(ours[1], wanted[1], step)
        assert ours[2] == wanted[2]


SILENT = [
    Fit((2, 8), optimizer="adamw", clip=0.5),
    Fit((9, 1), optimizer="sgd", accumulate=2, scheduler="step", weighting="active"),
    Fit((0, 3, 8), accumulate=3, weighting="samples", ragged=True, hooked=True),
    Fit((2, 8, 0), optimizer="sgd", iterable=True),
]


@pytest.mark.parametrize("case", SILENT, ids=name_of)
def test_a_step_without_a_loss(workers: Workers, case: Fit) -> None:
    case = replace(case, rebalance=True)
    expected = joint_reference(case, test_none.losses(case))
    results = workers.run(case.world_size, fit, case, test_none.Silent)
    assert_same_bits(results)
    for result in results:
        assert difference(result.parameters, expected.parameters) < TOLERANCE
        assert difference(flatten(result.optimizer), flatten(expected.optimizer)) < TOLERANCE
        assert (result.lr, result.global_step) == (expected.lr, expected.steps)
        assert all((outputs == {}) if none else "loss" in outputs for none, outputs in result.noted)


CONTRASTS = [
    Fit((1, 6), optimizer="sgd"),
    Fit((7, 0, 1), optimizer="adamw", ddp=test_step_collectives.TINY),
    Fit((2, 7), weighting="samples", accumulate=2, iterable=True),
]


@pytest.mark.parametrize("case", CONTRASTS, ids=name_of)
def test_gathers_with_gradients(workers: Workers, case: Fit) -> None:
    case = replace(case, rebalance=True)
    expected = joint_reference(case, test_step_collectives.losses)
    results = workers.run(case.world_size, fit, case, test_step_collectives.Contrastive)
    assert_same_bits(results)
    assert difference(results[0].parameters, expected.parameters) < TOLERANCE
    assert results[0].global_step == expected.steps


def normalized(net: Net, batches: dict[int, Batch], epoch: int, step: int) -> dict[int, Tensor | None]:
    """SyncBatchNorm takes the batches of all ranks for one."""
    outs = net(torch.cat([x for x, _ in batches.values()])).split([len(x) for x, _ in batches.values()])
    return {rank: (out - y).pow(2).mean() for out, (rank, (_, y)) in zip(outs, batches.items(), strict=True)}


class Normalized(Module):
    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        norm = SyncNorm(5).double()
        norm.load_state_dict(self.net.norm.state_dict())
        self.net.norm = norm


@pytest.mark.parametrize(
    "case",
    [Fit((1, 6), optimizer="sgd"), Fit((0, 6, 2), weighting="samples", ragged=True), Fit((7, 0), iterable=True)],
    ids=name_of,
)
def test_synced_batch_norms(workers: Workers, case: Fit) -> None:
    case = replace(case, model="norm", rebalance=True)
    expected = joint_reference(case, normalized)
    results = workers.run(case.world_size, fit, case, Normalized)
    assert_same_bits(results)
    assert difference(results[0].parameters, expected.parameters) < TOLERANCE
    assert difference(results[0].buffers[:2], expected.buffers[:2]) < TOLERANCE  # rank 0's count, as under ddp


# ---------------------------------------------------------------- what is logged


def number_of(batch: Batch) -> Tensor:
    """A number that float32, in which metrics add up, holds exactly."""
    return batch[0].sum().detach().mul(64).round()


class Logs(Module):
    """Logs numbers that tell whose batch it is, in all ways, and metrics of torchmetrics."""

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.mean, self.numbers = MeanMetric().set_dtype(torch.float64), CatMetric().set_dtype(torch.float64)
        self.each = SumMetric(dist_sync_on_step=True).set_dtype(torch.float64)
        self.noted = [], []  # by step; by epoch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        number = number_of(batch)
        options: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("number", number, **options)
        self.log("total", number, reduce_fx="sum", **options)
        self.mean.update(number)
        self.numbers.update(number)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.each(number)
        self.log("each", self.each, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        values = self.trainer.callback_metrics
        self.noted[0].append((float(values["number_step"]), float(values["total_step"])))

    def on_train_epoch_end(self) -> None:
        numbers = self.numbers.compute().sort().values
        self.numbers.reset()
        values = self.trainer.callback_metrics
        logged = (float(values[name]) for name in ("number_epoch", "total_epoch", "mean", "each"))
        self.noted[1].append((*logged, *numbers.tolist()))


@pytest.mark.parametrize(
    "case",
    [Fit((2, 7)), Fit((0, 7, 1), iterable=True), Fit((0, 6, 0), ragged=True, weighting="samples")],
    ids=name_of,
)
@pytest.mark.filterwarnings("ignore:Metric `.*` will save all targets:UserWarning")
def test_logged_values_and_metrics(workers: Workers, case: Fit) -> None:
    case = replace(case, epochs=2, rebalance=True)
    steps, epochs = [], []
    for epoch in range(2):
        rows = [[case.batch(owner, epoch, i) for owner, i in row.values()] for row in case.rows(epoch)]
        for row in rows:
            numbers = [float(number_of(batch)) for batch in row]
            steps.append((sum(numbers) / len(numbers), sum(numbers)))
        every = [(float(number_of(batch)), len(batch[0])) for row in rows for batch in row]
        weighted = sum(number * size for number, size in every) / sum(size for _, size in every)
        total, mean = sum(number for number, _ in every), sum(number for number, _ in every) / len(every)
        epochs.append((weighted, total, mean, total, *sorted(number for number, _ in every)))
    for result in workers.run(case.world_size, fit, case, Logs):
        its_steps, its_epochs = result.noted
        assert its_epochs == [pytest.approx(values, abs=1e-4) for values in epochs]
        assert its_steps == [pytest.approx(values, abs=1e-4) for values in steps]


# ---------------------------------------------------------------- epochs that are not run to their end


class Stops(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            self.trainer.should_stop = True


@pytest.mark.parametrize("case", [Fit((1, 9)), Fit((0, 2, 9), iterable=True, scheduler="step")], ids=name_of)
def test_should_stop_on_one_rank(workers: Workers, case: Fit) -> None:
    case = replace(case, rebalance=True)
    results = workers.run(case.world_size, fit, case, Stops)
    assert_same_bits(results)
    expected = reference(replace(case, max_steps=2))
    assert results[0].global_step == 2
    assert difference(results[0].parameters, expected.parameters) < TOLERANCE


class Monitored(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss


def test_early_stopping(workers: Workers) -> None:
    case = Fit((1, 6), epochs=6, optimizer="plain", rebalance=True)
    stops = EarlyStopping("loss_epoch", mode="max", patience=1, check_on_train_epoch_end=True)
    results = workers.run(2, fit, case, Monitored, {}, {"callbacks": [stops]})
    assert_same_bits(results)
    assert results[0].epoch < 6
    expected = reference(replace(case, epochs=results[0].epoch))
    assert difference(results[0].parameters, expected.parameters) < TOLERANCE


def fit_in_a_row(rank: int, cases: list[Fit]) -> list[Result]:
    return [fit(rank, case) for case in cases]


@pytest.mark.covering(1)
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("lengths", [(1, 9), (0, 0, 9)])
def test_one_fit_after_another_that_ended_while_gifts_travelled(
    workers: Workers, lengths: tuple[int, ...], iterable: bool
) -> None:
    whole = Fit(lengths, iterable=iterable, rebalance=True)
    short = [replace(whole, max_steps=steps, optimizer="sgd") for steps in (1, 2, 4)]
    cases = [short[0], whole, short[1], short[2], replace(whole, rebalance=False), whole]
    for case, *results in zip(cases, *workers.run(len(lengths), fit_in_a_row, cases), strict=True):
        assert_exact(case, results)


def fit_on(rank: int, case: Fit) -> Result:
    module = Module(case)
    trainer = build_trainer(case, max_epochs=1)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = case.epochs
    trainer.fit(module)
    return result_of(trainer, module)


@pytest.mark.parametrize("iterable", [False, True])
def test_a_trainer_that_goes_on(workers: Workers, iterable: bool) -> None:
    case = Fit((1, 6, 0), optimizer="plain", iterable=iterable, rebalance=True)
    assert_exact(case, workers.run(3, fit_on, case))


@dataclass(frozen=True)
class Leaving(Fit):
    """A rank leaves each epoch at a step; of nothing that it would have had after that anything is trained on."""

    leaves: tuple[int, int] = (0, 0)
    rebalance: bool = True

    def rows(self, epoch: int) -> list[dict[int, tuple[int, int]]]:
        lengths = self.lengths_in(epoch)
        said = [length if length < 2 else None for length in lengths] if self.iterable else None
        return planned_rows(lengths, said, leaves=self.leaves)


class Leaves(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.trainer.global_rank, batch_idx) == self.case.leaves else None  # type: ignore[attr-defined]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        self.noted.append((self.trainer.current_epoch, batch_idx, strategy.batch_owner, strategy.owner_batch_idx))
        return super().training_step(batch, batch_idx)


LEAVING = [
    Leaving((4, 6), leaves=(0, 1)),
    Leaving((1, 9), leaves=(0, 2)),  # it leaves a batch that it was given
    Leaving((2, 12), leaves=(0, 1), scheduler="step"),
    Leaving((2, 12), leaves=(0, 1), scheduler="epoch"),
    Leaving((9, 1), leaves=(0, 1), optimizer="sgd"),
    Leaving((9, 2, 9), leaves=(1, 1), weighting="active"),
    Leaving((0, 2, 9), leaves=(0, 1), accumulate=2),
    Leaving((8, 0, 2), leaves=(2, 1), iterable=True),
    Leaving((0, 7, 7), leaves=(1, 2), iterable=True, weighting="samples", ragged=True),
]


def test_gifts_to_a_rank_that_leaves_are_counted(workers: Workers) -> None:
    result, _ = workers.run(2, fit, Leaving((1, 9), leaves=(0, 2), epochs=1), Leaves)
    # That of the step, and that of the next one, which was on its way.
    assert "ranks [1] go on. 2 batches that others had given away are not trained on in this epoch." in result.warned
    assert result.warned.count("returned -1") == 1


class Holds(Module):
    """Batches of rank 1 cannot be sent."""

    def setup(self, stage: str) -> None:
        self.noted = self.trainer.estimated_stepping_batches

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        batches = [(x, y, (lambda: 0) if rank else 0) for x, y in self.case.batches(rank, 0)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)


def test_more_steps_than_were_estimated_are_told(workers: Workers) -> None:
    for rank, result in enumerate(workers.run(2, fit, Fit((2, 10), epochs=2, rebalance=True), Holds)):
        assert (result.noted, result.global_step) == (12, 20)
        assert result.warned.count("Rebal") == result.warned.count("the epoch has 10 steps, and not 6") == (rank == 0)


@pytest.mark.parametrize("number", others_long(range(len(LEAVING)), 1, 4, 6, 8), ids=lambda at: name_of(LEAVING[at]))
def test_a_rank_that_leaves_the_epoch(workers: Workers, number: int) -> None:
    case = LEAVING[number]
    results = workers.run(case.world_size, fit, case, Leaves)
    for rank, result in enumerate(results):
        rows = [(epoch, step, row) for epoch in range(case.epochs) for step, row in enumerate(case.rows(epoch))]
        assert result.noted == [(epoch, step, *row[rank]) for epoch, step, row in rows if rank in row]
    assert_same_bits(results)
    expected = reference(case)
    assert difference(results[0].parameters, expected.parameters) < TOLERANCE
    assert (results[0].global_step, results[0].lr) == (expected.steps, expected.lr)


# ---------------------------------------------------------------- what it says of itself


class Owners(Module):
    """Notes whose batch it gets, in hooks too."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        assert strategy.joined == (strategy.batch_owner is None)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        owner, index = strategy.batch_owner, strategy.owner_batch_idx
        assert torch.equal(batch[0], self.case.batch(owner, self.trainer.current_epoch, index)[0])
        self.noted.append((self.trainer.current_epoch, batch_idx, owner, index))
        return super().training_step(batch, batch_idx)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rebalance", [True, False])
@pytest.mark.parametrize(
    "case",
    [Fit((1, 6)), Fit((0, 7, 3), iterable=True), Fit(((4, 1, 0), (0, 2, 6)), reload=1, epochs=2)],
    ids=name_of,
)
def test_whose_batch_it_is(workers: Workers, case: Fit, rebalance: bool) -> None:
    case = replace(case, rebalance=rebalance)
    rows = [(epoch, step, row) for epoch in range(case.epochs) for step, row in enumerate(case.rows(epoch))]
    for rank, result in enumerate(workers.run(case.world_size, fit, case, Owners)):
        assert result.noted == [(epoch, step, *row[rank]) for epoch, step, row in rows if rank in row]


@pytest.mark.parametrize("case", [Fit((1, 6)), Fit((0, 7, 3), iterable=True, weighting="active")], ids=name_of)
def test_the_callback(workers: Workers, case: Fit) -> None:
    case = replace(case, rebalance=True)
    callback = JoinCallback(weighting=case.weighting, rebalance=True)  # type: ignore[arg-type]
    options = {"strategy": "ddp", "callbacks": [callback]}
    assert_exact(case, workers.run(case.world_size, fit, case, Module, {}, options))


class Estimates(Module):
    def setup(self, stage: str) -> None:
        self.noted = self.trainer.estimated_stepping_batches, self.trainer.num_training_batches


@pytest.mark.parametrize(
    "case", [Fit((1, 6)), Fit((0, 7, 3), accumulate=2), Fit((9, 2), limit=0.5), Fit((9, 2), limit=4)], ids=name_of
)
def test_numbers_of_steps(workers: Workers, case: Fit) -> None:
    case = replace(case, rebalance=True)
    steps, batches = case.total_steps(), case.length(0)
    for result in workers.run(case.world_size, fit, case, Estimates):
        assert result.noted == (result.global_step, result.batches) == (steps, batches)


class Validates(Module):
    """Notes at which steps it validates."""

    def val_dataloader(self) -> Any:
        return DataLoader(range(1 + self.trainer.global_rank))  # type: ignore[arg-type]

    def validation_step(self, *_: Any) -> None:
        pass

    def on_validation_end(self) -> None:
        self.noted.append(self.trainer.global_step)


INTERVALS: list[tuple[Fit, dict[str, Any], list[int]]] = [
    (Fit((1, 7)), {"val_check_interval": 2}, [2, 4, 6, 8]),
    (Fit((1, 7)), {"val_check_interval": 0.5}, [2, 4, 6, 8]),
    (Fit((1, 6), scheduler="epoch"), {}, [4, 8]),
    (Fit((0, 8, 1), iterable=True), {"val_check_interval": 2}, [2, 5]),
    (Fit((0, 8, 1), iterable=True), {}, [3, 6]),
    (Fit((1, 6)), {"val_check_interval": 3, "check_val_every_n_epoch": None}, [3, 6]),
]


@pytest.mark.parametrize("number", others_long(range(len(INTERVALS)), *range(0, len(INTERVALS), 2)))
def test_validation(workers: Workers, number: int) -> None:
    case, options, steps = INTERVALS[number]
    case = replace(case, epochs=2, rebalance=True)
    results = workers.run(case.world_size, fit, case, Validates, {}, {**options, "num_sanity_val_steps": 0})
    assert_exact(case, results)
    assert [result.noted for result in results] == [steps] * case.world_size


# ---------------------------------------------------------------- several loaders


class Endless(IterableDataset[Batch]):
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def combined(case: Fit, shorter: tuple[int, ...], mode: str, rank: int) -> CombinedLoader:
    """A rank's batches beside a loader of its own with fewer, or more."""
    others = Fit(shorter, ragged=case.ragged)
    parts = [case.batches(rank, 0), [others.batch(rank, 7, index) for index in range(shorter[rank])]]
    loaders: list[Any] = [
        DataLoader(Endless(part) if case.iterable else part, batch_size=None)  # type: ignore[arg-type]
        for part in parts
    ]
    return CombinedLoader(loaders, mode)  # type: ignore[arg-type]


def combined_loss(net: Any, batches: Any) -> Tensor:
    return sum((loss_of(net, batch) for batch in batches if batch is not None), torch.zeros((), dtype=torch.float64))


class Combined(Module):
    shorter: tuple[int, ...]
    mode: str

    def train_dataloader(self) -> Any:
        return combined(self.case, self.shorter, self.mode, self.trainer.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.append((self.trainer.current_epoch, batch_idx))
        return combined_loss(self.net, batch)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_combined_loaders(workers: Workers, mode: str, iterable: bool) -> None:
    case, shorter = Fit((2, 7, 1), epochs=2, optimizer="sgd", iterable=iterable, rebalance=True), (1, 5, 2)
    read = [[batch for batch, *_ in combined(case, shorter, mode, rank)] for rank in range(3)]
    net = case.build()
    optimizer = case.optimizers(net, sharded=False)[0]
    lengths = [len(mine) for mine in read]
    said = [length if length < 2 else None for length in lengths] if iterable else None
    rows = planned_rows(lengths, said)
    for row in [*rows, *rows]:
        optimizer.zero_grad()
        torch.stack([combined_loss(net, read[owner][i]) / 3 for owner, i in row.values()]).sum().backward()
        optimizer.step()
    results = workers.run(3, fit, case, Combined, {"shorter": shorter, "mode": mode})
    assert_same_bits(results)
    assert results[0].global_step == 2 * len(rows)
    assert difference(results[0].parameters, list(net.parameters())) < TOLERANCE


# ---------------------------------------------------------------- loaders that lie, and other groups


@pytest.mark.parametrize(
    ("lengths", "claims"), [((3, 5), (9, 5)), ((2, 0, 0), (6, 0, 0)), ((3, 0, 0), (9, 0, 0)), ((3, 5, 0), (9, 9, 4))]
)
def test_a_loader_shorter_than_its_length(workers: Workers, lengths: tuple[int, ...], claims: tuple[int, ...]) -> None:
    case = Fit(lengths, epochs=1, rebalance=True)
    results = workers.run(len(lengths), fit, case, test_loop.Lied, {"claims": claims})
    assert sum(len(result.trained) for result in results) == sum(lengths)
    assert_same_bits(results)
    for rank, (claimed, real) in enumerate(zip(claims, lengths, strict=True)):
        text = f"dataloader of rank {rank} said it had {claimed} batches and yielded {real}"
        assert results[0].warned.count(text) == (claimed != real)


def fit_beside_a_group(rank: int, case: Fit) -> Result:
    dist.new_group([0, 1])
    return fit(rank, case)


def test_a_group_of_the_users_own_that_some_ranks_are_in(workers: Workers) -> None:
    case = Fit((1, 6, 0), rebalance=True)
    assert_exact(case, workers.run(3, fit_beside_a_group, case, deadline=20.0, timeout=10.0))


# ---------------------------------------------------------------- sharded models


def fit_sharded(rank: int, kind: str, case: Fit) -> Result:
    strategy = sharded_fits.build_strategy(kind, case, rebalance=True)
    result: Result = sharded_fits.fit(rank, kind, case, strategy=strategy)
    return result


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", sharded_fits.KINDS)
@pytest.mark.parametrize(
    "case",
    [
        Fit((1, 6), optimizer="adam", scheduler="step"),
        Fit((0, 7, 1), optimizer="sgd", iterable=True),
        Fit((7, 2, 0), optimizer="adamw", weighting="samples", ragged=True, accumulate=2),
    ],
    ids=name_of,
)
def test_sharded_models(workers: Workers, kind: str, case: Fit) -> None:
    case = replace(case, rebalance=True)
    assert_exact(case, workers.run(case.world_size, fit_sharded, kind, case))


# ---------------------------------------------------------------- loaders that refill their memory


class Ring(IterableDataset[Batch]):
    """Makes each batch in the memory of an older one."""

    def __init__(self, batches: list[Batch], buffers: int) -> None:
        self.batches = batches
        self.buffers = [tuple(map(torch.empty_like, batches[0])) for _ in range(buffers if batches else 0)]

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            buffer = self.buffers[index % len(self.buffers)]
            for into, values in zip(buffer, batch, strict=True):
                into.copy_(values)
            yield buffer


class SizedRing(Ring):
    def __len__(self) -> int:
        return len(self.batches)


class FromRing(Module):
    buffers: int

    def train_dataloader(self) -> DataLoader[Any]:
        kind = Ring if self.case.iterable else SizedRing
        batches = self.case.batches(self.trainer.global_rank, self.trainer.current_epoch)
        return DataLoader(kind(batches, self.buffers), batch_size=None, collate_fn=itself)


def itself(batch: Any) -> Any:
    return batch


@pytest.mark.covering(1)
@pytest.mark.parametrize("iterable", [False, True], ids=["sized", "stream"])
@pytest.mark.parametrize(("rebalance", "buffers"), [(True, 1), (True, 2), (True, 3), (True, 5), (False, 1), (False, 2)])
def test_what_a_small_ring_would_overwrite_is_noticed(
    workers: Workers, rebalance: bool, buffers: int, iterable: bool
) -> None:
    case = Fit((9, 0, 7), epochs=1, iterable=iterable, rebalance=rebalance)
    outcomes = workers.outcomes(3, fit, case, FromRing, {"buffers": buffers})
    if buffers < (5 if rebalance else 2):
        assert all("refills the memory" in outcome.error for outcome in outcomes), outcomes
    else:
        assert_exact(case, [outcome.value for outcome in outcomes])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("kind", [DDPJoinStrategy, FSDPJoinStrategy, JoinCallback])
def test_throwing_early_is_refused(kind: Any) -> None:
    with pytest.raises(JoinValueError, match="rebalance=True cannot be combined with throw_on_early_termination=True"):
        kind(rebalance=True, throw_on_early_termination=True)
