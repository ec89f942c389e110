"""A rank that joins amid an accumulation, when nobody has looked yet at which gradients others have."""

from collections.abc import Iterable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.emulator import place
from tests.support.cases import difference
from tests.support.workers import Workers
from torch_join import Join

# The number of the expert that each batch takes, by rank: both ranks accumulate two batches.
SAME = ([0, 1, 0, 1], [0, 1, 0])
OTHER = ([0, 1, 1, 1], [0, 1, 0])  # only the rank that joins has used expert 0 in the second window
ALONE = ([0, 1, 1, 0], [])
FIRST = OTHER[::-1]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))
        self.double()

    def forward(self, batch: tuple[int, Tensor]) -> Tensor:
        expert, x = batch
        out: Tensor = self.experts[expert](x)
        return out


def batches(choices: list[int], rank: int) -> list[tuple[int, Tensor]]:
    torch.manual_seed(rank)
    return [(expert, torch.randn(4, 3, dtype=torch.float64)) for expert in choices]


def train(rank: int, choices: tuple[list[int], ...], loop: str, set_to_none: bool, clear_first: bool) -> list[Tensor]:
    ddp = DistributedDataParallel(Experts(), find_unused_parameters=True, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    loader: Iterable[tuple[int, Tensor]] = batches(choices[rank], rank)
    with Join([ddp, optimizer], weighting="world", may_break=loop == "heartbeat") as join:
        for step, batch in enumerate(loader if loop == "plain" else join.batches(loader)):
            if clear_first and step % 2 == 0:
                optimizer.zero_grad(set_to_none)
            with ddp.no_sync() if step % 2 == 0 else nullcontext():
                ddp(batch).pow(2).mean().backward()
            if step % 2:
                optimizer.step()
                if not clear_first:
                    optimizer.zero_grad(set_to_none)
    return [p.detach() for p in ddp.parameters()]


def reference(choices: tuple[list[int], ...]) -> list[Tensor]:
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shards = [batches(its, rank) for rank, its in enumerate(choices)]
    for begin in range(0, max(map(len, shards)), 2):
        optimizer.zero_grad()
        for shard in shards:
            for batch in shard[begin : begin + 2]:
                (model(batch).pow(2).mean() / len(shards)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.covering(2)
@pytest.mark.parametrize("clear_first", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("loop", ["sized", "plain", "heartbeat"])
@pytest.mark.parametrize("choices", [SAME, OTHER, FIRST, ALONE], ids=["same", "other", "first", "alone"])
def test_a_joined_ranks_share_of_a_window_counts(
    workers: Workers, choices: tuple[list[int], ...], loop: str, set_to_none: bool, clear_first: bool
) -> None:
    expected = reference(choices)
    for parameters in workers.run(2, train, choices, loop, set_to_none, clear_first):
        assert difference(parameters, expected) < 1e-10


def train_over_two_loops(rank: int, loops: tuple[tuple[list[int], ...], ...], loop: str) -> list[Tensor]:
    ddp = DistributedDataParallel(Experts(), find_unused_parameters=True, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    step = 0
    with Join([ddp, optimizer], weighting="world", may_break=loop == "heartbeat") as join:
        for choices in loops:
            for number, batch in enumerate(join.batches(batches(choices[rank], rank)), step):
                with ddp.no_sync() if number % 2 == 0 else nullcontext():
                    ddp(batch).pow(2).mean().backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            step += max(map(len, choices))
    return [p.detach() for p in ddp.parameters()]


@pytest.mark.covering(2)
@pytest.mark.parametrize("loop", ["sized", "heartbeat"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("third", [[0], [0, 1, 1]], ids=["uneven", "even"])
def test_a_window_may_go_on_in_the_next_loop(
    workers: Workers, third: list[int], order: tuple[int, ...], loop: str
) -> None:
    # The second loop begins with a tail, when only rank 1 of these has a share of expert 0.
    first, second = ([0, 1, 1], [0, 1, 0], third), ([1], [], [])
    loops = tuple(tuple(shards[rank] for rank in order) for shards in (first, second))
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    for choices in loops:
        shards = [batches(its, rank) for rank, its in enumerate(choices)]
        for number in range(max(map(len, shards))):
            for shard in shards:
                if number < len(shard):
                    (model(shard[number]).pow(2).mean() / 3).backward()
            if (step + number) % 2:
                optimizer.step()
                optimizer.zero_grad()
        step += max(map(len, shards))
    for parameters in workers.run(3, train_over_two_loops, loops, loop):
        assert difference(parameters, list(model.parameters())) < 1e-10


def train_in_halves(rank: int, lengths: tuple[int, ...], window: int, loop: str, set_to_none: bool) -> list[Tensor]:
    ddp = DistributedDataParallel(Halves())
    optimizers = optimizers_of(ddp.module)
    loader = batches([0] * lengths[rank], rank)
    with Join([ddp, *optimizers], weighting="world", may_break=loop == "heartbeat") as join:
        for step, (_, x) in enumerate(loader if loop == "plain" else join.batches(loader)):
            clear_halves(step, window, optimizers, set_to_none)
            with nullcontext() if (step + 1) % window == 0 else ddp.no_sync():
                ddp(x).pow(2).mean().backward()
            step_halves(step, window, optimizers)
    return [p.detach() for p in ddp.parameters()]


class Halves(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 2))
        self.double()


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in model.children()]


# One half of the model is stepped after each window of batches, the other one after every second.


def clear_halves(step: int, window: int, optimizers: list[torch.optim.Optimizer], set_to_none: bool) -> None:
    for number, optimizer in enumerate(optimizers, 1):
        if step % (number * window) == 0:
            optimizer.zero_grad(set_to_none)


def step_halves(step: int, window: int, optimizers: list[torch.optim.Optimizer]) -> None:
    for number, optimizer in enumerate(optimizers, 1):
        if (step + 1) % (number * window) == 0:
            optimizer.step()


@pytest.mark.covering(2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("loop", ["sized", "plain", "heartbeat"])
@pytest.mark.parametrize(("lengths", "window"), [((4, 1), 1), ((3, 6), 1), ((0, 3), 1), ((12, 6), 2), ((8, 10), 2)])
def test_half_of_a_model_may_keep_its_gradients(
    workers: Workers, lengths: tuple[int, ...], window: int, loop: str, set_to_none: bool
) -> None:
    model = Halves()
    optimizers = optimizers_of(model)
    shards = [batches([0] * length, rank) for rank, length in enumerate(lengths)]
    for step in range(max(lengths)):
        clear_halves(step, window, optimizers, set_to_none)
        for shard in shards:
            if step < len(shard):
                (model(shard[step][1]).pow(2).mean() / len(lengths)).backward()
        step_halves(step, window, optimizers)
    for parameters in workers.run(2, train_in_halves, lengths, window, loop, set_to_none):
        assert difference(parameters, list(model.parameters())) < 1e-10


def mask(rank: int, loop: str, own: int) -> list[Tensor]:
    """Only rank 1 uses the expert `own`, with a loss of zero, and joins: zeros are stepped, none is not."""
    ddp = DistributedDataParallel(Experts(), find_unused_parameters=True, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, weight_decay=0.5)
    with Join([ddp, optimizer], may_break=loop == "heartbeat") as join:
        loader = batches([1 - own] * 2 if rank == 0 else [own], rank)
        for step, batch in enumerate(loader if loop == "plain" else join.batches(loader)):
            with ddp.no_sync() if step == 0 else nullcontext():
                (ddp(batch).pow(2).mean() * (1 - rank)).backward()
            if step == 1:
                optimizer.step()
    return [p.detach() for p in ddp.parameters()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("loop", ["sized", "plain", "heartbeat"])
def test_a_joined_ranks_zeros_are_kept(workers: Workers, loop: str, own: int) -> None:
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    for batch in batches([1 - own] * 2, 0):
        (model(batch).pow(2).mean() / 2).backward()
    (model(batches([own], 1)[0]).pow(2).mean() * 0.0).backward()
    optimizer.step()
    for parameters in workers.run(2, mask, loop, own):
        assert difference(parameters, list(model.parameters())) < 1e-10


def overflow(rank: int) -> Tensor:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 2).double())
    optimizer, scaler = torch.optim.SGD(ddp.parameters(), lr=0.1), torch.amp.GradScaler(place().type, init_scale=8.0)
    with Join([ddp, optimizer, scaler]) as join:
        for _ in join.batches(range(1 + rank)):
            optimizer.zero_grad()
            out = ddp(torch.ones(1, 3, dtype=torch.float64))[0]
            scaler.scale(out[0] + float("inf") * out[1]).backward()
            scaler.step(optimizer)
            scaler.update()
    assert ddp.module.weight.grad is not None
    return ddp.module.weight.grad


def test_gradients_that_are_not_finite_are_alike_after_a_tail(workers: Workers) -> None:
    # The scaler has divided them on rank 1 alone: by 4, after the first step has overflowed too.
    for gradient in workers.run(2, overflow):
        assert gradient.tolist() == [[0.5] * 3, [float("inf")] * 3]
