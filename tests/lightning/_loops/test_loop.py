"""Who ends what: counters, loaders that lie, skipping, stopping, terminating."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_join
from tests.support.cases import (
    Batch,
    Case,
    EpochSampler,
    Module,
    Result,
    Shard,
    assert_exact,
    assert_same_bits,
    build_trainer,
    difference,
    fit,
    fit_recording,
    longest,
    reference,
    result_of,
)
from tests.support.workers import Workers


def assert_reference(result: Result, case: Case, steps: int | None = None) -> None:
    """The parameters are the reference's at the end, or after a number of optimizer steps."""
    expected = reference(case)
    state = expected.net.state_dict() if steps is None else expected.history[steps]
    names = [name for name, _ in expected.net.named_parameters()]
    assert difference(result.parameters, [state[name] for name in names]) < 1e-10


# ---------------------------------------------------------------- counters


class Totals(ProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.totals: list[float] = []

    def disable(self) -> None:
        pass

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.totals.append(self.total_train_batches)


def fit_with_totals(rank: int, case: Case) -> tuple[list[float], float, int]:
    totals = Totals()
    trainer = build_trainer(case, callbacks=[totals], enable_progress_bar=True)
    trainer.fit(Module(case))
    return totals.totals, trainer.num_training_batches, trainer.global_step


@pytest.mark.parametrize("lengths", [(0, 4, 7), ((3, 2), (5, 6), (4, 0))])
def test_totals_follow_the_longest_rank(workers: Workers, lengths: Any) -> None:
    case = Case(lengths)
    most = [longest(case, epoch) for epoch in range(case.epochs)]
    for totals, batches, steps in workers.run(case.world_size, fit_with_totals, case):
        assert (totals, batches, steps) == (most, most[-1], sum(most))


def test_totals_of_streams_are_unknown(workers: Workers) -> None:
    for totals, batches, _ in workers.run(2, fit_with_totals, Case((2, 3), iterable=True)):
        assert totals == [float("inf")] * 3
        assert batches == float("inf")


# ---------------------------------------------------------------- loaders that lie


class Liar(EpochSampler):
    def __init__(self, case: Case, rank: int, claims: int) -> None:
        super().__init__(case, rank)
        self.claims = claims

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(self.epoch, index) for index in range(super().__len__())])

    def __len__(self) -> int:
        return self.claims


class Lied(Module):
    def __init__(self, case: Case, claims: tuple[int, ...]) -> None:
        super().__init__(case)
        self.claims = claims

    def train_dataloader(self) -> DataLoader[Batch]:
        rank = self.trainer.global_rank
        return DataLoader(Shard(self.case, rank), batch_size=None, sampler=Liar(self.case, rank, self.claims[rank]))


def fit_lied(rank: int, case: Case, claims: tuple[int, ...]) -> tuple[Result, str]:
    module = Lied(case, claims)
    trainer = build_trainer(case)
    return fit_recording(trainer, module)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("claims", [(3, 7), (9, 7), (9, 5)])
def test_a_loader_shorter_than_its_length(workers: Workers, claims: tuple[int, ...], accumulate: int) -> None:
    case = Case((3, 5), accumulate=accumulate)
    results = workers.run(2, fit_lied, case, claims)
    assert_same_bits([result for result, _ in results])
    for result, _ in results:
        assert_reference(result, case)
    warnings = results[0][1]
    for rank, (claimed, real) in enumerate(zip(claims, (3, 5), strict=True)):
        text = f"dataloader of rank {rank} said it had {claimed} batches and yielded {real}"
        assert (text in warnings) == (claimed != real)


# ---------------------------------------------------------------- on_train_batch_start returns -1


class Skipping(Module):
    def __init__(self, case: Case, skips: tuple[int | None, ...]) -> None:
        super().__init__(case)
        self.skips = skips

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.skips[self.trainer.global_rank] else None


