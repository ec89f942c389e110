"""A rank that raises, is killed or is stopped while gifts travel: the others name it, and nothing is left."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_join import DDPJoinStrategy
from tests.core.loops.test_join_faults import GRACE, TIMEOUT, resume
from tests.covering import others_long
from tests.support.front_ends.lightning import Fit, Module, Result, assert_exact, build_trainer, result_of
from tests.support.inside import counted_gifts, exchange_threads
from tests.support.run import Batch
from tests.support.workers import Outcome, Workers, connect

# Rank 1 gives in each step: to rank 2 always, and to rank 0 in the last ones.
CASE = Fit((2, 9, 0), epochs=1, rebalance=True)
WITHIN = 2 * TIMEOUT + GRACE  # seconds: a timeout, and a health check, after the beginning of a fit
GIVER, RECEIVER = 1, 2
# For so many seconds the gifts are still on their way.
LATE = [pytest.param(0.0, id="", marks=pytest.mark.long), pytest.param(0.5, id="late")]


class Fails(IterableDataset[Batch]):
    """Fails when it is asked for a batch."""

    def __init__(self, module: "Breaking", at: int) -> None:
        self.module, self.at = module, at

    def __iter__(self) -> Iterator[Batch]:
        case, rank = self.module.case, self.module.trainer.global_rank
        for index, batch in enumerate(case.batches(rank, 0)):
            if index == self.at:
                self.module.breaks("loader", 2)
            yield batch


class Sized(Fails):
    def __len__(self) -> int:
        return len(self.module.case.batches(self.module.trainer.global_rank, 0))


class Breaking(Module):
    """Rank `who` does something wrong in the third step, or when it reads its last batch."""

    where = how = ""
    who = -1
    pids: Sequence[int] = ()

    def breaks(self, where: str, step: int) -> None:
        if (self.trainer.global_rank, where, step) != (self.who, self.where, 2):
            return
        if self.how == "raise":
            raise ValueError("the shelf fell down")
        os.kill(self.pids[self.who], signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)

    def train_dataloader(self) -> DataLoader[Any]:
        kind = Fails if self.case.iterable else Sized
        return DataLoader(kind(self, self.case.lengths[self.trainer.global_rank] - 1), batch_size=None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.breaks("start", batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.breaks("step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.breaks("end", batch_idx)

    def on_train_epoch_end(self) -> None:
        self.breaks("epoch", 2)

    def on_train_end(self) -> None:
        self.breaks("fit", 2)


def wait_until_nothing_is_left() -> None:
    deadline = time.monotonic() + TIMEOUT + GRACE
    while exchange_threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert exchange_threads() == []


def fit_breaking(rank: int, case: Fit, options: dict[str, Any], late: float) -> None:
    connect()
    module = Breaking(case)
    vars(module).update(options)
    strategy = DDPJoinStrategy(rebalance=True, timeout=timedelta(seconds=TIMEOUT))
    try:
        with counted_gifts(late if rank == RECEIVER else 0.0):
            build_trainer(case, strategy=strategy).fit(module)
    finally:
        if options["how"] != "kill":  # gloo leaves a thread that was in the middle of a message of the victim's
            wait_until_nothing_is_left()


def assert_named(outcomes: list[Outcome], victim: int) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error.startswith("PeerFailedError"), outcome.trace or outcome.error
            assert f"rank {victim}" in outcome.error.lower(), outcome.error
            assert outcome.seconds < WITHIN, outcome


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("who", [GIVER, pytest.param(RECEIVER, marks=pytest.mark.long)], ids=["giver", "receiver"])
@pytest.mark.parametrize("where", others_long(["start", "step", "end", "epoch", "fit"], "step", "epoch"))
def test_a_rank_that_raises(workers: Workers, where: str, who: int, late: float) -> None:
    options = {"how": "raise", "where": where, "who": who}
    outcomes = workers.outcomes(3, fit_breaking, CASE, options, late, timeout=TIMEOUT)
    assert outcomes[who].error == "ValueError: the shelf fell down", outcomes[who].trace
    assert_named(outcomes, who)
    assert all("the shelf fell down" in outcome.error for outcome in outcomes)


@pytest.mark.covering(1)
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("who", [0, GIVER], ids=["receiver", "giver"])
def test_a_loader_that_raises(workers: Workers, who: int, iterable: bool) -> None:
    case = replace(CASE, lengths=(4, 9, 0), iterable=iterable)
    options = {"how": "raise", "where": "loader", "who": who}
    outcomes = workers.outcomes(3, fit_breaking, case, options, 0.0, timeout=TIMEOUT)
    assert outcomes[who].error.startswith("ValueError: the shelf fell down"), outcomes[who].trace
    assert_named(outcomes, who)
    assert all("the shelf fell down" in outcome.error for outcome in outcomes)


@pytest.mark.covering(1)
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("who", [GIVER, RECEIVER], ids=["giver", "receiver"])
@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.long)])  # waits for timeouts
@pytest.mark.parametrize("where", others_long(["start", "step", "end", "epoch"], "step", "end"))
def test_a_rank_that_is_gone(workers: Workers, where: str, how: str, who: int, late: float) -> None:
    pids = [workers.pid(rank) for rank in range(3)]
    options = {"how": how, "where": where, "who": who, "pids": pids}
    resuming = threading.Thread(target=resume, args=(pids[who], TIMEOUT + GRACE))
    if how == "stop":
        resuming.start()
    # Whoever is stopped may hold the lock of a file store.
    outcomes = workers.outcomes(3, fit_breaking, CASE, options, late, timeout=TIMEOUT, store="tcp")
    if how == "stop":
        resuming.join()
    assert_named(outcomes, who)


# ---------------------------------------------------------------- a fit after one that has failed


def fit_after_a_failure(rank: int, case: Fit, wheres: list[str], who: int) -> list[Any]:
    found: list[Any] = []
    for where in wheres:
        module = Breaking(case)
        module.how, module.where, module.who = "raise", where, who
        strategy = DDPJoinStrategy(rebalance=True, timeout=timedelta(seconds=10))
        try:
            build_trainer(case, strategy=strategy).fit(module)
        except Exception as error:
            found.append(type(error).__name__)
        time.sleep(0.5)
    trainer, plain = build_trainer(case, strategy=DDPJoinStrategy(rebalance=True)), Module(case)
    trainer.fit(plain)
    return [*found, result_of(trainer, plain)]


@pytest.mark.parametrize("wheres", [["end"], ["epoch"], ["fit"], ["start", "end", "end"]], ids="-".join)
def test_a_fit_after_one_that_has_failed(workers: Workers, wheres: list[str]) -> None:
    """As in a notebook, or where a search goes on with the next trial."""
    results: list[Result] = []
    for rank, found in enumerate(workers.run(3, fit_after_a_failure, CASE, wheres, GIVER, timeout=10.0)):
        *errors, result = found
        assert errors == ["ValueError" if rank == GIVER else "PeerFailedError"] * len(wheres)
        results.append(result)
    assert_exact(CASE, results)
