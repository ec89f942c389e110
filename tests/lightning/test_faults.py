"""A rank that raises in a fit, is killed or is stopped: the others name it soon, and the next fit is right."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_join import DDPJoinStrategy
from tests.support.front_ends.lightning import Fit, Module, Result, assert_exact, build_trainer, result_of
from tests.support.inside import counted_gifts, exchange_threads
from tests.support.run import Batch
from tests.support.sharded_fits import ShardedModule, build_sharded, build_strategy, on_cpus
from tests.support.stopped import GRACE, TIMEOUT, resume
from tests.support.workers import Workers, connect

CASES = {  # of which rank 1 or 2 is the culprit: they have most batches
    "ddp": Fit((2, 6, 5), epochs=1),
    "even": Fit((5, 5, 5), epochs=1, iterable=True, model="norm"),  # where others have gone ahead
    "rebalanced": Fit((2, 9, 0), epochs=1, rebalance=True),  # rank 1 gives in each step to rank 2
    "fsdp": Fit((2, 5, 6), epochs=1),
    "model_parallel": Fit((6, 2, 5), epochs=1),
}


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: Callable[[], None]) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.breaks()
        return grad, None


class Stream(IterableDataset[Batch]):
    """Breaks when it is asked for the last batch."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __iter__(self) -> Iterator[Batch]:
        *batches, last = self.module.case.batches(self.module.trainer.global_rank, 0)
        yield from batches
        self.module.breaks("loader")
        yield last


class Breaking:
    """A rank does something wrong in its third step, or when it reads its last batch, or behind its steps."""

    case: Fit
    trainer: Any
    where = how = ""
    who = -1
    pid = 0  # of the one that is killed or stopped

    def breaks(self, where: str, step: int = 2) -> None:
        if (self.trainer.global_rank, where, step) != (self.who, self.where, 2):
            return
        if self.how == "raise":
            raise ValueError("the shelf fell down")
        os.kill(self.pid, signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)
        if self.pid != os.getpid():
            time.sleep(0.3)  # so that it is gone before the step goes on

    def train_dataloader(self) -> Any:
        if self.where == "loader" and self.trainer.global_rank == self.who:
            return DataLoader(Stream(self), batch_size=None)
        return super().train_dataloader()  # type: ignore[misc]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.breaks("step", batch_idx)
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        return Breaks.apply(loss, lambda: self.breaks("backward", batch_idx))  # type: ignore[no-any-return, no-untyped-call]

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.breaks("optimizer", self.trainer.fit_loop.epoch_loop.batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.breaks("end", batch_idx)

    def on_train_epoch_end(self) -> None:
        self.breaks("epoch")


class Replicated(Breaking, Module):
    pass


class Sharded(Breaking, ShardedModule):
    pass


def wait_until_nothing_is_left() -> None:
    deadline = time.monotonic() + TIMEOUT + GRACE
    while exchange_threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert exchange_threads() == []


def fit(rank: int, kind: str, options: dict[str, Any]) -> None:
    connect()
    case, timeout = CASES[kind], timedelta(seconds=TIMEOUT)
    module: Any = Sharded(case) if kind in ("fsdp", "model_parallel") else Replicated(case)
    vars(module).update(options)
    try:
        if isinstance(module, Sharded):
            with on_cpus():
                strategy: Any = build_strategy(kind, case, timeout=timeout)
                build_sharded(kind, case, strategy=strategy).fit(module)
        else:
            strategy = DDPJoinStrategy(rebalance=case.rebalance, timeout=timeout)
            with counted_gifts(0.5 if rank == 2 else 0.0):  # what it is given is on its way for so many seconds
                build_trainer(case, strategy=strategy).fit(module)
    except ValueError:
        if isinstance(module, Sharded):
            os._exit(1)  # one that lingers keeps those that wait in a collective until its timeout
        raise
    finally:
        if options["how"] != "kill":  # gloo leaves a thread that was in the middle of a message of the victim's
            wait_until_nothing_is_left()


@pytest.mark.parametrize(
    ("kind", "where", "who"),
    [
        ("ddp", "loader", 1),
        ("ddp", "backward", 2),
        ("even", "optimizer", 1),
        ("even", "end", 1),
        ("rebalanced", "loader", 1),
        ("rebalanced", "step", 2),
        ("rebalanced", "epoch", 1),
        ("fsdp", "backward", 1),
        ("model_parallel", "step", 2),
    ],
)
def test_a_rank_that_raises_is_named(workers: Workers, kind: str, where: str, who: int) -> None:
    options = {"how": "raise", "where": where, "who": who}
    timeout = 30.0 if kind in ("fsdp", "model_parallel") else TIMEOUT
    for rank, outcome in enumerate(workers.outcomes(3, fit, kind, options, timeout=timeout)):
        if rank == who:
            assert outcome.error.startswith(("ValueError: the shelf fell down", "the process ended")), outcome.trace
            continue
        assert f"PeerFailedError: Rank {who} failed, so rank {rank} cannot continue" in outcome.error, outcome.trace
        assert "the shelf fell down" in outcome.error
        assert outcome.seconds < 15


# In the sharded ones the victim may be another than the one that does it: one that has joined and follows.
@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.long)])  # waits for timeouts
@pytest.mark.parametrize(
    ("kind", "where", "who", "victim"),
    [
        ("ddp", "step", 2, 2),
        ("rebalanced", "end", 1, 1),
        ("rebalanced", "step", 2, 2),
        ("fsdp", "optimizer", 2, 2),
        ("model_parallel", "backward", 2, 1),
    ],
)
def test_a_rank_that_is_gone_is_named(workers: Workers, kind: str, where: str, who: int, victim: int, how: str) -> None:
    options = {"how": how, "where": where, "who": who, "pid": workers.pid(victim)}
    resuming = threading.Thread(target=resume, args=(workers.pid(victim), TIMEOUT + GRACE))
    if how == "stop":
        resuming.start()
    # Whoever is stopped may hold the lock of a file store.
    outcomes = workers.outcomes(3, fit, kind, options, timeout=TIMEOUT, store="tcp")
    if how == "stop":
        resuming.join()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error.startswith("PeerFailedError"), outcome.trace or outcome.error
            assert f"rank {victim}" in outcome.error.lower(), outcome.error
            assert outcome.seconds < 2 * TIMEOUT + GRACE, outcome


def fit_after_failures(rank: int, kind: str, wheres: list[str]) -> list[Any]:
    case, found = CASES[kind], list[Any]()
    for where in wheres:
        module = Replicated(case)
        module.how, module.where, module.who = "raise", where, 1
        strategy = DDPJoinStrategy(rebalance=case.rebalance, timeout=timedelta(seconds=10))
        try:
            build_trainer(case, strategy=strategy).fit(module)
        except Exception as error:
            found.append(type(error).__name__)
        time.sleep(0.5)
    trainer, plain = build_trainer(case), Module(case)
    trainer.fit(plain)
    return [*found, result_of(trainer, plain)]


@pytest.mark.parametrize(
    ("kind", "wheres"), [("ddp", ["end"]), ("rebalanced", ["epoch"]), ("rebalanced", ["end", "epoch", "end"])]
)
def test_a_fit_after_one_that_has_failed(workers: Workers, kind: str, wheres: list[str]) -> None:
    """As in a notebook, or where a search goes on with the next trial."""
    results: list[Result] = []
    for rank, found in enumerate(workers.run(3, fit_after_failures, kind, wheres, timeout=10.0)):
        *errors, result = found
        assert errors == ["ValueError" if rank == 1 else "PeerFailedError"] * len(wheres)
        results.append(result)
    assert_exact(CASES[kind], results)