def fit_skipping(rank: int, case: Case, skips: tuple[int | None, ...]) -> tuple[Result, str]:
    module = Skipping(case, skips)
    trainer = build_trainer(case)
    return fit_recording(trainer, module)


@pytest.mark.parametrize("weighting", ["world", "active", "samples"])
@pytest.mark.parametrize("skips", [(None, 2), (4, None), (1, 0), (0, 0)])
def test_ranks_that_skip_the_rest_of_the_epoch_join(
    workers: Workers, skips: tuple[int | None, ...], weighting: str
) -> None:
    had = Case((6, 5), weighting=weighting, ragged=True, scheduler="step")
    left = Case(
        tuple(length if skip is None else skip for length, skip in zip((6, 5), skips, strict=True)),
        weighting=weighting,
        ragged=True,
        scheduler="step",
    )
    results = workers.run(2, fit_skipping, had, skips)
    assert_same_bits([result for result, _ in results])
    for result, _ in results:
        assert_reference(result, left)
        assert result.lr == reference(left).lr
        assert result.global_step == reference(left).steps
        assert result.epoch == 3
    if skips == (None, 2):
        assert "returned -1 at batch 2 on ranks [1] only" in results[0][1]


def test_a_skip_that_makes_the_step_the_last_ends_the_window(workers: Workers) -> None:
    had, left = Case((6, 3), accumulate=2), Case((2, 3), accumulate=2)
    for result, _ in workers.run(2, fit_skipping, had, (2, None)):
        assert_reference(result, left)
        assert result.global_step == 6


def test_a_step_in_which_nobody_had_a_batch_moves_nothing(workers: Workers) -> None:
    had, left = (Case(lengths, scheduler="step", optimizer="sgd") for lengths in ((5, 5), (2, 2)))
    for result, _ in workers.run(2, fit_skipping, had, (2, 2)):
        assert_reference(result, left)
        assert result.lr == reference(left).lr
        assert result.global_step == 6


# ---------------------------------------------------------------- should_stop


class Stopping(Module):
    def __init__(self, case: Case, ranks: tuple[int, ...], hook: str, step: int) -> None:
        super().__init__(case)
        self.ranks, self.hook, self.step = ranks, hook, step

    def _maybe_stop(self, hook: str) -> None:
        if (self.trainer.global_rank, self.hook, self.step) in [
            (r, hook, self.trainer.global_step) for r in self.ranks
        ]:
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


def fit_stopping(rank: int, case: Case, ranks: tuple[int, ...], hook: str, step: int) -> tuple[Result, str]:
    module = Stopping(case, ranks, hook, step)
    trainer = build_trainer(case)
    return fit_recording(trainer, module)


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
    case = Case((3, 6))
    results = workers.run(2, fit_stopping, case, ranks, hook, step)
    assert_same_bits([result for result, _ in results])
    assert [result.global_step for result, _ in results] == [stops_at] * 2
    if stops_at:
        assert_reference(results[0][0], case, stops_at)
    warned = "`trainer.should_stop` was set on 1 of 2 ranks only (rank 1)" in results[0][1]
    assert warned == (ranks == (1,))


class Validated(Module):
    """Its validation loss gets worse, so that EarlyStopping stops at the second validation."""

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.train_dataloader()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", float(self.trainer.global_step), sync_dist=True)


def fit_until_worse(rank: int, case: Case, strategy: str) -> int:
    trainer = build_trainer(
        case, callbacks=[EarlyStopping("loss", patience=1)], val_check_interval=2, strategy=strategy
    )
    trainer.fit(Validated(case))
    return trainer.global_step


def test_early_stopping_stops_where_plain_ddp_does(workers: Workers) -> None:
    plain = workers.run(2, fit_until_worse, Case((6, 6)), "ddp")
    assert plain == workers.run(2, fit_until_worse, Case((6, 6)), "ddp_join") == [4, 4]
    assert workers.run(2, fit_until_worse, Case((1, 6)), "ddp_join") == [4, 4]


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


