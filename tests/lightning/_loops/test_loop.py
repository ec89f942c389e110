"""Who ends what: counters, loaders that lie, skipping, stopping, terminating."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.batches import Batches
from tests.support.front_ends.lightning import (
    EpochSampler,
    Fit,
    Module,
    Result,
    assert_exact,
    assert_same_bits,
    build_trainer,
    fit,
    result_of,
)
from tests.support.run import Batch, difference, reference
from tests.support.workers import Workers


def assert_reference(result: Result, case: Fit, steps: int | None = None) -> None:
    """The parameters are the reference's at the end, or after a number of optimizer steps."""
    expected = reference(case)
    state = expected.net.state_dict() if steps is None else expected.history[steps]
    names = [name for name, _ in expected.net.named_parameters()]
    assert difference(result.parameters, [state[name] for name in names]) < 1e-10


# ---------------------------------------------------------------- counters


class Totals(ProgressBar):
    def disable(self) -> None:
        pass

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        module.noted.append(self.total_train_batches)


SHOWN = {"callbacks": [Totals()], "enable_progress_bar": True}


@pytest.mark.parametrize(
    "case",
    [
        Fit((0, 4, 7)),
        Fit(((3, 2), (5, 6), (4, 0))),
        Fit((0, 7, 3), accumulate=2, rebalance=True),
        Fit((9, 2), limit=0.5, rebalance=True),
    ],
    ids=str,
)
def test_totals_follow_the_longest_rank_or_the_plan(workers: Workers, case: Fit) -> None:
    most = [case.length(epoch) for epoch in range(case.epochs)]
    for result in workers.run(case.world_size, fit, case, Module, {}, SHOWN):
        assert (result.noted, result.batches, result.global_step) == (most, most[-1], case.total_steps())


def test_totals_of_streams_are_unknown(workers: Workers) -> None:
    for result in workers.run(2, fit, Fit((2, 3), iterable=True), Module, {}, SHOWN):
        assert [*result.noted, result.batches] == [float("inf")] * 4


# ---------------------------------------------------------------- loaders that lie


class Liar(EpochSampler):
    def __init__(self, case: Fit, rank: int, claims: int) -> None:
        super().__init__(case, rank)
        self.claims = claims

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(self.epoch, index) for index in range(super().__len__())])

    def __len__(self) -> int:
        return self.claims


