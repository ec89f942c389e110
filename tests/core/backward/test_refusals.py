"""Collectives inside backward that nobody could follow, or weigh: an error that says so, on all ranks."""

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from tests.core.backward.programs import Program, train
from tests.core.backward.synced import SyncNorm
from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join


def batch(rank: int, step: int) -> Tensor:
    return torch.full((2 + rank, 3), 1.0 + step, dtype=torch.float64)


def ddp(*layers: nn.Module, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(*(layers or (nn.Linear(3, 3), nn.Linear(3, 3)))).double()
    return DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)


def go(rank: int, loss: Callable[[Any, Tensor], Any], model: Any = None, lengths: tuple[int, ...] = (2, 2)) -> None:
    """Run a loop under "samples", in which each rank's gradients are weighted where they reach the parameters."""
    model = model or ddp()
    with Join([model], weighting="samples") as join:
        for x in join.batches([batch(rank, step) for step in range(lengths[rank])]):
            loss(model, x)


def hooked(model: Any, x: Tensor) -> None:
    out = model(x)
    out.register_hook(lambda gradient: dnn.all_reduce(gradient.sum()) * gradient)
    out.sum().backward()


def detached(model: Any, x: Tensor) -> None:
    out = model(x)
    leaf = out.detach().requires_grad_()
    dnn.all_reduce(leaf.mean(0)).square().sum().backward()  # type: ignore[no-untyped-call]
    out.backward(leaf.grad)


class Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient := gradient.clone(), dist.ReduceOp.MAX)
        return gradient


def largest(model: Any, x: Tensor) -> None:
    Largest.apply(model(x)).sum().backward()  # type: ignore[no-untyped-call]


def weighted(rank: int, name: str) -> None:
    go(rank, {"hooked": hooked, "detached": detached, "largest": largest}[name])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hooked", "all_reduce was called in backward, in a hook, under weighting='samples'"),
        ("detached", "A backward that does not reach the model's parameters"),
        ("largest", "all_reduce was called in backward under weighting='samples'"),
    ],
)
def test_what_has_no_weight_yet_raises_on_even_steps_too(workers: Workers, name: str, says: str) -> None:
    for outcome in workers.outcomes(2, weighted, name, timeout=2.0):
        assert outcome.error.startswith(("UnsupportedError", "PeerFailedError"))
        assert says in outcome.error


def two_static(rank: int) -> None:
    models = ddp(static_graph=True), ddp(nn.Linear(3, 3), static_graph=True)
    with Join(models) as join:
        for x in join.batches([batch(rank, step) for step in range(3 * rank)]):
            loss = dnn.all_reduce(models[1](models[0](x)).mean(0)).square().sum()  # type: ignore[no-untyped-call]
            loss.backward()


def test_two_models_in_a_first_iteration_that_averages_at_its_end(workers: Workers) -> None:
    for outcome in workers.outcomes(2, two_static, timeout=2.0):
        assert "static_graph=True, one of several models" in outcome.error


def test_a_group_of_which_not_all_ranks_know_takes_the_switch() -> None:
    program = Program((2, 5, 3, 4), options=frozenset({"subgroup", "no switch"}))
    # Workers of its own: who drops a group in which a collective is left may wait for its thread for good.
    with closing(Workers(4)) as once:
        errors = [outcome.error for outcome in once.outcomes(4, train, program, timeout=2.0)]
    assert all(errors)
    assert any("UnsupportedError" in error and "backward_collectives=True" in error for error in errors), errors


def before_any_gradient(rank: int) -> None:
    """Ranks 1 and 2 sum up in the loss's hook, of which rank 0, which leads, knows nothing; rank 2 joins first."""
    pair = dist.new_group([1, 2])
    model = ddp()
    with Join([model]) as join:
        for x in join.batches([batch(0, step) for step in range((5, 5, 1)[rank])]):
            out = model(x)
            if rank:
                out.register_hook(lambda gradient: dist.all_reduce(gradient.clone(), group=pair) and None)
            out.sum().backward()


def test_what_only_some_active_ranks_know_of_is_no_evidence(workers: Workers) -> None:
    errors = [outcome.error for outcome in workers.outcomes(3, before_any_gradient, timeout=2.0)]
    assert all("A collective of only ranks [1, 2]" in error for error in errors)
    assert all("backward_collectives=True" in error for error in errors)


class Checkpoint(torch.autograd.Function):
    """Runs a backward inside of the backward, as some libraries' checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.x, ctx.layer = x.detach(), layer
        with torch.no_grad():
            return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(gradient)
        return x.grad, None


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = SyncNorm(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Checkpoint.apply(self.norm(x), self.layer)  # type: ignore[no-any-return,no-untyped-call]


def nested(rank: int) -> None:
    model = ddp(Segments())
    with Join([model]) as join:
        for x in join.batches([torch.rand(4, 3, dtype=torch.float64) for _ in range(1 + 3 * rank)]):
            model(x).square().sum().backward()


def train_beside_a_thread(rank: int) -> float:
    """A thread of the user's trains something of its own."""
    ddp = DistributedDataParallel(nn.Linear(2, 2).double())
    stop, local = threading.Event(), nn.Linear(300, 300)

    def train() -> None:
        while not stop.is_set():
            y = local(torch.ones(500, 300))
            for _ in range(6):
                y = local(y).tanh()
            y.sum().backward()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        with Join([ddp]) as join:
            for _ in join.batches(range([1, 25][rank])):
                dnn.all_reduce(ddp(torch.ones(1, 2, dtype=torch.float64))).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        stop.set()
        thread.join()
    return float(next(ddp.parameters()).sum())