def fit_terminated(rank: int, case: Case, where: str) -> tuple[str, int]:
    module = Terminated(case)
    module.where = where
    trainer = build_trainer(case, val_check_interval=4)
    try:
        trainer.fit(module)
    except SystemExit as error:
        return type(error).__name__, trainer.global_step
    return "nothing", trainer.global_step


class TerminatedUnevenly(Terminated):
    def val_dataloader(self) -> DataLoader[Batch]:
        batches: Any = self.case.batches(0, 0)[: 3 if self.trainer.global_rank == 0 else 1]
        return DataLoader(batches, batch_size=None)


def fit_terminated_unevenly(rank: int, val_check_interval: float, where: str) -> tuple[str, int]:
    module = TerminatedUnevenly(Case((2, 4), epochs=2))
    module.where = where
    trainer = build_trainer(module.case, val_check_interval=val_check_interval)
    try:
        trainer.fit(module)
    except SystemExit as error:
        return type(error).__name__, trainer.global_step
    return "nothing", trainer.global_step


@pytest.mark.parametrize(("interval", "where", "step"), [(0.5, "step 1", 2), (1.0, "step 3", 4)])
def test_sigterm_before_a_validation_ends_all_with_one_exception(
    workers: Workers, interval: float, where: str, step: int
) -> None:
    assert workers.run(2, fit_terminated_unevenly, interval, where) == [("SIGTERMException", step)] * 2


# While all have a batch, who has gone on hears of it in the next step.
@pytest.mark.parametrize(
    ("where", "step"), [("step 1", 3), ("step 2", 3), ("step 4", 5), ("step 6", 7), ("validation", 4)]
)
def test_sigterm_on_one_rank_ends_all_at_the_same_step(workers: Workers, where: str, step: int) -> None:
    assert workers.run(2, fit_terminated, Case((3, 7)), where) == [("SIGTERMException", step)] * 2


@pytest.mark.parametrize(("where", "step"), [("step 1", 3), ("step 2", 4), ("step 3", 4), ("step 6", 7)])
def test_sigterm_on_one_rank_ends_all_where_all_have_a_batch(workers: Workers, where: str, step: int) -> None:
    assert workers.run(3, fit_terminated, Case((7, 7, 7)), where) == [("SIGTERMException", step)] * 3


# ---------------------------------------------------------------- the same as plain ddp, where that works


def fit_plain(rank: int, case: Case, strategy: str) -> Result:
    module = Module(case)
    trainer = build_trainer(case, strategy=strategy)
    trainer.fit(module)
    return result_of(trainer, module)


@pytest.mark.parametrize("iterable", [False, True])
def test_even_inputs_give_the_bits_of_plain_ddp(workers: Workers, iterable: bool) -> None:
    case = Case((4, 4), iterable=iterable, accumulate=3, clip=0.3, scheduler="step", model="norm")
    plain, join = workers.run(2, fit_plain, case, "ddp"), workers.run(2, fit_plain, case, "ddp_join")
    assert_same_bits([plain[0], *join])
    assert [r.trained for r in plain] == [r.trained for r in join]


def fit_disabled(rank: int, case: Case) -> tuple[Result, str]:
    module = Module(case)
    trainer = build_trainer(case, strategy=lightning_join.DDPJoinStrategy(enable_join=False))
    trainer.fit(module)
    return result_of(trainer, module), type(trainer.fit_loop).__name__


def test_enable_join_false_is_plain_ddp(workers: Workers) -> None:
    results = workers.run(2, fit_disabled, Case((4, 4)))
    assert [name for _, name in results] == ["_FitLoop"] * 2
    assert_reference(results[0][0], Case((4, 4)))


class Undecided(Stopping):
    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = False


