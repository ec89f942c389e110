"""Loops that are left early, begun inside each other, or held: exact, or an error at once."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.core.loops.training import Training, check_exact
from tests.support.inside import channel_of, keys_of, unwritten
from tests.support.workers import Workers, connect
from torch_join import Join

SHORT = timedelta(seconds=10)


def leave(rank: int, lengths: tuple[int, ...], stops: tuple[int, ...], how: str) -> tuple[list[Tensor], float, float]:
    training = Training(lengths, rank)
    total, seen = torch.ones(1) * len(lengths), 0.0
    with Join([training.ddp, training.optimizer], may_break=True, timeout=SHORT) as join:
        loop: Any = join.batches(training.batches)
        if how == "held":
            loop = iter(loop)
        for step, batch in enumerate(loop):
            if step == stops[rank]:
                break
            training.step(batch)
        if how == "looked at":
            seen = float(len(join.active_ranks))
        if how in ("collective", "looked at"):
            dist.all_reduce(total)
            check_after = training.parameters  # all have met, so all have the same
            seen = float(sum(p.sum() for p in check_after))
        if how == "loop":
            for _ in join.batches([0] * rank):
                dist.all_reduce(total)
    return training.parameters, total.item(), seen


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["", "held", "collective", "looked at", "loop"])
@pytest.mark.parametrize(("lengths", "stops"), [((6, 6), (2, 4)), ((4, 6), (9, 3)), ((5, 0, 5), (1, 9, 3))])
def test_what_follows_a_break_is_safe(
    workers: Workers, lengths: tuple[int, ...], stops: tuple[int, ...], how: str
) -> None:
    found = workers.run(len(lengths), leave, lengths, stops, how, deadline=30.0)
    check_exact([parameters for parameters, _, _ in found], tuple(map(min, lengths, stops)))
    if how == "collective":
        assert [total for _, total, _ in found] == [len(lengths) ** 2] * len(lengths)
    assert how == "loop" or len({seen for _, _, seen in found}) == 1


def nest(rank: int, lengths: tuple[int, ...], how: str) -> None:
    connect()
    training = Training(lengths, rank)
    with Join([training.ddp, training.optimizer], timeout=SHORT) as join:
        if how == "zipped":
            for batch, _ in zip(join.batches(training.batches), join.batches([0] * 9), strict=False):
                training.step(batch)
        else:
            for batch in join.batches(training.batches):
                training.step(batch)
                for _ in join.batches([0, 1]):
                    pass


@pytest.mark.parametrize("how", ["nested", "zipped"])
@pytest.mark.parametrize("lengths", [(3, 3), (1, 3)])
def test_a_loop_in_a_loop_raises_at_once(workers: Workers, lengths: tuple[int, ...], how: str) -> None:
    for outcome in workers.outcomes(2, nest, lengths, how, deadline=30.0, timeout=2.0):
        assert "started before another one" in outcome.error, outcome
        assert outcome.seconds < 8


def forward_more(rank: int, lengths: tuple[int, ...], may_break: bool) -> list[Tensor]:
    training = Training(lengths, rank)
    with Join([training.ddp, training.optimizer], may_break=may_break, timeout=SHORT) as join:
        for batch in join.batches(training.batches):
            training.step(batch)
            training.ddp(x=batch[0])  # what is announced of it waits for the next announcement
        assert not unwritten(join)  # and for no later tail
    return training.parameters


@pytest.mark.parametrize("may_break", [False, True])
@pytest.mark.parametrize("lengths", [(2, 6), (6, 9, 2), (4, 0, 4)])
def test_a_forward_that_no_backward_follows(workers: Workers, lengths: tuple[int, ...], may_break: bool) -> None:
    check_exact(workers.run(len(lengths), forward_more, lengths, may_break), lengths)


def keys_of_a_tail(rank: int, lengths: tuple[int, ...], may_break: bool, pairs: bool) -> list[int]:
    """Return how many keys there are within a long tail, at its end, and after the loop."""
    training, pair, counts = Training(lengths, rank), dist.new_group([0, 1]), []
    with Join([training.ddp, training.optimizer], may_break=may_break) as join:
        store = channel_of(join)
        for step, batch in enumerate(join.batches(training.batches)):
            training.step(batch)
            if pairs and rank in (0, 1):
                dist.all_reduce(torch.ones(1), group=pair)
            if step in (10, max(lengths) - 1):
                counts.append(keys_of(store))
        for _ in join.batches([]):
            pass
        counts.append(keys_of(store))
    return counts


@pytest.mark.parametrize(
    ("lengths", "may_break", "pairs"),
    [
        *[(lengths, may_break, False) for lengths in ((1, 60), (60, 1, 60)) for may_break in (False, True)],
        *[(lengths, False, True) for lengths in ((1, 60, 60), (60, 1, 60), (60, 60, 1), (1, 1, 60), (60, 2, 1))],
    ],
)
def test_a_long_tail_leaves_nothing_in_the_store(
    workers: Workers, lengths: tuple[int, ...], may_break: bool, pairs: bool
) -> None:
    for counts in workers.run(len(lengths), keys_of_a_tail, lengths, may_break, pairs):
        assert counts[-1] <= 4  # others may have come to what follows
        if len(counts) == 3:
            assert counts[1] <= counts[0] + 4


def backward_after_the_loop(rank: int, options: dict[str, Any], breaks: bool) -> list[float]:
    """Run the last step's backward where the loop has ended: of 2 samples on rank 0, and 6 on rank 1."""
    model = nn.Linear(1, 1, bias=False).double()
    ddp = DistributedDataParallel(model)
    found = []
    with Join([ddp], weighting="samples", **options) as join:
        for _ in range(2):
            for batch in join.batches([torch.full(((2, 6)[rank], 1), 1.0 + rank, dtype=torch.float64)] * 3):
                model.zero_grad()
                loss = ddp(batch).mean()
                if breaks and join.step == 1:
                    break
                if join.step < 2:
                    loss.backward()
            loss.backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad.item())
    return found


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("options", [{}, {"may_break": True}], ids=["batches", "beats"])
def test_a_backward_after_the_loop_is_weighted_as_in_its_step(
    workers: Workers, options: dict[str, Any], breaks: bool
) -> None:
    expected = (2 * 1.0 + 6 * 2.0) / 8
    for found in workers.run(2, backward_after_the_loop, options, breaks):
        assert found == pytest.approx([expected] * 2, abs=1e-12)


def make_small() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def step_behind_a_break(rank: int, sharded: bool) -> list[Tensor]:
    model: Any = make_small()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer: Any = SGD(model.parameters(), 0.1, momentum=0.9)
    else:
        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9)
    with Join([model, optimizer], may_break=True) as join:
        for step in join.batches(range((1, 4)[rank])):
            if step < 2:
                optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + step, dtype=torch.float64)).square().mean().backward()
            if step == 2:
                break
            optimizer.step()
        optimizer.step()  # of a shard, without any collective before it: the loop is finished first
    return [(p.full_tensor() if sharded else p).detach() for p in model.parameters()]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_behind_a_break_is_one_of_all_ranks(workers: Workers, sharded: bool) -> None:
    model = make_small()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    for step, ranks in enumerate((2, 1, 1)):
        if step < 2:
            optimizer.zero_grad()
        loss = model(torch.full((2, 3), 1.0 + step, dtype=torch.float64)).square().mean()
        (loss * ranks / 2).backward()
        optimizer.step()
    for found in workers.run(2, step_behind_a_break, sharded):
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(found, model.parameters(), strict=True))