def test_another_threads_backward_is_none_inside_of_this_one(workers: Workers) -> None:
    first, second = workers.run(2, train_beside_a_thread)
    assert first == second


def test_a_backward_inside_of_a_backward_raises(workers: Workers) -> None:
    for outcome in workers.outcomes(2, nested, timeout=2.0):
        assert "use_reentrant=False" in outcome.error


class Alone(torch.autograd.Function):
    """Communicates in forward and backward, in a group in which no other rank of the loop is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dist.all_reduce(gradient := gradient.clone(), group=ctx.group)
        return gradient, None


class WithOthers(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.first, self.last = group, nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x if self.group is None else Alone.apply(x, self.group)  # type: ignore[no-untyped-call]
        return self.last(x)  # type: ignore[no-any-return]


def run_polling(rank: int, communicates: bool, weighting: Any) -> list[Tensor]:
    groups = [dist.new_group([each]) for each in range(2)]
    torch.manual_seed(0)
    model = ddp(WithOthers(groups[rank] if communicates else None))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Join([model, optimizer], weighting=weighting) as join:
        for x in join.batches([batch(rank, step) for step in range(1 + 3 * rank)]):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("weighting", ["world", "samples"])
def test_a_group_without_other_ranks_of_the_loop_is_left_alone(workers: Workers, weighting: str) -> None:
    with_group, without = workers.run(2, run_polling, True, weighting), workers.run(2, run_polling, False, weighting)
    for ours, theirs in zip(with_group, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------- what others know


def in_one_epoch(rank: int, kind: int) -> list[Tensor]:
    """A loss over all ranks in one epoch only; who has joined in the first one is active in the second."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Join([model, optimizer]) as join:
        for epoch, lengths in enumerate([(4, 1, 2), (1, 4, 3), (3, 3, 1)]):
            for x in join.batches([batch(0, step) for step in range(lengths[rank])]):
                optimizer.zero_grad()
                mean = model(x).mean(0)
                total = dnn.all_reduce(mean) if epoch == kind else mean  # type: ignore[no-untyped-call]
                total.square().sum().backward()
                optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", [0, 1])
def test_all_ranks_know_whether_backwards_go_in_pieces(workers: Workers, kind: int) -> None:
    first, *others = workers.run(3, in_one_epoch, kind, timeout=10.0)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def read_late(rank: int) -> list[Tensor]:
    """Rank 2 is slow to read what the active rank announces, and rank 1 has long deleted what all had to know."""
    from tests.support.inside import slow_to_follow

    model = ddp()
    with slow_to_follow(0.4 if rank == 2 else 0.0), Join([model]) as join:
        for x in join.batches([batch(0, step) for step in range(4 if rank == 0 else 1)]):
            dnn.all_reduce(model(x).mean(0)).square().sum().backward()  # type: ignore[no-untyped-call]
    return [p.detach() for p in model.parameters()]


def test_records_are_deleted_when_all_have_read_them(workers: Workers) -> None:
    first, *others = workers.run(3, read_late, deadline=60.0, timeout=15.0)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def contrast(rank: int, lengths: tuple[int, ...], ours: bool) -> int:
    model = ddp()
    with warned("their rows are zeros") as found, Join([model]) as join:
        for x in join.batches([batch(0, step) for step in range(lengths[rank])]):
            rows = join.all_gather(model(x), True).flatten(0, 1) if ours else torch.cat(dnn.all_gather(model(x)))  # type: ignore[no-untyped-call]
            (rows @ rows.T).logsumexp(0).mean().backward()
    return len(found)


def test_rows_of_zeros_among_those_of_a_loss_are_named_once(workers: Workers) -> None:
    assert workers.run(3, contrast, (1, 3, 0), False) == [1, 1, 0]
    assert workers.run(3, contrast, (1, 3, 0), True) == [0, 0, 0]


class Attention(nn.Module):
    """Rows of the ranks of a group, each of which gathers the keys of all."""

    def __init__(self, group: Any, exchanges: bool) -> None:
        super().__init__()
        self.keys, self.group, self.exchanges = nn.Linear(3, 3), group, exchanges

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x)
        if self.exchanges:
            return functional.all_to_all_single_autograd(keys, None, None, self.group).square()
        everyone = functional.all_gather_tensor_autograd(keys, 0, self.group)
        return torch.softmax(keys @ everyone.T, -1) @ everyone


def attend(rank: int, lengths: tuple[int, ...], exchanges: bool) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = ddp(Attention(pairs[rank // 2], exchanges))
    with Join([model], backward_collectives=True) as join:
        for x in join.batches([batch(0, step) for step in range(lengths[rank])]):
            model(x).mean().backward()


@pytest.mark.parametrize("exchanges", [False, True])
def test_ranks_that_attend_together_run_out_together(workers: Workers, exchanges: bool) -> None:
    workers.run(4, attend, (1, 1, 3, 3), exchanges)
    for outcome in workers.outcomes(4, attend, (3, 2, 3, 3), exchanges, timeout=3.0):
        assert "Ranks that compute a batch together" in outcome.error
