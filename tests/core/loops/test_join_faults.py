"""`Join` when something goes wrong: whoever is left ends in time and knows why, and nothing is left behind."""

import threading
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.core.loops.failing import LOOPS, Fault, check_survivors, end
from tests.covering import others_long
from tests.support.front_ends.plain import Claims, Loop, assert_same_bits
from tests.support.front_ends.plain import Outcome as Trained
from tests.support.run import difference, reference
from tests.support.stopped import GRACE, TIMEOUT, resume
from tests.support.workers import Outcome, Workers, connect
from torch_join import Join

# Where rank 1 is when it raises: active before the tail or in it, or about to join before it.
MOMENTS = {"active": (1, (3, 5, 5)), "tail": (3, (2, 5, 5)), "to join": (1, (5, 3, 5))}


# How failures are told is tested in `_control`; here is what each kind of loop does with it.
@pytest.mark.covering(1)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("where", ["loader", "forward", "backward", "optimizer"])
def test_a_rank_that_raises_is_named_and_its_exception_passes(
    workers: Workers, where: str, moment: str, loop: str
) -> None:
    step, lengths = MOMENTS[moment]
    reports = end(workers, Fault(where, 1, step, lengths, loop))
    culprit = reports[1]
    assert culprit is not None
    assert culprit.unchanged, culprit
    assert not culprit.left, culprit
    check_survivors(reports, 1, f"rank 1: brokenerror: in {where}")


# Which rank goes at a step of the tail: an active one, one that has joined, or the first of all, which has too.
VICTIMS = {"active": (1, (2, 5, 5)), "joined": (1, (5, 2, 5)), "first": (0, (2, 5, 5))}


@pytest.mark.covering(1)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_rank_is_named(workers: Workers, victim: str, loop: str) -> None:
    rank, lengths = VICTIMS[victim]
    reports = end(workers, Fault("kill", 2, 3, lengths, loop, rank))
    assert reports[rank] is None
    # gloo leaves a thread that was in the middle of a message of the victim's.
    check_survivors(reports, rank, f"rank {rank}", may_leave=("threads",))


@pytest.mark.parametrize("loop", others_long(["sized", "FSDP2"], "sized"))
def test_a_stopped_rank_is_named(workers: Workers, loop: str) -> None:
    resuming = threading.Thread(target=resume, args=(workers.pid(1), TIMEOUT + GRACE))
    resuming.start()
    reports = end(workers, Fault("stop", 1, 3, (2, 5, 5), loop))
    resuming.join()
    check_survivors(reports, 1, "rank 1")
    stopped = reports[1]
    assert stopped is None or (stopped.errors and not stopped.left), stopped


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
        assert "was modified by hand" in outcome.error, outcomes
        assert outcome.seconds < GRACE, outcomes
        assert lengths[rank] != 2 or outcome.error.startswith("PeerFailedError"), outcome


# ---------------------------------------------------------------- lengths that prove wrong


def uneven(rank: int, claimed: tuple[int, ...], real: tuple[int, ...]) -> Trained:
    """Train on what the loaders really hold."""
    connect()
    models = Loop(real).build()
    ddp = DistributedDataParallel(models)
    optimizer = torch.optim.Adam(models.parameters(), lr=0.05)
    with Join([ddp, optimizer], timeout=timedelta(seconds=TIMEOUT)) as join:
        for x, y in join.batches(Claims(Loop(real).batches(rank, 0), claimed[rank])):
            optimizer.zero_grad()
            (ddp(x) - y).pow(2).mean().backward()
            optimizer.step()
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
    outcomes = workers.outcomes(len(real), uneven, claimed, real, timeout=TIMEOUT, deadline=45.0)
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
        assert f"The loader of rank {who} reported the length {lengths[who]} but " in outcome.error, outcomes
        assert outcome.seconds < GRACE, outcomes


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
