"""A training in which one rank does something wrong at one step, in each kind of loop; and how each rank ends."""

import gc
import json
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.emulator import place
from tests.support.front_ends.plain import Loop, Stream
from tests.support.inside import counted_gifts, exchange_threads
from tests.support.joinables import Counter
from tests.support.run import Batch
from tests.support.stopped import GRACE, TIMEOUT
from tests.support.workers import Outcome, Workers, connect
from torch_join import Join
from torch_join._compat import operators as _compat_c10d

LOOPS = ("sized", "plain", "iterable", "heartbeat", "rebalance", "rebalance, iterable", "FSDP2", "FSDP1")
LARGE = 2**20  # elements of what makes a batch so large that it is on its way to another rank for a while


class BrokenError(Exception):
    """What the user's code raises."""


class EndedError(Exception):
    """How a rank ends: with a report, and at once, as a process would that its exception ends."""


@dataclass(frozen=True)
class Fault:
    """Which rank does what, and when."""

    where: str  # "loader", "forward", "backward", "optimizer", or "kill" or "stop" between forward and backward
    rank: int
    step: int
    lengths: tuple[int, ...]
    loop: str = "sized"
    victim: int | None = None  # for "kill" and "stop": whom `rank` hits, by default itself


class Rows(Dataset[Batch]):
    """What a loader of certain length reads, which can go wrong."""

    def __init__(self, batches: list[Batch], look: Callable[[int], None]) -> None:
        self.batches, self.look = batches, look

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        self.look(index)
        return self.batches[index]


