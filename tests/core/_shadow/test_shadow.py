"""What a joined rank runs in place of a step: nothing of the user's, and nothing that DDP remembers wrongly."""

import copy
import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.needs import needs
from tests.support.run import difference
from tests.support.small import train_alone
from tests.support.workers import Workers
from torch_join import Join, JoinError

LENGTHS = [(1, 4), (4, 1), (0, 3)]


class Halves(nn.Module):
    """Two layers, of which a batch uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)
        self.double()

    def forward(self, uses: str, x: Tensor) -> Tensor:
        return torch.stack([getattr(self, name)(x) for name in uses]).sum(0)


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# What is used in each step of two loops, by rank; the second loop is even.
USES = ((["ab", "a"], ["ab", "a", "b", "a"]), (["b", "b"], ["b", "b"]))


def used(model: nn.Module, epoch: Sequence[Sequence[str]], rank: int, step: int) -> Tensor:
    return model(epoch[rank][step], batch(rank, step)).pow(2).mean()  # type: ignore[no-any-return]


def train_halves(rank: int, epochs: Any, set_to_none: bool, window: int) -> tuple[list[Tensor], list[str]]:
    model = Halves()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer, empty = sgd(model), []
    with Join([ddp, optimizer]) as join:
        for epoch in epochs:
            for step, uses in enumerate(join.batches(epoch[rank])):
                if step % window == 0:
                    optimizer.zero_grad(set_to_none)
                with ddp.no_sync() if step % window < window - 1 else nullcontext():
                    ddp(uses, batch(rank, step)).pow(2).mean().backward()
                if step % window == window - 1:
                    optimizer.step()
            empty = ["none" if p.grad is None else str(bool(p.grad.any())) for p in model.parameters()]
    return [p.detach() for p in model.parameters()], empty


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_what_no_rank_uses_is_as_empty_as_it_was(workers: Workers, set_to_none: bool, window: int, first: bool) -> None:
    epochs = tuple(epoch[::-1] if first else epoch for epoch in USES)
    model = Halves()
    optimizer = sgd(model)
    for epoch in epochs:
        lengths = [len(uses) for uses in epoch]
        expected = train_alone(optimizer, lengths, lambda *place: used(model, epoch, *place), window, set_to_none)  # noqa: B023
    found = workers.run(2, train_halves, epochs, set_to_none, window)
    for parameters, empty in found:
        assert difference(parameters, expected) < 1e-10
        assert empty == found[0][1]


def forget_a_local_backward(rank: int, set_to_none: bool) -> list[Tensor]:
    model = Halves()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sgd(model)
    with Join([ddp, optimizer]) as join:
        for step in join.batches(range([2, 4][rank])):
            optimizer.zero_grad(set_to_none)
            with ddp.no_sync() if step % 2 else nullcontext():
                ddp("ab" if rank == 0 or step == 0 else "b", batch(rank, step)).pow(2).mean().backward()
            if step % 2:
                optimizer.zero_grad(set_to_none)  # what this rank alone has seen is thrown away
            else:
                optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_what_was_cleared_before_a_sync_does_not_count_as_used(workers: Workers, set_to_none: bool) -> None:
    model = Halves()
    optimizer = sgd(model)
    for step in (0, 2):
        optimizer.zero_grad(set_to_none)
        for rank in range(2 if step == 0 else 1, 0, -1):
            uses = "b" if step else "ab"
            (model(uses, batch(rank if step else rank - 1, step)).pow(2).mean() / 2).backward()
        optimizer.step()
    for parameters in workers.run(2, forget_a_local_backward, set_to_none):
        assert difference(parameters, [p.detach() for p in model.parameters()]) < 1e-10


class Output(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"out": super().forward(x)}


Install = Callable[[DistributedDataParallel], tuple[Any, Callable[[Any], Tensor]]]


def on_wrapper(ddp: DistributedDataParallel) -> Any:
    return ddp.register_forward_hook(lambda *args: args[2]["out"]), lambda out: out


def before_wrapper(ddp: DistributedDataParallel) -> Any:
    hook = lambda _, args, kwargs: ((kwargs["x"],), {})  # noqa: E731
    return ddp.register_forward_pre_hook(hook, with_kwargs=True), lambda out: out["out"]


def on_all_modules(ddp: DistributedDataParallel) -> Any:
    names = {id(module): name for name, module in ddp.named_modules()}

    def look_up(module: nn.Module, *_: Any) -> None:
        names[id(module)]

    return nn.modules.module.register_module_forward_hook(look_up), lambda out: out["out"]


def after_accumulation(ddp: DistributedDataParallel) -> Any:
    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e9, 1e9)

    stack = ExitStack()
    for parameter in ddp.parameters():
        stack.callback(parameter.register_post_accumulate_grad_hook(clamp).remove)
    stack.remove = stack.close  # type: ignore[attr-defined]
    return stack, lambda out: out["out"]


def train_hooked(rank: int, lengths: Sequence[int], install: Install) -> list[Tensor]:
    torch.manual_seed(0)
    model = Output(3, 2).double()
    ddp = DistributedDataParallel(model)
    handle, read = install(ddp)
    optimizer = sgd(model)
    with Join([ddp, optimizer]) as join:
        for step in join.batches(range(lengths[rank])):
            optimizer.zero_grad()
            read(ddp(x=batch(rank, step))).pow(2).mean().backward()
            optimizer.step()
    handle.remove()
    return [p.detach() for p in model.parameters()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("install", [on_wrapper, before_wrapper, on_all_modules, after_accumulation])
def test_hooks_of_the_users_do_not_run_in_a_shadow(workers: Workers, install: Install, lengths: Sequence[int]) -> None:
    torch.manual_seed(0)
    model = Output(3, 2).double()
    expected = train_alone(sgd(model), lengths, lambda *place: model(batch(*place))["out"].pow(2).mean())
    for parameters in workers.run(2, train_hooked, lengths, install):
        assert difference(parameters, expected) < 1e-10


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).abs() + self.bias


def train_complex(rank: int, lengths: Sequence[int]) -> list[Tensor]:
    model = Complex()
    ddp, optimizer = DistributedDataParallel(model), sgd(model)
    with Join([ddp, optimizer]) as join:
        for step in join.batches(range(lengths[rank])):
            optimizer.zero_grad()
            ddp(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
    return [torch.view_as_real(model.w.detach()), model.bias.detach()]


@needs("gloo's complex numbers")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_first_parameter_may_be_complex(workers: Workers, lengths: Sequence[int]) -> None:
    model = Complex()
    train_alone(sgd(model), lengths, lambda *place: model(batch(*place)).pow(2).mean())
    for parameters in workers.run(2, train_complex, lengths):
        assert difference(parameters, [torch.view_as_real(model.w.detach()), model.bias.detach()]) < 1e-10


def bucket_order(rank: int, lengths: Sequence[int]) -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).double()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    with Join([ddp]) as join:
        for step in join.batches(range(lengths[rank])):
            ddp(torch.cat([batch(rank, step), batch(rank, step)[:, :1]], 1)).sum().backward()
    indices: dict[int, int] = {}

    def note(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        for parameter in bucket.parameters():
            indices[next(i for i, p in enumerate(model.parameters()) if p is parameter)] = bucket.index()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, note)
    ddp(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    return sorted(indices, key=lambda index: indices[index])


def test_a_shadow_in_the_first_step_does_not_order_the_buckets(workers: Workers) -> None:
    even = workers.run(2, bucket_order, (3, 3))[0]
    assert even == [*range(11, -1, -1)] or even != [*range(12)]
    assert workers.run(2, bucket_order, (0, 3)) == [even, even]


def train_static(rank: int) -> None:
    model = Halves()
    ddp = DistributedDataParallel(model, static_graph=True)
    with Join([ddp]) as join:
        for lengths in ((0, 2), (3, 3)):
            for step in join.batches(range(lengths[rank])):
                ddp("a", batch(rank, step)).sum().backward()
                model.zero_grad()


def test_a_static_graph_that_an_empty_rank_cannot_know_raises_on_all(workers: Workers) -> None:
    for outcome in workers.outcomes(2, train_static):
        assert "static_graph=True fixes in the first iteration" in outcome.error
        assert "Give each rank a batch in the first iteration" in outcome.error
        assert outcome.seconds < 10


def weigh(rank: int, hook: str) -> float:
    model = nn.Linear(1, 1, bias=False).double()
    seen: list[float] = []
    if hook == "tensor":
        model.weight.register_hook(lambda gradient: seen.append(gradient.item()))
    else:
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))  # type: ignore[union-attr]
    ddp = DistributedDataParallel(model)
    with Join([ddp], weighting="active") as join:
        for _ in join.batches(range([1, 2][rank])):
            model.zero_grad()
            (ddp(torch.ones(1, 1, dtype=torch.float64)).sum() * 0.8).backward()
    return seen[-1]


def test_which_hooks_see_the_weight_is_as_documented(workers: Workers) -> None:
    # docs/plain-loops.md: a tensor's hook sees the rank's own gradient, a post-accumulate-grad hook W/|A| times that.
    assert workers.run(2, weigh, "tensor")[1] == pytest.approx(0.8)
    assert workers.run(2, weigh, "post")[1] == pytest.approx(1.6)


def two_backwards(rank: int, lengths: Sequence[int], loop: str, used: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    ddp, optimizer = DistributedDataParallel(model), sgd(model)
    with Join([ddp, optimizer], may_break=loop == "heartbeat") as join:
        steps = range(lengths[rank])
        for step in steps if loop == "plain" else join.batches(steps):
            optimizer.zero_grad()
            out = ddp(batch(rank, step))
            out[:, 0].pow(2).mean().backward(retain_graph=True)
            if used:
                out[:, 1].pow(2).mean().backward()
                optimizer.step()
            else:
                optimizer.step()
                out[:, 1].pow(2).mean().backward()  # for another model's sake, say; cleared before the next step


@pytest.mark.parametrize("loop", ["sized", "heartbeat", "plain"])
@pytest.mark.parametrize("lengths", [(2, 2), (1, 3)])
def test_a_second_backward_that_is_not_averaged_raises(workers: Workers, lengths: Sequence[int], loop: str) -> None:
    for outcome in workers.outcomes(2, two_backwards, lengths, loop, True, timeout=2.0):
        assert "two backwards through one forward" in outcome.error
    workers.run(2, two_backwards, lengths, loop, False)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.trunk, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(self.first(x))
        return {"features": features, "logits": self.last(features)}


def backwards_through(rank: int, which: str) -> None:
    ddp = DistributedDataParallel(Heads())
    optimizer = sgd(ddp)
    with Join([ddp, optimizer]) as join:
        for step in join.batches(range(3)):
            optimizer.zero_grad()
            x = batch(rank, step).requires_grad_()
            out = ddp(x)
            if which == "penalty":  # one backward, after an autograd.grad through the same outputs
                (slope,) = torch.autograd.grad(out["logits"].sum(), x, create_graph=True)
                (out["logits"].pow(2).mean() + slope.pow(2).mean()).backward()
            elif which == "l2":  # the same on all ranks
                out["logits"].pow(2).mean().backward()
                torch.stack([p.pow(2).sum() for p in ddp.parameters()]).sum().backward()
            else:
                out["logits"].pow(2).mean().backward(retain_graph=True)
                out["features" if which == "trunk" else "logits"].pow(4).mean().backward()
            optimizer.step()


@pytest.mark.parametrize("which", ["trunk", "logits", "penalty", "l2"])
def test_through_whichever_output_a_second_backward_comes(workers: Workers, which: str) -> None:
    for outcome in workers.outcomes(2, backwards_through, which, timeout=2.0):
        assert ("two backwards through one forward" in outcome.error) == (which in ("trunk", "logits"))
        assert bool(outcome.error) == (which in ("trunk", "logits"))


def two_models(rank: int, fails: bool) -> tuple[bool, bool]:
    a, b = (DistributedDataParallel(nn.Linear(3, 2).double()) for _ in range(2))
    optimizers = [sgd(a), sgd(b)]
    before = [dict(vars(o)) for o in optimizers]
    for _ in range(3):
        try:
            with Join([a, b, *optimizers]) as join:
                for step in join.batches(range([1, 2][rank])):
                    (a(batch(rank, step)) + b(batch(rank, step))).sum().backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    torch.save(a.module, io.BytesIO())
                    copy.deepcopy(b.module)
                if fails:
                    raise KeyError("no")
        except KeyError:
            pass
    left = [vars(o).keys() - was.keys() for o, was in zip(optimizers, before, strict=True)]
    return any("zero_grad" in names for names in left), any(o._optimizer_step_post_hooks for o in optimizers)


def test_nothing_stays_on_the_optimizers_of_several_models(workers: Workers) -> None:
    for fails in (False, True):
        assert workers.run(2, two_models, fails) == [(False, False)] * 2


def read_a_teacher(rank: int) -> list[Tensor]:
    ddp, teacher = (DistributedDataParallel(nn.Linear(3, 2).double()) for _ in range(2))
    with Join([ddp]) as join:
        for step in join.batches(range([1, 4][rank])):
            ddp.zero_grad()
            (ddp(batch(rank, step)) - teacher(batch(rank, step)).detach()).pow(2).mean().backward()
    return [p.grad for p in ddp.parameters() if p.grad is not None]


def test_a_model_that_is_only_read_need_not_be_given(workers: Workers) -> None:
    first, second = workers.run(2, read_a_teacher)
    assert len(first) == len(second) == 2
    assert difference(first, second) == 0


def clear_by_hand(rank: int) -> None:
    model = nn.Linear(1, 1, bias=False).double()
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    one = torch.ones(1, 1, dtype=torch.float64)
    optimizer.zero_grad()
    with Join([ddp, optimizer], timeout=timedelta(seconds=20)) as join:
        for step in join.batches(range([1, 2][rank])):
            model.weight.grad = None  # a window that is given up
            with ddp.no_sync() if step == 0 else nullcontext():
                if not (rank == 1 and step == 0):
                    ddp(one).sum().backward()


def test_one_call_of_an_optimizer_is_not_how_a_loop_clears(workers: Workers) -> None:
    for outcome in workers.outcomes(2, clear_by_hand, timeout=2.0):
        assert "not yet synced gradient" in outcome.error


def test_a_new_tensor_at_an_old_address_is_not_the_old_one() -> None:
    from torch_join._participants._gradients.evidence import CHANGED, CLEARED, Gradients

    parameter = nn.Parameter(torch.zeros(3))
    gradients = Gradients([parameter])
    for fill, verdict in ((0.0, CLEARED), (1.0, CHANGED)):
        parameter.grad = torch.ones(3)
        gradients.remember(accumulates=False)
        old = id(parameter.grad), parameter.grad._version
        parameter.grad = None
        kept = []
        for _ in range(1000):
            new = torch.full((3,), fill)
            if (id(new), new._version) == old:
                break
            kept.append(new)
        parameter.grad = new
        assert [state.verdict for state in gradients.states()] == [verdict]


def not_given(rank: int, how: str) -> None:
    torch.manual_seed(0)
    a, b = (DistributedDataParallel(nn.Linear(3, 2).double()) for _ in range(2))
    with Join([a]) as join:
        for step in join.batches(range([1, 4][rank])):
            if how == "together":
                (a(batch(rank, step)) + b(batch(rank, step))).sum().backward()
            elif how == "after":
                a(batch(rank, step)).sum().backward()
                b(batch(rank, step)).sum().backward()
            else:
                a(batch(rank, step)).sum().backward()
                if step >= 2:
                    b(batch(rank, step)).sum().backward()


@pytest.mark.parametrize("how", ["together", "after", "later"])
def test_a_model_that_was_not_given_is_named_at_once(workers: Workers, how: str) -> None:
    for outcome in workers.outcomes(2, not_given, how):
        assert "DistributedDataParallel model that was not passed to Join" in outcome.error
        assert outcome.seconds < 10


def post_local_sgd(rank: int, hook: bool) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    ddp = DistributedDataParallel(nn.Linear(3, 2).double())
    optimizer = PostLocalSGDOptimizer(sgd(ddp), PeriodicModelAverager(period=1))  # type: ignore[no-untyped-call]
    if hook:
        ddp.register_comm_hook(PostLocalSGDState(None, None, 2), post_localSGD_hook)  # type: ignore[no-untyped-call]
    with pytest.raises(JoinError, match="post-local SGD"):
        Join([ddp] if hook else [optimizer])


@pytest.mark.parametrize("hook", [False, True])
def test_post_local_sgd_is_refused(workers: Workers, hook: bool) -> None:
    workers.run(2, post_local_sgd, hook)
