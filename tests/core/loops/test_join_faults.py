"""`Join` when something goes wrong: whoever is left ends in time and knows why, and nothing is left behind."""

import gc
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.covering import others_long
from tests.support.front_ends.plain import Claims, Loop, Stream, assert_same_bits
from tests.support.front_ends.plain import Outcome as Trained
from tests.support.joinables import Counter
from tests.support.run import Batch, difference, reference
from tests.support.workers import Outcome, Workers, connect
from torch_join import Join
from torch_join._compat import c10d as _dispatch

TIMEOUT = 2.0  # of the process group and of `Join`, in seconds
GRACE = 5.0  # "a few seconds"


class BrokenError(Exception):
    """What the user's code raises."""


class EndedError(Exception):
    """How a rank ends: with a report, and at once, as a process would that its exception ends."""


@dataclass(frozen=True)
class Fault:
    """Which rank does what, and when."""

    where: str  # "forward", "backward", "optimizer", "loader", "body", "hook", "exit", "kill", "stop", "odd", ...
    rank: int
    step: int
    lengths: tuple[int, ...]
    loop: str = "sized"  # or "plain", "iterable", "heartbeat"
    victim: int | None = None  # for "kill" and "stop": whom `rank` hits, by default itself
    lingers: float = 0.0  # seconds for which a rank stays after its error