class Training:
    """A model, an optimizer and a loop in which one rank does something wrong at one step."""

    def __init__(self, rank: int, fault: Fault) -> None:
        connect()
        self.rank, self.fault = rank, fault
        self.net = Loop(fault.lengths).build()
        self.model = self.wrapped(self.net)
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.beside: list[Any] = []
        if isinstance(self.model, DistributedDataParallel):
            self.optimizer = ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.Adam, lr=0.05)
            self.beside = [torch.optim.lr_scheduler.StepLR(self.optimizer, 2), Counter()]
        self.raised: BaseException | None = None
        self.join: Any = None
        self.pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(self.pids, os.getpid())

    def wrapped(self, net: Any) -> Any:
        if self.fault.loop == "FSDP1":
            policy = ModuleWrapPolicy({nn.Linear})
            return FullyShardedDataParallel(net, device_id=place(), auto_wrap_policy=policy)
        if self.fault.loop == "FSDP2":
            for part in (net.first, net.last):
                fully_shard(part)
            return fully_shard(net)
        return DistributedDataParallel(net)

    @property
    def rebalances(self) -> bool:
        return "rebalance" in self.fault.loop

    def run(self) -> None:
        pad = torch.zeros(LARGE if self.rebalances else 0)
        batches: Any = [(*batch, pad.clone()) for batch in Loop(self.fault.lengths).batches(self.rank, 0)]
        options: Any = {"rebalance": self.rebalances, "may_break": self.fault.loop == "heartbeat"}
        with ExitStack() as stack:
            if self.rebalances:  # batches are in the giver's memory, and in sockets, while something happens in a step
                stack.enter_context(counted_gifts(0.1))
            given = [self.model, self.optimizer, *self.beside]
            self.join = stack.enter_context(Join(given, timeout=timedelta(seconds=TIMEOUT), **options))
            for step, (x, y, _) in enumerate(self.loop(batches)):
                self.step(step, x, y)

    def loop(self, batches: list[Any]) -> Iterable[Any]:
        if self.fault.loop == "plain":
            return self.read(batches)
        if "iterable" in self.fault.loop:
            return self.join.batches(Stream(self.read(batches)))  # type: ignore[no-any-return,arg-type]
        data = Rows(batches, lambda index: self.at(index, "loader"))
        return self.join.batches(DataLoader(data, batch_size=None, collate_fn=itself))  # type: ignore[no-any-return]

    def read(self, batches: list[Any]) -> Iterator[Any]:
        for step, batch in enumerate(batches):
            self.at(step, "loader")
            yield batch

    def step(self, step: int, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        inner = self.net.last.register_forward_pre_hook(lambda *_: self.at(step, "forward"))
        loss = (self.model(x) - y).pow(2).mean()
        inner.remove()
        if self.hits(step, "kill"):
            self.send(signal.SIGKILL)
        if self.hits(step, "stop"):
            self.send(signal.SIGSTOP)
        if self.fault.where == "backward":
            loss.register_hook(lambda _: self.at(step, "backward"))
        loss.backward()
        for each in self.beside[1:]:
            each.count()
        hook = getattr(self.optimizer, "optim", self.optimizer).register_step_pre_hook(
            lambda *_: self.at(step, "optimizer")
        )
        try:
            self.optimizer.step()
        finally:
            hook.remove()
        for each in self.beside[:1]:
            each.step()

    def hits(self, step: int, where: str) -> bool:
        return (self.rank, step, where) == (self.fault.rank, self.fault.step, self.fault.where)

    def at(self, step: int, where: str) -> None:
        if self.hits(step, where):
            self.raised = BrokenError(f"in {where}")
            raise self.raised

    def send(self, number: signal.Signals) -> None:
        victim = self.rank if self.fault.victim is None else self.fault.victim
        os.kill(self.pids[victim], number)
        if victim != self.rank:
            time.sleep(0.3)  # so that it is gone before the step goes on

    def installed(self) -> dict[str, Any]:
        """Everything that `Join` may have touched."""
        modules = [*self.model.modules()]
        joinables = [each for each in (self.model, self.optimizer, *self.beside) if hasattr(each, "_join_config")]
        return {
            "modules": [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in modules if m is not self.net.last],
            "inner": [*map(id, modules)],
            "sync": (getattr(self.model, "require_backward_grad_sync", None),),
            "parameters": [len(p._backward_hooks or ()) for p in self.model.parameters()],
            "optimizer": [
                len(self.optimizer._optimizer_step_pre_hooks),
                len(self.optimizer._optimizer_step_post_hooks),
            ],
            "configs": [id(each._join_config) for each in joinables],
            "tap": _compat_c10d.has_kernel("allreduce_"),
            "threads": remaining_threads() if self.rebalances else [],
        }


def itself(batch: Any) -> Any:
    return batch


def remaining_threads() -> list[str]:
    end = time.monotonic() + TIMEOUT + 2  # a message that comes no more is waited for as long
    while exchange_threads() and time.monotonic() < end:
        time.sleep(0.05)
    return exchange_threads()


def train(rank: int, fault: Fault) -> None:
    report = json.dumps(watch(rank, fault))
    gc.collect()  # what DDP leaves in cycles would keep the connections open, which the end of a process closes
    raise EndedError(report)


def watch(rank: int, fault: Fault) -> dict[str, Any]:
    training = Training(rank, fault)
    before = training.installed()
    start = time.monotonic()
    chain: list[str] = []
    unchanged = False
    try:
        training.run()
    except BaseException as error:
        seconds = time.monotonic() - start
        unchanged = error is training.raised
        cause: BaseException | None = error
        while cause is not None:
            chain.append(f"{type(cause).__name__}: {cause}")
            cause.__traceback__ = None
            cause.__context__, cause = None, cause.__cause__
        training.raised = None
    else:
        seconds = time.monotonic() - start
    after = training.installed()
    left = [name for name in before if before[name] != after[name]]
    join, training.join = weakref.ref(training.join) if training.join is not None else lambda: None, None
    gc.collect()
    if join() is not None:
        left.append("a reference to Join (a hook, as a rule)")
    return {"errors": chain, "seconds": seconds, "unchanged": unchanged, "left": left}


@dataclass(frozen=True)
class Report:
    """How a rank ended; a process that was killed has no errors."""

    errors: tuple[str, ...] = ()
    seconds: float = 0.0
    unchanged: bool = False
    left: tuple[str, ...] = ()


def read(outcome: Outcome) -> Report | None:
    """None for a process that has ended."""
    if outcome.error == "the process ended":
        return None
    assert outcome.error.startswith("EndedError: "), outcome.trace
    found = json.loads(outcome.error.removeprefix("EndedError: "))
    return Report(tuple(found["errors"]), found["seconds"], found["unchanged"], tuple(found["left"]))


def end(workers: Workers, fault: Fault) -> list[Report | None]:
    """Train with a fault; return how each rank ended."""
    # Whoever is stopped may hold the lock of a file store.
    store = "tcp" if fault.where == "stop" else "file"
    outcomes = workers.outcomes(len(fault.lengths), train, fault, store=store, timeout=TIMEOUT, deadline=45.0)
    return [read(outcome) for outcome in outcomes]


def check_survivors(reports: list[Report | None], culprit: int, text: str, may_leave: tuple[str, ...] = ()) -> None:
    """Check that all others name the rank, soon, and leave nothing behind."""
    for rank, report in enumerate(reports):
        if rank == culprit:
            continue
        assert report is not None, rank
        assert report.errors, f"rank {rank} did not notice"
        assert text in report.errors[0].lower(), (rank, report)
        assert report.seconds < TIMEOUT + GRACE, (rank, report)
        assert {*report.left} <= {*may_leave}, (rank, report)