def fit_undecided(rank: int, case: Case, strategy: str) -> int:
    trainer = build_trainer(case, strategy=strategy)
    trainer.fit(Undecided(case, tuple(range(case.world_size)), "on_train_batch_end", 2))
    return trainer.global_step


def test_should_stop_may_be_taken_back(workers: Workers) -> None:
    assert workers.run(1, fit_undecided, Case((4,)), "ddp_join") == workers.run(1, fit_undecided, Case((4,)), "ddp")
    assert workers.run(2, fit_undecided, Case((4, 1)), "ddp_join") == [10, 10]


def fit_twice(rank: int, case: Case) -> Result:
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
    case = Case((3, 5), optimizer="plain")
    assert_exact(case, workers.run(2, fit_twice, case))


class Watchful(Module):
    """Writes down the batches that its hooks get."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.got: list[bool] = []

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.got.append(batch is not None and "loss" in outputs)


def fit_again_with_an_empty_rank(rank: int) -> list[bool]:
    module = Watchful(Case((4, 4)))
    trainer = build_trainer(module.case, max_steps=2)
    trainer.fit(module)
    module.case = Case((0, 3))
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module)
    return module.got


def test_hooks_get_a_batch_in_a_second_fit_too(workers: Workers) -> None:
    for got in workers.run(2, fit_again_with_an_empty_rank):
        assert len(got) == 5
        assert all(got)


class Short(Validated):
    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader([self.case.batch(0, 0, 0)], batch_size=None)  # type: ignore[arg-type]


def fit_with_a_short_epoch(rank: int, case: Case) -> int:
    trainer = build_trainer(case, val_check_interval=4)
    trainer.fit(Short(case))
    return trainer.global_step


def test_an_epoch_shorter_than_the_validation_interval(workers: Workers) -> None:
    assert workers.run(2, fit_with_a_short_epoch, Case(((2, 5), (3, 2), (5, 5)))) == [13, 13]


def fit_with_timed_validation(rank: int, case: Case) -> list[int]:
    at: list[int] = []

    class Slow(Validated):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            time.sleep(0.02 * (1 + rank))
            return super().training_step(batch, batch_idx)

        def on_validation_start(self) -> None:
            at.append(self.trainer.global_step)

    trainer = build_trainer(case, val_check_interval={"seconds": 0.15}, num_sanity_val_steps=0)
    trainer.fit(Slow(case))
    return at


def test_time_based_validation_runs_at_the_same_steps(workers: Workers) -> None:
    first, second = workers.run(2, fit_with_timed_validation, Case((3, 12)))
    assert first == second
    assert len(first) >= 3


@pytest.mark.parametrize("name", ["ddp_join", "ddp_join_find_unused_parameters_true"])
def test_names_are_registered(workers: Workers, name: str) -> None:
    case = Case((2, 4))
    for result in workers.run(2, fit_plain, case, name):
        assert_reference(result, case)


def test_every_name_is_registered() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    for start in ("", "_spawn", "_fork", "_notebook"):
        for suffix in ("", "_find_unused_parameters_true"):
            strategy = StrategyRegistry.get(f"ddp_join{start}{suffix}")
            assert isinstance(strategy, lightning_join.DDPJoinStrategy)
            assert strategy._ddp_kwargs == ({"find_unused_parameters": True} if suffix else {})
            assert strategy._start_method == {"": "popen", "_spawn": "spawn"}.get(start, "fork")


def fit_over_tcp(rank: int, case: Case) -> Result:
    return fit(rank, case)


def test_the_jobs_own_store_is_used_where_it_is_a_tcp_store(workers: Workers) -> None:
    case = Case((0, 4, 7))
    outcomes = workers.outcomes(3, fit_over_tcp, case, store="tcp")
    assert [o.error for o in outcomes] == [""] * 3
    assert_exact(case, [o.value for o in outcomes])


def test_torch_default_dtype_is_restored() -> None:
    assert torch.get_default_dtype() == torch.float32
