"""`torch.compile` around what was given: nothing of ours is traced, and the result is that of the model itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.support.small import batch
from tests.support.workers import Workers
from torch_join import Join

EPOCHS = ((1, 3), (2, 2), (3, 1))


def train(rank: int, compiled: str, loop: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()
    ddp = DistributedDataParallel(torch.compile(net, backend="eager") if compiled == "inner" else net)
    model: Any = torch.compile(ddp, backend="eager") if compiled == "wrapper" else ddp
    optimizer = SGD(ddp.parameters(), 0.1, momentum=0.9)
    step: Any = torch.compile(optimizer.step, backend="eager") if compiled == "step" else optimizer.step

    def whole(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        step()

    whole = torch.compile(whole, backend="eager") if compiled == "whole" else whole
    for epoch, lengths in enumerate(EPOCHS):
        with Join([ddp, optimizer], may_break=loop == "heartbeat") as join:
            batches = [batch(rank, 10 * epoch + step) for step in range(lengths[rank])]
            for x in batches if loop == "plain" else join.batches(batches):
                whole(x)
    return [tensor.detach() for tensor in (*net.parameters(), *net.buffers())]


@pytest.mark.parametrize("loop", ["plain", "heartbeat", "sized"])
def test_a_compiled_program_trains_as_the_program_does(workers: Workers, loop: str) -> None:
    expected = workers.run(2, train, "nothing", loop)[0]
    for compiled in ("wrapper", "inner", "step", "whole"):
        for found in workers.run(2, train, compiled, loop, deadline=180.0):
            assert all((a - b).abs().max() < 1e-10 for a, b in zip(found, expected, strict=True))


def train_compiled_once(rank: int) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.ReLU(), nn.GELU(), nn.Linear(3, 1)).double()
    ddp = DistributedDataParallel(net)
    optimizer = SGD(ddp.parameters(), 0.1)

    @torch.compile(backend="eager")
    def loss(x: Tensor) -> Tensor:
        return ddp(x).square().mean()  # type: ignore[no-any-return]

    for lengths, stance in (((3, 3), "default"), ((2, 4), "fail_on_recompile")):
        with torch.compiler.set_stance(stance), Join([ddp, optimizer]) as join:
            for x in join.batches([batch(rank, step) for step in range(lengths[rank])]):
                optimizer.zero_grad()
                loss(x).backward()
                optimizer.step()
    return sum(p.detach().sum().item() for p in net.parameters())


def test_a_tail_has_nothing_compiled_anew(workers: Workers) -> None:
    one, other = workers.run(2, train_compiled_once, deadline=120.0)
    assert one == other
