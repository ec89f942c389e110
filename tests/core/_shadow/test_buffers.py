"""A model may register its buffers anew in its forward: ranks without a batch hold something of the same form."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.support.small import train_alone
from tests.support.workers import Workers
from torch_join import Join, JoinableModel, JoinableOptimizer

EPOCHS = ((1, 4), (5, 2), (0, 3))


class Rotary(nn.Module):
    """Keeps a cache that grows, changes its type, is dropped and made again; `late` comes before it from then on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 3).double()
        self.register_buffer("cache", torch.ones(1).double(), persistent=False)
        self.register_buffer("steps", torch.zeros(1).double())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[0]
        if length == 3:
            del self.cache
            self.register_buffer("late", torch.full((2,), 0.5).double())
        if length != len(getattr(self, "cache", ())):
            kind = torch.float32 if length == 2 else torch.float64
            self.register_buffer("cache", torch.arange(1, length + 1).to(kind) / 4, persistent=False)
        self.steps = None if length == 4 else torch.ones(length).double()
        return (self.body(x) * self.cache[:, None]).square().mean()  # type: ignore[no-any-return]


def inputs(epoch: int, rank: int, step: int) -> Tensor:
    """Return a batch as long as those of other ranks in this step."""
    return torch.randn(1 + step, 3, generator=torch.Generator().manual_seed(97 * epoch + 10 * rank + step)).double()


def alone() -> Tensor:
    net = Rotary()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.5)
    for epoch, lengths in enumerate(EPOCHS):
        train_alone(optimizer, lengths, lambda *place: net(inputs(epoch, *place)))  # noqa: B023
    return net.body.weight.detach()


def train(rank: int, loop: str, options: dict[str, Any]) -> Any:
    net = Rotary()
    ddp = DistributedDataParallel(net)
    optimizer = SGD(ddp.parameters(), 0.1, momentum=0.5)
    for epoch, lengths in enumerate(EPOCHS):
        batches: Any = [inputs(epoch, rank, step) for step in range(lengths[rank])]
        given = [JoinableModel(ddp), JoinableOptimizer(optimizer)]
        with TorchJoin(given) if loop == "torch's" else Join([ddp, optimizer], **options) as join:
            for x in join.batches(batches) if loop == "batches" else batches:  # type: ignore[attr-defined]
                optimizer.zero_grad()
                ddp(x).backward()
                optimizer.step()
    return (
        net.body.weight.detach(),
        {name: (b.tolist(), b.dtype) for name, b in net.named_buffers()},
        [*net.state_dict()],
    )


@pytest.mark.parametrize(
    ("loop", "options"), [("batches", {}), ("batches", {"may_break": True}), ("plain", {}), ("torch's", {})]
)
def test_a_buffer_may_change_its_form(workers: Workers, loop: str, options: dict[str, Any]) -> None:
    (first, buffers, names), (second, *others) = workers.run(2, train, loop, options)
    assert first.equal(second)
    assert (first - alone()).abs().max() < 1e-10
    assert (buffers, names) == tuple(others)
    assert buffers["cache"] == ([0.25, 0.5, 0.75], torch.float64)


class Tempered(nn.Linear):
    """Divides by what a step counts in a buffer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(3, 3)
        self.double().register_buffer("steps", torch.zeros(()).double())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean() / (1 + 0.2 * self.steps)  # type: ignore[operator]


COUNTED = ((2, 5, 4), (0, 3, 4), (3, 1, 2))


def count_before_forward(rank: int, loop: str) -> tuple[Tensor, Any]:
    net = Tempered()
    ddp = DistributedDataParallel(net)
    optimizer = SGD(ddp.parameters(), 0.1, momentum=0.5)
    given = [JoinableModel(ddp), JoinableOptimizer(optimizer)]
    for epoch, lengths in enumerate(COUNTED):
        batches: Any = [inputs(epoch, rank, step) for step in range(lengths[rank])]
        with TorchJoin(given) if loop == "torch's" else Join([ddp, optimizer]) as join:
            for x in join.batches(batches) if loop == "batches" else batches:  # type: ignore[attr-defined]
                net.steps += 1  # type: ignore[operator]
                optimizer.zero_grad()
                ddp(x).backward()
                optimizer.step()
    return net.weight.detach(), net.steps


@pytest.mark.parametrize("loop", ["batches", "plain", "torch's"])
def test_what_a_step_changes_before_its_forward_is_kept(workers: Workers, loop: str) -> None:
    net = Tempered()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.5)
    for epoch, lengths in enumerate(COUNTED):
        for step in range(max(lengths)):
            net.steps += 1  # type: ignore[operator]
            optimizer.zero_grad()
            for rank in (rank for rank, length in enumerate(lengths) if step < length):
                (net(inputs(epoch, rank, step)) / 3).backward()
            optimizer.step()
    for weight, steps in workers.run(3, count_before_forward, loop):
        assert steps == sum(map(max, COUNTED))
        assert (weight - net.weight).abs().max() < 1e-10


def make_modules(rank: int) -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 3)
            self.register_buffer("one", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 2:
                self.norm = nn.BatchNorm1d(3, affine=False)
            return self.body(x).sum()  # type: ignore[no-any-return]

    ddp = DistributedDataParallel(Adding())
    with Join([ddp], timeout=timedelta(seconds=10)) as join:
        for step in join.batches(range((1, 4)[rank])):
            ddp(torch.ones(1 + step, 3)).backward()


def test_a_module_that_a_rank_lacks_is_named_on_all(workers: Workers) -> None:
    joined, other = workers.outcomes(2, make_modules, timeout=2.0)
    for outcome in (joined, other):
        assert "registered the buffer 'norm.running_mean' in a module created in the loop" in outcome.error