class Breaking(Counter):
    """Raises where it is told to."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks

    def main_hook(self) -> None:
        if self.breaks:
            raise BrokenError("in a main hook")
        super().main_hook()


class Training:
    """A model, an optimizer and a loop in which one rank does something wrong at one step."""

    def __init__(self, rank: int, fault: Fault) -> None:
        connect()
        self.rank, self.fault = rank, fault
        self.models = Loop(fault.lengths).build()
        self.ddp = DistributedDataParallel(self.models)
        self.optimizer = ZeroRedundancyOptimizer(self.models.parameters(), torch.optim.Adam, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.counter = Breaking(fault.where == "hook" and rank == fault.rank)
        self.raised: BaseException | None = None
        self.join: Any = None
        self.pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(self.pids, os.getpid())

    def run(self) -> None:
        fault = self.fault
        batches = Loop(fault.lengths).batches(self.rank, 0)
        joinables = [self.ddp, self.optimizer, self.scheduler, self.counter]
        if fault.where == "lists" and self.rank == fault.rank:
            joinables.pop()
        timeout = timedelta(seconds=TIMEOUT)
        with Join(joinables, timeout=timeout, may_break=fault.loop == "heartbeat") as self.join:
            for step, batch in enumerate(self.loop(batches)):
                self.step(step, batch)
            self.at(len(batches), "exit")

    def loop(self, batches: list[Batch]) -> Iterable[Batch]:
        loader: Any = Stream(self.loader(batches)) if self.fault.loop == "iterable" else List(self.loader, batches)
        return loader if self.fault.loop == "plain" else self.join.batches(loader)

    def loader(self, batches: list[Batch]) -> Iterator[Batch]:
        for step, batch in enumerate(batches):
            self.at(step, "loader")
            yield batch

    def step(self, step: int, batch: Batch) -> None:
        self.optimizer.zero_grad()
        x, y = batch
        inner = self.models.last.register_forward_pre_hook(lambda *_: self.at(step, "forward"))
        loss = (self.ddp(x) - y).pow(2).mean()
        inner.remove()
        self.at(step, "body")
        if self.hits(step, "odd"):
            dist.all_reduce(torch.ones(7))
        if self.fault.where == "backward":
            loss.register_hook(lambda _: self.at(step, "backward"))
        loss.backward()
        self.counter.count()
        if self.hits(step, "optimizer"):
            self.optimizer.optim.register_step_pre_hook(lambda *_: self.at(step, "optimizer"))
        self.optimizer.step()
        self.scheduler.step()

    def hits(self, step: int, where: str) -> bool:
        return (self.rank, step, where) == (self.fault.rank, self.fault.step, self.fault.where)

    def at(self, step: int, where: str) -> None:
        if where == "body" and self.hits(step, "kill"):
            self.send(signal.SIGKILL)
        if where == "body" and self.hits(step, "stop"):
            self.send(signal.SIGSTOP)
        if self.hits(step, where):
            self.raised = BrokenError(f"in {where}")
            raise self.raised

    def send(self, number: signal.Signals) -> None:
        victim = self.rank if self.fault.victim is None else self.fault.victim
        os.kill(self.pids[victim], number)
        if victim != self.rank:
            time.sleep(0.3)  # so that it is gone before the step goes on

    # ------------------------------------------------------------ what is left behind

    def installed(self) -> dict[str, Any]:
        """Everything that `Join` may have touched."""
        return {
            "ddp": [len(hooks) for hooks in (self.ddp._forward_pre_hooks, self.ddp._forward_hooks)],
            "module": [len(hooks) for hooks in (self.models._forward_pre_hooks, self.models._forward_hooks)],
            "inner": id(self.ddp.module),
            "sync": (self.ddp.require_backward_grad_sync, self.ddp.broadcast_buffers),
            "parameters": [len(p._backward_hooks or ()) for p in self.models.parameters()],
            "optimizer": [
                len(self.optimizer._optimizer_step_pre_hooks),
                len(self.optimizer._optimizer_step_post_hooks),
            ],
            "configs": [id(thing._join_config) for thing in (self.ddp, self.optimizer, self.counter)],
            "tap": _dispatch.has_kernel("allreduce_"),
        }


class List:
    """A sized loader whose reading can go wrong."""

    def __init__(self, read: Any, batches: list[Batch]) -> None:
        self.read, self.batches = read, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.read(self.batches))


def train(rank: int, fault: Fault, make: type[Training] = Training) -> None:
    report = json.dumps(watch(rank, fault, make))
    if rank == fault.rank:
        time.sleep(fault.lingers)
    gc.collect()  # what DDP leaves in cycles would keep the connections open, which the end of a process closes
    raise EndedError(report)


def watch(rank: int, fault: Fault, make: type[Training] = Training) -> dict[str, Any]:
    training = make(rank, fault)
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


def end(workers: Workers, fault: Fault, store: str = "file", do: Any = train) -> list[Report | None]:
    outcomes = workers.outcomes(len(fault.lengths), do, fault, store=store, timeout=TIMEOUT, deadline=45.0)
    return [read(outcome) for outcome in outcomes]


def check_survivors(reports: list[Report | None], fault: Fault, *texts: str, within: float) -> None:
    for rank, report in enumerate(reports):
        if rank == fault.rank or report is None:
            continue
        assert report.errors, f"rank {rank} did not notice"
        assert any(text in report.errors[0] for text in texts), (rank, report)
        assert report.seconds < within, (rank, report)
        assert not report.left, (rank, report)


# Where a rank is when it raises: active before the tail or in it, or about to join before it.
MOMENTS = {
    "active": (1, (3, 5, 5)),
    "tail": (3, (2, 5, 5)),
    "to-join": (1, (5, 3, 5)),
}
RAISES = {
    f"{where}-{moment}-{loop}": Fault(where, 1, *MOMENTS[moment], loop)
    for where, moment, loop in (
        ("forward", "active", "sized"),
        ("forward", "tail", "plain"),
        ("forward", "to-join", "iterable"),
        ("backward", "active", "plain"),
        ("backward", "tail", "sized"),
        ("backward", "to-join", "heartbeat"),
        ("optimizer", "active", "iterable"),
        ("optimizer", "tail", "sized"),
        ("optimizer", "to-join", "plain"),
        ("loader", "active", "sized"),
        ("loader", "tail", "plain"),
        ("loader", "tail", "iterable"),
        ("loader", "to-join", "sized"),
    )
}
RAISES["exit-active"] = Fault("exit", 1, 5, (3, 5, 5), "plain")
RAISES["exit-to-join"] = Fault("exit", 1, 3, (5, 3, 5), "plain")
RAISES["exit-sized"] = Fault("exit", 1, 3, (5, 3, 5), "sized")


# How failures are told is tested in `_control`; here is what a loop does with it.
SOME = ("backward-tail-sized", "backward-to-join-heartbeat", "loader-tail-iterable", "exit-active")


@pytest.mark.parametrize("name", others_long(RAISES, *SOME))
def test_a_rank_that_raises_is_named_and_its_exception_passes(workers: Workers, name: str) -> None:
    fault = RAISES[name]
    reports = end(workers, fault)
    culprit = reports[1]
    assert culprit is not None
    assert culprit.unchanged, culprit
    assert not culprit.left, culprit
    check_survivors(reports, fault, f"Rank 1: BrokenError: in {fault.where}", within=TIMEOUT + GRACE)


@pytest.mark.long
def test_a_rank_that_raises_and_stays_is_named_after_the_timeout(workers: Workers) -> None:
    fault = Fault("body", 1, 3, (2, 5, 5), lingers=TIMEOUT + 3)
    reports = end(workers, fault)
    check_survivors(reports, fault, "Rank 1: BrokenError: in body", within=TIMEOUT + GRACE)
    waiting = reports[0]
    assert waiting is not None
    assert waiting.seconds < GRACE, waiting


@pytest.mark.parametrize("store", others_long(["file", "tcp"], "file"))
def test_the_rank_that_hosts_the_store_raises(workers: Workers, store: str) -> None:
    fault = Fault("body", 0, 3, (5, 2, 5))
    reports = end(workers, fault, store)
    check_survivors(reports, fault, "Rank 0: BrokenError: in body", within=TIMEOUT + GRACE)


def test_a_main_hook_that_raises(workers: Workers) -> None:
    fault = Fault("hook", 1, -1, (5, 2, 5))
    reports = end(workers, fault)
    culprit = reports[1]
    assert culprit is not None
    assert culprit.errors == ("BrokenError: in a main hook",)
    assert not culprit.left, culprit
    check_survivors(reports, fault, "Rank 1: BrokenError: in a main hook", within=TIMEOUT + GRACE)


KILLS = {
    "active": Fault("kill", 1, 1, (3, 5, 5)),
    "active-in-tail": Fault("kill", 1, 3, (2, 5, 5)),
    "last-active": Fault("kill", 1, 3, (2, 5, 1)),
    "joined": Fault("kill", 2, 3, (2, 2, 5), victim=1),
    "plain": Fault("kill", 1, 1, (3, 5, 5), "plain"),
    "heartbeat-joined": Fault("kill", 2, 3, (5, 2, 5), "heartbeat", victim=1),
}


@pytest.mark.parametrize("name", others_long(KILLS, "active-in-tail", "heartbeat-joined"))
def test_a_killed_rank_is_named(workers: Workers, name: str) -> None:
    fault = KILLS[name]
    reports = end(workers, fault)
    assert reports[1] is None
    for rank in (0, 2):
        report = reports[rank]
        assert report is not None
        assert report.errors[0].startswith("PeerFailedError: "), report
        assert "rank 1" in report.errors[0].lower(), report
        assert report.seconds < TIMEOUT + GRACE, report
        assert not report.left, report


STOPS = {
    "active": Fault("stop", 1, 1, (3, 5, 5)),
    "in-tail": Fault("stop", 1, 3, (2, 5, 5)),
    "joined": Fault("stop", 2, 3, (5, 2, 5), victim=1),
    "last-active": Fault("stop", 1, 3, (2, 5, 1)),
}


def resume(process: int, after: float) -> None:
    """Let a process go on some time after it has been stopped."""
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.05)
    time.sleep(after)
    os.kill(process, signal.SIGCONT)


@pytest.mark.parametrize("name", others_long(STOPS, "in-tail"))
def test_a_stopped_rank_is_named(workers: Workers, name: str) -> None:
    fault = STOPS[name]
    resuming = threading.Thread(target=resume, args=(workers.pid(1), TIMEOUT + GRACE))
    resuming.start()
    reports = end(workers, fault)
    resuming.join()
    for rank in (0, 2):
        report = reports[rank]
        assert report is not None
        assert "rank 1" in report.errors[0].lower(), report
        assert report.seconds < TIMEOUT + GRACE, report
        assert not report.left, report
    stopped = reports[1]
    assert stopped is None or (stopped.errors and not stopped.left), stopped


@pytest.mark.parametrize(("step", "lengths"), [(1, (3, 5, 5)), (3, (2, 5, 5)), (3, (2, 5, 1))])
def test_a_collective_that_others_do_not_issue_ends(workers: Workers, step: int, lengths: tuple[int, ...]) -> None:
    fault = Fault("odd", 1, step, lengths)
    reports = end(workers, fault)
    if lengths == (2, 5, 1):  # there is nobody to disagree with: the joined ranks take part in it
        assert all(report is not None and not report.errors for report in reports), reports
        return
    for report in reports:  # gloo may abort a process
        assert report is None or report.errors, reports
        assert report is None or (report.seconds < TIMEOUT + GRACE and not report.left), reports


def test_different_lists_are_told(workers: Workers) -> None:
    fault = Fault("lists", 1, -1, (2, 3))
    for report in end(workers, fault):
        assert report is not None
        assert report.errors[0].startswith("JoinValueError: All ranks must pass Join the same joinables"), report
        assert "rank 1: DistributedDataParallel, ZeroRedundancyOptimizer, StepLR." in report.errors[0]
        assert report.seconds < GRACE
        assert not report.left


# ---------------------------------------------------------------- patterns that cannot be made exact


def sync_at_own_end(rank: int, lengths: tuple[int, ...], loops: str) -> None:
    connect()
    models = Loop(lengths).build()
    ddp = DistributedDataParallel(models)
    optimizer = torch.optim.SGD(models.parameters(), lr=0.05)
    batches = Loop(lengths).batches(rank, 0)
    with Join([ddp, optimizer], timeout=timedelta(seconds=TIMEOUT)) as join:
        for i, (x, y) in enumerate(batches if loops == "plain" else join.batches(batches)):
            with nullcontext() if (i + 1) % 2 == 0 or i + 1 == len(batches) else ddp.no_sync():
                (ddp(x) - y).pow(2).mean().backward()


@pytest.mark.parametrize("loops", ["sized", "plain"])
@pytest.mark.parametrize("lengths", [(3, 6), (6, 3), (3, 6, 6)])
def test_unequal_counts_of_synced_backwards_end(workers: Workers, lengths: tuple[int, ...], loops: str) -> None:
    outcomes = workers.outcomes(len(lengths), sync_at_own_end, lengths, loops, timeout=TIMEOUT, deadline=45.0)
    assert any("if i + 1 == len(loader)" in outcome.error for outcome in outcomes), outcomes
    for outcome in outcomes:
        assert outcome.error, outcomes
        assert outcome.seconds < TIMEOUT + GRACE, outcomes


def change_by_hand(rank: int, lengths: tuple[int, ...]) -> None:
    connect()
    models = Loop(lengths).build()
    ddp = DistributedDataParallel(models)
    optimizer = torch.optim.SGD(models.parameters(), lr=0.05)
    with Join([ddp, optimizer], timeout=timedelta(seconds=TIMEOUT)) as join:
        for x, y in join.batches(Loop(lengths).batches(rank, 0)):
            (ddp(x) - y).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(models.parameters(), 0.1)
            optimizer.step()


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2, 5)])
def test_gradients_changed_by_hand_are_told(workers: Workers, lengths: tuple[int, ...]) -> None:
    outcomes = workers.outcomes(len(lengths), change_by_hand, lengths, timeout=TIMEOUT, deadline=45.0)
    for rank, outcome in enumerate(outcomes):
        assert "A gradient was changed by hand" in outcome.error, outcomes
        assert outcome.seconds < GRACE, outcomes
        assert lengths[rank] != 2 or outcome.error.startswith("PeerFailedError"), outcome


# ---------------------------------------------------------------- lengths that prove wrong


def uneven(
    rank: int, claimed: tuple[int, ...], real: tuple[int, ...], leaves: tuple[int, ...] | None, late: bool = False
) -> Trained:
    """Train on what the loaders really hold, or leave the loop before `leaves[rank]` batches."""
    connect()
    models = Loop(real).build()
    ddp = DistributedDataParallel(models)
    optimizer = torch.optim.Adam(models.parameters(), lr=0.05)
    with Join([ddp, optimizer], may_break=leaves is not None, timeout=timedelta(seconds=TIMEOUT)) as join:
        for step, (x, y) in enumerate(join.batches(Claims(Loop(real).batches(rank, 0), claimed[rank]))):
            if leaves is not None and not late and step == leaves[rank]:
                break
            optimizer.zero_grad()
            (ddp(x) - y).pow(2).mean().backward()
            optimizer.step()
            if leaves is not None and late and step + 1 == leaves[rank]:
                break
    held: list[Tensor] = [p.detach() for p in models.parameters()]
    return Trained(held, [], optimizer.state_dict()["state"], None, 0.05, [])


def assert_exact(outcomes: list[Outcome], lengths: tuple[int, ...]) -> None:
    assert not any(outcome.error for outcome in outcomes), "\n".join(outcome.trace for outcome in outcomes)
    expected = reference(Loop(lengths, epochs=1))
    assert_same_bits([outcome.value for outcome in outcomes])
    assert difference(outcomes[0].value.parameters, expected.parameters) < 1e-10


@pytest.mark.parametrize(
    ("claimed", "real"),
    [
        ((5, 5), (3, 5)),
        ((5, 5), (5, 3)),
        ((5, 3), (1, 3)),
        ((4, 6, 6), (4, 6, 2)),
        ((4, 4, 4), (0, 4, 1)),
        ((6, 6), (2, 2)),
        *(((3, 5), (4, 5)), ((3, 5), (5, 5)), ((5, 3), (5, 8)), ((3, 3), (3, 6)), ((0, 3), (2, 3))),
    ],
)
def test_a_loader_that_ends_before_its_length_or_goes_on_after_it_is_exact(
    workers: Workers, claimed: tuple[int, ...], real: tuple[int, ...]
) -> None:
    outcomes = workers.outcomes(len(real), uneven, claimed, real, None, timeout=TIMEOUT, deadline=45.0)
    assert_exact(outcomes, real)


def change_a_list(rank: int, lengths: tuple[int, ...], who: int, by: int, syncs: bool) -> None:
    """Go through lists, of which one becomes longer or shorter meanwhile."""
    connect()
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    batches = [torch.ones(2, 1)] * lengths[rank]
    with Join([model], timeout=timedelta(seconds=TIMEOUT)) as join:
        for step, batch in enumerate(join.batches(batches)):
            if step == 1 and rank == who:
                batches[:] = batches * 2 if by > 0 else batches[:by]
            with nullcontext() if syncs else model.no_sync():
                model(batch).sum().backward()


@pytest.mark.covering(2)
@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize(("who", "by"), [(0, 1), (0, -1), (1, 1), (1, -2)])
@pytest.mark.parametrize("lengths", [(6, 6), (4, 9), (9, 4, 2)])
def test_a_list_that_changes_its_length_is_told(
    workers: Workers, lengths: tuple[int, ...], who: int, by: int, syncs: bool
) -> None:
    outcomes = workers.outcomes(len(lengths), change_a_list, lengths, who, by, syncs, timeout=TIMEOUT, deadline=45.0)
    for outcome in outcomes:
        assert f"The loader of rank {who} reported the length {lengths[who]} and " in outcome.error, outcomes
        assert outcome.seconds < GRACE, outcomes


LEAVES = [
    *[((6, 6), (2, 4)), ((6, 6), (4, 2)), ((3, 6), (9, 5)), ((6, 3, 6), (1, 9, 4))],
    *[((6, 6, 6), (1, 3, 3)), ((2, 6), (9, 1))],
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("lengths", "leaves"), LEAVES)
@pytest.mark.parametrize("late", [True, False], ids=["after-step", "before-forward"])
def test_leaving_the_loop_at_different_steps_is_exact(
    workers: Workers, lengths: tuple[int, ...], leaves: tuple[int, ...], late: bool
) -> None:
    outcomes = workers.outcomes(len(lengths), uneven, lengths, lengths, leaves, late, timeout=TIMEOUT, deadline=45.0)
    assert_exact(outcomes, tuple(map(min, lengths, leaves)))


class Breaks(torch.autograd.Function):
    """Runs out of memory in backward, where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.breaks:
            raise torch.OutOfMemoryError("out of memory")
        return gradient, None


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)

    def forward(self, x: Tensor, breaks: bool) -> Tensor:
        return self.second(Breaks.apply(self.first(x), breaks))  # type: ignore[no-any-return,no-untyped-call]


def skip_what_is_too_large(rank: int, lengths: tuple[int, ...], step: int, options: dict[str, Any]) -> None:
    connect()
    model = DistributedDataParallel(TwoLayers(), bucket_cap_mb=1e-6)
    with Join([model], **options) as join:
        for x in join.batches([torch.ones(2, 3)] * lengths[rank]):
            try:
                model(x, rank == 1 and join.step == step).mean().backward()
            except torch.OutOfMemoryError:
                model.zero_grad()


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{}, {"weighting": "samples"}], ids=["world", "samples"])
@pytest.mark.parametrize(("lengths", "step"), [((4, 4), 1), ((4, 4), 3), ((4, 2), 1), ((2, 4), 3)])
def test_a_backward_that_broke_off_is_called_that(
    workers: Workers, lengths: tuple[int, ...], step: int, options: dict[str, Any]
) -> None:
    outcomes = workers.outcomes(2, skip_what_is_too_large, lengths, step, options, timeout=GRACE)
    for outcome in outcomes:
        assert "Rank 1 caught an exception that ended a backward of TwoLayers" in outcome.error
    assert outcomes[1].seconds < GRACE, outcomes  # the other one waits in an average for this process to end
