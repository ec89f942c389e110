"""Sharded models: what cannot be followed raises by name on all ranks, and a rank that fails is named on the others."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.loops.test_join_faults import GRACE, TIMEOUT, resume
from tests.support.front_ends.lightning import Fit, Module
from tests.support.run import Batch
from tests.support.sharded_fits import KINDS, ShardedModule, build_sharded, build_strategy, on_cpus
from tests.support.workers import Workers, connect


class Manual(ShardedModule):
    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.automatic_optimization = False


class NoLoss(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 3 else loss


class Constant(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return torch.zeros((), requires_grad=True) if batch_idx == 3 else loss


class NotSharded(Module):
    def configure_model(self) -> None:
        pass


class Whole(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            _ = next(self.net.parameters()).full_tensor()  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)


class Projected(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.mul_(0.5)
        return super().training_step(batch, batch_idx)


class Cleared(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            self.trainer.optimizers[0].state.clear()
        return super().training_step(batch, batch_idx)


class Hooked(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            next(self.net.parameters()).register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
        return super().training_step(batch, batch_idx)


CASE = Fit((2, 5), epochs=1)
REFUSED: dict[str, tuple[Any, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    # the module, the trainer's options, under which strategies, and what is said
    "manual": (Manual, {}, KINDS[:1], ("UnsupportedError: Manual optimizes manually",)),
    "no loss": (NoLoss, {}, KINDS[:1], ("UnsupportedError: training_step returned None", "0.0 * output.sum()")),
    "constant": (Constant, {}, KINDS, ("UnsupportedError: training_step returned a loss that does not depend on",)),
    "not sharded": (NotSharded, {}, KINDS[1:], ("so ModelParallelJoinStrategy would never average its gradients",)),
    # Of FullyShardedDataParallel's parameters torch itself says that they cannot be whole in a forward.
    "projected": (Projected, {}, KINDS, ("JoinError: The sharded parameters were changed",)),
    "hooked": (Hooked, {}, KINDS[1:], ("JoinError: A hook of a sharded gradient",)),
    "cleared": (Cleared, {}, KINDS[1:], ("JoinError: The state of Adam was changed",)),
    "whole": (Whole, {}, KINDS[1:], ("UnsupportedError", "needs the shards of ranks that have joined")),
}


def fit(rank: int, kind: str, make: Any, options: dict[str, Any]) -> None:
    connect()
    with on_cpus():
        build_sharded(kind, CASE, **options).fit(make(CASE))


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in REFUSED for kind in REFUSED[name][2]])
def test_what_raises_on_all_ranks(workers: Workers, name: str, kind: str) -> None:
    make, options, _, texts = REFUSED[name]
    for outcome in workers.outcomes(2, fit, kind, make, options, timeout=15.0):
        for text in texts:
            assert text in outcome.error, outcome.trace or outcome.error or "no error"
        assert outcome.seconds < 12


# ---------------------------------------------------------------- faults


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: Callable[[], None]) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.breaks()
        return grad, None


class Breaking(ShardedModule):
    """Rank `who` does something wrong in its fourth step, in the midst of `where`."""

    where = how = ""
    who = 1
    victim = 1  # of a signal
    pids: Sequence[int] = ()

    def at(self, where: str, batch_idx: int) -> None:
        if (self.trainer.global_rank, where, batch_idx) != (self.who, self.where, 3):
            return
        if self.how == "raise":
            raise ValueError("the shelf fell down")
        os.kill(self.pids[self.victim], signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)
        if self.victim != self.who:
            time.sleep(0.3)  # so that it is gone before the step goes on

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inside = self.net.last.register_forward_pre_hook(lambda *_: self.at("step", batch_idx))
        try:
            loss = super().training_step(batch, batch_idx)
        finally:
            inside.remove()
        return Breaks.apply(loss, lambda: self.at("backward", batch_idx))  # type: ignore[no-any-return, no-untyped-call]

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.at("optimizer", self.trainer.fit_loop.epoch_loop.batch_idx)


def fit_breaking(rank: int, kind: str, options: dict[str, Any], lengths: tuple[int, ...], exits: bool) -> None:
    connect()
    with on_cpus():
        module = Breaking(Fit(lengths, epochs=1))
        vars(module).update(options)
        try:
            strategy = build_strategy(kind, module.case, timeout=timedelta(seconds=TIMEOUT))
            build_sharded(kind, module.case, strategy=strategy).fit(module)
        except ValueError:
            if exits:
                os._exit(1)
            raise


FAULTS = [
    ("fsdp", "backward", 1, True),
    ("fsdp", "optimizer", 0, False),
    ("model_parallel", "step", 1, True),
    pytest.param("model_parallel", "optimizer", 1, True, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("kind", "where", "who", "exits"), FAULTS)
def test_a_rank_that_raises_is_named_on_the_others(
    workers: Workers, kind: str, where: str, who: int, exits: bool
) -> None:
    """One that exits hangs up; one that lingers keeps those that wait in a collective until its timeout."""
    limit = 30.0 if exits else 5.0
    options = {"how": "raise", "where": where, "who": who}
    outcomes = workers.outcomes(3, fit_breaking, kind, options, (2, 5, 6), exits, timeout=limit)
    for rank, outcome in enumerate(outcomes):
        if rank == who:
            assert outcome.error == "the process ended" if exits else "ValueError: the shelf fell down", outcome.trace
        else:
            assert f"PeerFailedError: Rank {who} failed, so rank {rank} cannot go on" in outcome.error, outcome.trace
            assert "the shelf fell down" in outcome.error
        assert outcome.seconds < 15


@pytest.mark.covering(1)
@pytest.mark.parametrize("victim", [2, 1], ids=["active", "joined"])
@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.long)])  # waits for timeouts
@pytest.mark.parametrize("where", [pytest.param("step", marks=pytest.mark.long), "backward", "optimizer"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_gone_is_named(workers: Workers, kind: str, where: str, how: str, victim: int) -> None:
    # Rank 2 ends itself, or rank 1, which has joined and follows what it does.
    pids = [workers.pid(rank) for rank in range(3)]
    options = {"how": how, "where": where, "who": 2, "victim": victim, "pids": pids}
    if how == "stop":
        resuming = threading.Thread(target=resume, args=(pids[victim], TIMEOUT + GRACE))
        resuming.start()
    # Whoever is stopped may hold the lock of a file store.
    outcomes = workers.outcomes(3, fit_breaking, kind, options, (6, 2, 5), False, timeout=TIMEOUT, store="tcp")
    if how == "stop":
        resuming.join()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error.startswith("PeerFailedError"), outcome.trace or outcome.error
            assert f"rank {victim}" in outcome.error.lower(), outcome.error
            assert outcome.seconds < TIMEOUT + GRACE, outcome


def test_arguments() -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match="weighting"):
            build_strategy(kind, Fit((1,), weighting="mean"))