class Lied(Module):
    claims: tuple[int, ...]

    def train_dataloader(self) -> DataLoader[Batch]:
        rank = self.trainer.global_rank
        return DataLoader(Batches(self.case, rank), batch_size=None, sampler=Liar(self.case, rank, self.claims[rank]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rebalance", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("claims", [(3, 7), (9, 7), (9, 5)])
def test_a_loader_shorter_than_its_length(
    workers: Workers, claims: tuple[int, ...], accumulate: int, rebalance: bool
) -> None:
    case = Fit((3, 5), accumulate=accumulate, rebalance=rebalance)
    results = workers.run(2, fit, case, Lied, {"claims": claims})
    assert_same_bits(results)
    assert sum(len(result.trained) for result in results) == 3 * (3 + 5)
    if not rebalance:
        assert_reference(results[0], case)
    for rank, (claimed, real) in enumerate(zip(claims, (3, 5), strict=True)):
        text = f"dataloader of rank {rank} reported {claimed} batches but yielded only {real}"
        assert (text in results[0].warned) == (claimed != real)


# ---------------------------------------------------------------- on_train_batch_start returns -1


class Skipping(Module):
    skips: tuple[int | None, ...]

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.skips[self.trainer.global_rank] else None


@pytest.mark.covering(1)
@pytest.mark.parametrize("weighting", ["world", "active", "samples"])
@pytest.mark.parametrize("skips", [(None, 2), (4, None), (1, 0), (0, 0)])
def test_ranks_that_skip_the_rest_of_the_epoch_join(
    workers: Workers, skips: tuple[int | None, ...], weighting: str
) -> None:
    had = Fit((6, 5), weighting=weighting, ragged=True, scheduler="step")
    lengths = [length if skip is None else skip for length, skip in zip(had.lengths, skips, strict=True)]
    left = replace(had, lengths=lengths)
    results = workers.run(2, fit, had, Skipping, {"skips": skips})
    assert_same_bits(results)
    assert_reference(results[0], left)
    assert (results[0].lr, results[0].epoch) == (reference(left).lr, 3)
    assert results[0].global_step == reference(left).steps
    if skips == (None, 2):
        assert "returned -1 at batch 2 only on ranks [1]" in results[0].warned


def test_a_skip_that_makes_the_step_the_last_ends_the_window(workers: Workers) -> None:
    had, left = Fit((6, 3), accumulate=2), Fit((2, 3), accumulate=2)
    for result in workers.run(2, fit, had, Skipping, {"skips": (2, None)}):
        assert_reference(result, left)
        assert result.global_step == 6


def test_a_step_in_which_nobody_had_a_batch_moves_nothing(workers: Workers) -> None:
    had, left = (Fit(lengths, scheduler="step", optimizer="sgd") for lengths in ((5, 5), (2, 2)))
    for result in workers.run(2, fit, had, Skipping, {"skips": (2, 2)}):
        assert_reference(result, left)
        assert result.lr == reference(left).lr
        assert result.global_step == 6


# ---------------------------------------------------------------- should_stop


class Stopping(Module):
    ranks: tuple[int, ...]
    hook: str
    step: int

    def _maybe_stop(self, hook: str) -> None:
        if (hook, self.trainer.global_step) == (self.hook, self.step) and self.trainer.global_rank in self.ranks:
            self.trainer.should_stop = True

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._maybe_stop("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self._maybe_stop("on_train_batch_end")

    def on_train_start(self) -> None:
        self._maybe_stop("on_train_start")

    def on_train_epoch_end(self) -> None:
        self._maybe_stop("on_train_epoch_end")

    def on_train_epoch_start(self) -> None:
        self._maybe_stop("on_train_epoch_start")


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
@pytest.mark.parametrize(
    ("hook", "step", "stops_at"),
    [
        ("training_step", 2, 3),
        ("on_train_batch_end", 4, 4),
        ("on_train_batch_end", 6, 6),
        ("on_train_epoch_end", 6, 6),
        ("on_train_start", 0, 0),
        ("on_train_epoch_start", 6, 6),
    ],
)
def test_should_stop_set_on_some_ranks_stops_all(
    workers: Workers, ranks: tuple[int, ...], hook: str, step: int, stops_at: int
) -> None:
    case = Fit((3, 6))
    results = workers.run(2, fit, case, Stopping, {"ranks": ranks, "hook": hook, "step": step})
    assert_same_bits(results)
    assert [result.global_step for result in results] == [stops_at] * 2
    if stops_at:
        assert_reference(results[0], case, stops_at)
    warned = "`trainer.should_stop` was set on only 1 of 2 ranks (rank 1)" in results[0].warned
    assert warned == (ranks == (1,))


class Validated(Module):
    """Its validation loss gets worse, so that EarlyStopping stops at the second validation."""

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.train_dataloader()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", float(self.trainer.global_step), sync_dist=True)


@pytest.mark.parametrize(("lengths", "strategy"), [((6, 6), "ddp"), ((6, 6), "ddp_join"), ((1, 6), "ddp_join")])
def test_early_stopping_stops_where_plain_ddp_does(workers: Workers, lengths: Any, strategy: str) -> None:
    options = {"callbacks": [EarlyStopping("loss", patience=1)], "val_check_interval": 2, "strategy": strategy}
    assert [result.global_step for result in workers.run(2, fit, Fit(lengths), Validated, {}, options)] == [4, 4]


# ---------------------------------------------------------------- SIGTERM


class Terminated(Validated):
    where = ""

    def signal(self, where: str) -> None:
        if where == self.where and self.trainer.global_rank == 1 and not self.trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.signal(f"step {batch_idx}")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.signal("validation")
        super().validation_step(batch, batch_idx)


class TerminatedUnevenly(Terminated):
    def val_dataloader(self) -> DataLoader[Batch]:
        batches: Any = self.case.batches(0, 0)[: 3 if self.trainer.global_rank == 0 else 1]
        return DataLoader(batches, batch_size=None)


def fit_terminated(rank: int, case: Fit, make: type[Terminated], where: str, interval: float = 4) -> tuple[str, int]:
    module = make(case)
    module.where = where
    trainer = build_trainer(case, val_check_interval=interval)
    try:
        trainer.fit(module)
    except SystemExit as error:
        return type(error).__name__, trainer.global_step
    return "nothing", trainer.global_step


@pytest.mark.parametrize(("interval", "where", "step"), [(0.5, "step 1", 2), (1.0, "step 3", 4)])
def test_sigterm_before_a_validation_ends_all_with_one_exception(
    workers: Workers, interval: float, where: str, step: int
) -> None:
    found = workers.run(2, fit_terminated, Fit((2, 4), epochs=2), TerminatedUnevenly, where, interval)
    assert found == [("SIGTERMException", step)] * 2


# While all have a batch, who has gone on hears of it in the next step.
@pytest.mark.parametrize(
    ("where", "step"), [("step 1", 3), ("step 2", 3), ("step 4", 5), ("step 6", 7), ("validation", 4)]
)
def test_sigterm_on_one_rank_ends_all_at_the_same_step(workers: Workers, where: str, step: int) -> None:
    assert workers.run(2, fit_terminated, Fit((3, 7)), Terminated, where) == [("SIGTERMException", step)] * 2


@pytest.mark.parametrize(("where", "step"), [("step 1", 3), ("step 2", 4), ("step 3", 4), ("step 6", 7)])
def test_sigterm_on_one_rank_ends_all_where_all_have_a_batch(workers: Workers, where: str, step: int) -> None:
    assert workers.run(3, fit_terminated, Fit((7, 7, 7)), Terminated, where) == [("SIGTERMException", step)] * 3


# ---------------------------------------------------------------- the same as plain ddp, where that works


@pytest.mark.parametrize("iterable", [False, True])
def test_even_inputs_give_the_bits_of_plain_ddp(workers: Workers, iterable: bool) -> None:
    case = Fit((4, 4), iterable=iterable, accumulate=3, clip=0.3, scheduler="step", model="norm")
    plain, join = (workers.run(2, fit, case, Module, {}, {"strategy": name}) for name in ("ddp", "ddp_join"))
    assert_same_bits([plain[0], *join])
    assert [r.trained for r in plain] == [r.trained for r in join]


class NotesItsLoop(Module):
    def on_train_start(self) -> None:
        self.noted = type(self.trainer.fit_loop).__name__


def test_enable_join_false_is_plain_ddp(workers: Workers) -> None:
    case = Fit((4, 4), ddp={"enable_join": False})
    results = workers.run(2, fit, case, NotesItsLoop)
    assert [result.noted for result in results] == ["_FitLoop"] * 2
    assert_reference(results[0], case)


class Undecided(Stopping):
    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = False


def test_should_stop_may_be_taken_back(workers: Workers) -> None:
    def steps(lengths: tuple[int, ...], strategy: str) -> list[int]:
        given = {"ranks": (0, 1), "hook": "on_train_batch_end", "step": 2}
        results = workers.run(len(lengths), fit, Fit(lengths), Undecided, given, {"strategy": strategy})
        return [result.global_step for result in results]

    assert steps((4,), "ddp_join") == steps((4,), "ddp")
    assert steps((4, 1), "ddp_join") == [10, 10]


def fit_twice(rank: int, case: Fit) -> Result:
    module = Validated(case)
    trainer = build_trainer(case, max_epochs=1)
    loop = trainer.fit_loop
    trainer.fit(module)
    trainer.validate(module)
    assert trainer.fit_loop is loop
    trainer.fit_loop.max_epochs = case.epochs
    trainer.fit(module)
    return result_of(trainer, module)


def test_fit_validate_and_fit_again(workers: Workers) -> None:
    case = Fit((3, 5), optimizer="plain")
    assert_exact(case, workers.run(2, fit_twice, case))


class Short(Validated):
    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader([self.case.batch(0, 0, 0)], batch_size=None)  # type: ignore[arg-type]


def test_an_epoch_shorter_than_the_validation_interval(workers: Workers) -> None:
    results = workers.run(2, fit, Fit(((2, 5), (3, 2), (5, 5))), Short, {}, {"val_check_interval": 4})
    assert [result.global_step for result in results] == [13, 13]


def test_the_jobs_own_store_is_used_where_it_is_a_tcp_store(workers: Workers) -> None:
    case = Fit((0, 4, 7))
    outcomes = workers.outcomes(3, fit, case, store="tcp")
    assert [o.error for o in outcomes] == [""] * 3
    assert_exact(case, [o.value for o in outcomes])
