"""A sharded model in a plain loop when something goes wrong: whoever is left ends in time and knows why."""

import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.core.loops.test_join_faults import (
    GRACE,
    TIMEOUT,
    BrokenError,
    Fault,
    Training,
    check_survivors,
    end,
    resume,
    train,
)
from tests.emulator import place
from tests.support.workers import Workers, connect
from torch_join import Join
from torch_join._compat import c10d as _dispatch

LENGTHS = (2, 5, 5)


class ShardedTraining(Training):
    """Blocks, an optimizer and a loop in which one rank does something wrong at one step; `where` says what."""

    def __init__(self, rank: int, fault: Fault) -> None:
        connect()
        self.rank, self.fault = rank, fault
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        self.model: Any = nn.Sequential(*blocks, nn.Linear(4, 1))
        if fault.loop == "plain":
            self.inner, self.model = self.model, self.wrapped(self.model)
        else:
            self.inner = self.model
            for block in blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.raised: BaseException | None = None
        self.join: Any = None
        self.pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(self.pids, os.getpid())

    def wrapped(self, model: nn.Module) -> nn.Module:
        policy = ModuleWrapPolicy({nn.Sequential})
        return FullyShardedDataParallel(model, device_id=place(), auto_wrap_policy=policy)

    def run(self) -> None:
        with Join([self.model, self.optimizer], timeout=timedelta(seconds=TIMEOUT)) as self.join:
            for step, x in enumerate(self.join.batches(list(torch.ones(self.fault.lengths[self.rank], 2, 4)))):
                self.optimizer.zero_grad()
                inside = self.inner[2].register_forward_pre_hook(lambda *_, step=step: self.at(step, "forward"))
                try:
                    loss = self.model(x).pow(2).mean()
                finally:
                    inside.remove()
                if self.fault.where.endswith("backward"):
                    loss.register_hook(lambda _, step=step: self.at(step, "backward"))
                loss.backward()
                if self.fault.where.endswith("optimizer"):
                    hook = self.optimizer.register_step_pre_hook(lambda *_, step=step: self.at(step, "optimizer"))
                self.optimizer.step()
                if self.fault.where.endswith("optimizer"):
                    hook.remove()

    def at(self, step: int, where: str) -> None:
        action, _, place = self.fault.where.partition(" in ")
        if (self.rank, step, where) != (self.fault.rank, self.fault.step, place):
            return
        if action == "raise":
            self.raised = BrokenError(f"in {where}")
            raise self.raised
        self.send(signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    def installed(self) -> dict[str, Any]:
        return {
            "forward": [len(module._forward_pre_hooks) for module in self.model.modules()],
            "parameters": [len(p._backward_hooks or ()) for p in self.model.parameters()],
            "optimizer": [len(self.optimizer._optimizer_step_post_hooks)],
            "tap": _dispatch.has_kernel("allreduce_"),
        }


def train_sharded(rank: int, fault: Fault) -> None:
    train(rank, fault, ShardedTraining)


LONG = pytest.mark.long  # what is as slow as it is alike
PLACES = ("forward", "backward", "optimizer")


@pytest.mark.covering(1)
@pytest.mark.parametrize("loop", ["sized", "plain"], ids=["FSDP2", "FSDP1"])
@pytest.mark.parametrize("step", [1, 3], ids=["even", "tail"])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_raises_is_named(workers: Workers, place: str, step: int, loop: str) -> None:
    fault = Fault(f"raise in {place}", 1, step, LENGTHS, loop)
    reports = end(workers, fault, do=train_sharded)
    culprit = reports[1]
    assert culprit is not None
    assert culprit.unchanged, culprit
    check_survivors(reports, fault, f"Rank 1: BrokenError: in {place}", within=TIMEOUT + GRACE)


@pytest.mark.covering(1)
@pytest.mark.parametrize("loop", [pytest.param("sized", id="FSDP2"), pytest.param("plain", id="FSDP1", marks=LONG)])
@pytest.mark.parametrize("victim", [2, 1, 0], ids=["active", "joined", "host"])
@pytest.mark.parametrize("action", ["kill", pytest.param("stop", marks=pytest.mark.long)])  # waits for timeouts
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_gone_is_named(workers: Workers, place: str, action: str, victim: int, loop: str) -> None:
    # Rank 2 ends itself, or rank 1, which has joined and follows it, or rank 0, which leads, and has the store.
    fault = Fault(f"{action} in {place}", 2, 3, (5, 2, 5), loop, victim=victim)
    if action == "stop":
        resuming = threading.Thread(target=resume, args=(workers.pid(victim), TIMEOUT + GRACE))
        resuming.start()
    reports = end(workers, fault, "tcp", train_sharded)  # whoever is stopped may hold the lock of a file store
    if action == "stop":
        resuming.join()
    for rank, report in enumerate(reports):
        if rank != victim:
            assert report is not None
            assert report.errors, rank
            assert f"rank {victim}" in report.errors[0].lower(), (rank, report)
            assert report.seconds < TIMEOUT + GRACE, (rank, report)
