"""A rank that joins amid an accumulation, when nobody has looked yet at which gradients others have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.emulator import place
from tests.support.front_ends.plain import Loop, assert_exact, train
from tests.support.run import Batch, reference
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


@dataclass(frozen=True)
class Choosing(Loop):
    """A loop over batches, each of which takes an expert."""

    optimizer: str = "sgd"
    accumulate: int = 2
    one_context: bool = True
    ddp: dict[str, Any] = field(default_factory=lambda: {"find_unused_parameters": True, "broadcast_buffers": False})
    choices: Sequence[Sequence[list[int]]] = ()  # by epoch and rank

    def batch(self, rank: int, epoch: int, index: int) -> Any:
        return batches(self.choices[epoch][rank], rank)[index][::-1]

    def build(self) -> Experts:
        return Experts()

    def losses(self, model: Any, batch: Any, rank: int, *_: Any) -> Iterator[Tensor]:
        yield model(batch[::-1]).pow(2).mean() * float(rank != self.masked)


def check(workers: Workers, *choices: Sequence[list[int]], **options: Any) -> None:
    """Train on the experts of each epoch."""
    lengths = tuple(tuple(map(len, shards)) for shards in choices)
    run = Choosing(lengths, len(lengths), choices=choices, **options)
    assert_exact(workers.run(run.world_size, train, run), reference(run))


@pytest.mark.covering(2)
@pytest.mark.parametrize("clear_first", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("loop", ["sized", "plain", "heartbeat"])
@pytest.mark.parametrize("choices", [SAME, OTHER, FIRST, ALONE], ids=["same", "other", "first", "alone"])
def test_a_joined_ranks_share_of_a_window_counts(
    workers: Workers, choices: tuple[list[int], ...], loop: str, set_to_none: bool, clear_first: bool
) -> None:
    clear = ("before" if clear_first else "after") + ("" if set_to_none else ", zeros")
    check(workers, choices, loop=loop, clear=clear)


@pytest.mark.covering(2)
@pytest.mark.parametrize("loop", ["sized", "heartbeat"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("third", [[0], [0, 1, 1]], ids=["uneven", "even"])
def test_a_window_may_go_on_in_the_next_loop(
    workers: Workers, third: list[int], order: tuple[int, ...], loop: str
) -> None:
    # The second loop begins with a tail, when only rank 1 of these has a share of expert 0.
    first, second = ([0, 1, 1], [0, 1, 0], third), ([1], [], [])
    loops = [tuple(shards[rank] for rank in order) for shards in (first, second)]
    check(workers, *loops, loop=loop, clear="after", rest="goes on")


class Halves(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 2))
        self.double()


@dataclass(frozen=True)
class InHalves(Loop):
    """One half of the model is stepped after each window of batches, the other one after every second."""

    epochs: int = 1
    optimizer: str = "sgd+sgd"

    def build(self) -> Halves:
        return Halves()

    def optimizers(self, net: Any, sharded: bool = False) -> list[torch.optim.Optimizer]:
        return [self.make_optimizer(part.parameters(), "sgd") for part in net.children()]

    def losses(self, model: Any, batch: Batch, *_: Any) -> Iterator[Tensor]:
        yield model(batch[0][:, :3]).pow(2).mean()

    def in_turn(self, optimizers: list[Any], step: int) -> list[Any]:
        return [each for n, each in enumerate(optimizers, 1) if (step + 1) % (n * self.accumulate) == 0]

    def in_turn_to_clear(self, optimizers: list[Any], step: int) -> list[Any]:
        return [each for n, each in enumerate(optimizers, 1) if step % (n * self.accumulate) == 0]


@pytest.mark.covering(2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("loop", ["sized", "plain", "heartbeat"])
@pytest.mark.parametrize(("lengths", "window"), [((4, 1), 1), ((3, 6), 1), ((0, 3), 1), ((12, 6), 2), ((8, 10), 2)])
def test_half_of_a_model_may_keep_its_gradients(
    workers: Workers, lengths: tuple[int, ...], window: int, loop: str, set_to_none: bool
) -> None:
    run = InHalves(lengths, accumulate=window, loop=loop, clear="before" if set_to_none else "before, zeros")
    assert_exact(workers.run(2, train, run), reference(run))


@pytest.mark.covering(1)
@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("loop", ["sized", "plain", "heartbeat"])
def test_a_joined_ranks_zeros_are_kept(workers: Workers, loop: str, own: int) -> None:
    # Only rank 1 uses the expert `own`, with a loss of zero, and joins: zeros are stepped, none is not.
    check(workers, ([1 - own] * 2, [own]), masked=1, loop=loop)


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
