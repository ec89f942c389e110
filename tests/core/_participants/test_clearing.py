"""Which gradients of ranks that have joined still count: ten ways of clearing, in loops that accumulate or do not.

Each run is compared with one process in float64. Rank 0 joins first; in the second epoch all have the same length.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.covering import others_long
from tests.emulator import place
from tests.support.front_ends.plain import Loop, train
from tests.support.run import Batch, difference, reference
from tests.support.small import train_alone
from tests.support.workers import Workers
from torch_join import Join

LENGTHS = ((1, 5, 2), (2, 2, 2))
LOOPS = ["sized", "heartbeat", "plain"]

Clear = Callable[[Sequence[Tensor], torch.optim.Optimizer], None]


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def set_none(parameters: Sequence[Tensor], _: torch.optim.Optimizer) -> None:
    for parameter in parameters:
        parameter.grad = None


def zero_data(parameters: Sequence[Tensor], _: torch.optim.Optimizer) -> None:
    for gradient in gradients(parameters):
        gradient.data.zero_()


def fill_data(parameters: Sequence[Tensor], _: torch.optim.Optimizer) -> None:
    for gradient in gradients(parameters):
        gradient.data.fill_(0)


def multiply(parameters: Sequence[Tensor], _: torch.optim.Optimizer) -> None:
    for gradient in gradients(parameters):
        gradient.mul_(0)


def foreach(parameters: Sequence[Tensor], _: torch.optim.Optimizer) -> None:
    if found := gradients(parameters):
        torch._foreach_zero_(found)


def foreach_data(parameters: Sequence[Tensor], _: torch.optim.Optimizer) -> None:
    if found := [gradient.data for gradient in gradients(parameters)]:
        torch._foreach_zero_(found)


def numpy(parameters: Sequence[Tensor], _: torch.optim.Optimizer) -> None:
    for gradient in gradients(parameters):
        gradient.detach().numpy().fill(0)


def another_tensor(parameters: Sequence[Tensor], _: torch.optim.Optimizer) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


IDIOMS: dict[str, Clear] = {
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "zero_grad, zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "none": set_none,
    ".data.zero_": zero_data,
    ".data.fill_": fill_data,
    "mul_": multiply,
    "foreach": foreach,
    "foreach of .data": foreach_data,
    "numpy": numpy,
    "another tensor": another_tensor,
}


@dataclass(frozen=True)
class Pattern(Loop):
    """A loop whose gradients are cleared in one of the ways.

    On rank 1 the first micro-batch of each window is masked (a gradient of zero) or skipped.
    """

    lengths: Any = LENGTHS
    epochs: int = 2
    optimizer: str = "sgd"
    rest: str = "added"
    idiom: str = "none"
    masks: bool = False
    skips: bool = False
    amid: bool = False  # cleared after a window's first micro-batch, not before

    def build(self) -> nn.Module:
        return new_model()

    def batch(self, rank: int, epoch: int, index: int) -> Batch:
        return (batch(epoch, rank, index),)

    def zero(self, net: Any, optimizers: list[Any]) -> None:
        IDIOMS[self.idiom](list(net.parameters()), optimizers[0])

    def begins_window(self, epoch: int, step: int) -> bool:
        return step % self.accumulate == self.amid

    def losses(self, model: Any, batch: Batch, rank: int, epoch: int, step: int) -> Iterator[Tensor]:
        loss: Tensor = model(batch[0]).pow(2).mean()
        is_first = self.is_first(rank, step)
        if not (is_first and self.skips):
            yield loss * 0.0 if is_first and self.masks else loss

    def is_first(self, rank: int, step: int) -> bool:
        return rank == 1 and step % 2 == 0


VIEW = {"gradient_as_bucket_view": True}
PATTERNS = {
    "each": Pattern(),
    "each, views": Pattern(ddp=VIEW),
    "each, after": Pattern(clear="after"),
    "window": Pattern(accumulate=2),
    "window, views": Pattern(accumulate=2, ddp=VIEW),
    "window, after": Pattern(accumulate=2, clear="after"),
    "masked": Pattern(accumulate=2, masks=True),
    "masked, views": Pattern(accumulate=2, ddp=VIEW, masks=True),
    "skipped": Pattern(accumulate=2, skips=True),
    "skipped, after": Pattern(accumulate=2, skips=True, clear="after"),
}


def new_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batch(epoch: int, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * epoch + 100 * rank + step)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("turn", others_long(range(len(LOOPS)), 0))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_way_of_clearing_is_seen(workers: Workers, pattern: str, turn: int) -> None:
    # Where rank 1 cannot tell, rank 2 can.
    for found in workers.run(3, train_with_all, pattern, turn):
        for idiom, parameters in found.items():
            assert difference(parameters, reference(PATTERNS[pattern].but(idiom=idiom)).parameters) < 1e-10, idiom


@dataclass(frozen=True)
class Late(Pattern):
    """Masked, or skipped, in the first step only; on ranks, the second step of rank 2 is late."""

    def is_first(self, rank: int, step: int) -> bool:
        if dist.is_initialized() and (rank, step) == (2, 1):
            time.sleep(0.7)  # the leader is at the next backward by then, the one that averages, and has announced it
        return (rank, step) == (1, 0)


@pytest.mark.parametrize("clears_amid", [False, True])
@pytest.mark.parametrize("skips", ["masks", "skips"])
def test_a_rank_that_can_tell_may_be_late(workers: Workers, skips: str, clears_amid: bool) -> None:
    # Rank 1 leads from step 1 on and cannot tell there whether it has cleared; rank 2 can.
    run = Late(((1, 3, 3), (3, 3, 3)), accumulate=3, amid=clears_amid, **{skips: True})
    for outcome in workers.run(3, train, run):
        assert difference(outcome.parameters, reference(run).parameters) < 1e-10


def doubt_in_vain(rank: int, lengths: tuple[int, ...]) -> list[Tensor]:
    """A loop that ends amid an accumulation of which nobody can tell, and one without."""
    model = DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = [*model.parameters()]
    with Join([model, optimizer]) as join:
        for step, x in enumerate(join.batches([batch(0, rank, step) for step in range(lengths[rank])])):
            with model.no_sync():
                loss = model(x).pow(2).mean()
                if (rank, step) != (0, 0):
                    loss.backward()
        IDIOMS["none"](parameters, optimizer)
        for x in join.batches([batch(1, rank, step) for step in range(lengths[rank])]):
            model(x).pow(2).mean().backward()
            optimizer.step()
            IDIOMS["none"](parameters, optimizer)
    return [p.detach() for p in parameters]


def test_a_doubt_ends_with_its_tail(workers: Workers) -> None:
    lengths, model = (3, 1), new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = train_alone(optimizer, lengths, lambda *place: model(batch(1, *place)).pow(2).mean())
    for parameters in workers.run(2, doubt_in_vain, lengths):
        assert difference(parameters, expected) < 1e-10


def leave_one_out(rank: int, left_out: dict[int, int]) -> list[Tensor]:
    """Windows of four micro-batches, of which ranks leave out one."""
    model = DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model], timeout=timedelta(seconds=20)) as join:
        for step, x in enumerate(join.batches([batch(0, rank, step) for step in range((8, 1, 8)[rank])])):
            if step == left_out.get(rank):
                continue
            with nullcontext() if step % 4 == 3 else model.no_sync():
                model(x).pow(2).mean().backward()
            if step % 4 == 3:
                optimizer.step()
                IDIOMS["none"]([*model.parameters()], optimizer)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("step", [1, 2])
def test_micro_batches_left_out_in_the_tail_are_told(workers: Workers, step: int) -> None:
    # Rank 0 leads and cannot tell whether rank 1's gradient counts; what rank 2 says of it is found all the same.
    outcomes = workers.outcomes(3, leave_one_out, {0: 0, 2: step}, timeout=2.0, deadline=30.0)
    assert all("The active ranks ran different operations" in outcome.error for outcome in outcomes), outcomes
    assert all(outcome.seconds < 10.0 for outcome in outcomes), outcomes


# With two ranks nobody else can.
ALONE = ((1, 4), (2, 2))


@pytest.mark.covering(2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("idiom", ["zero_grad", "zero_grad, zeros"])
@pytest.mark.parametrize("pattern", ["masked", "skipped"])
def test_the_optimizers_zero_grad_tells_where_no_gradient_does(
    workers: Workers, pattern: str, idiom: str, loop: str
) -> None:
    run = PATTERNS[pattern].but(idiom=idiom, loop=loop, lengths=ALONE)
    for outcome in workers.run(2, train, run):
        assert difference(outcome.parameters, reference(run).parameters) < 1e-10


@pytest.mark.parametrize(
    ("pattern", "idiom", "loop"), [("masked", ".data.zero_", "sized"), ("skipped", "none", "plain")]
)
def test_where_nobody_can_tell_all_ranks_raise(workers: Workers, pattern: str, idiom: str, loop: str) -> None:
    # The one that is in the all-reduce hears of it when the process group's timeout ends that.
    outcomes = workers.outcomes(2, train, PATTERNS[pattern].but(idiom=idiom, loop=loop, lengths=ALONE), timeout=2.0)
    assert all("not yet synced gradient" in outcome.error for outcome in outcomes)


def train_with_all(rank: int, pattern: str, turn: int) -> dict[str, list[Tensor]]:
    """Train with each idiom, in loops that take turns: with all patterns, each idiom comes to be in each loop."""
    idioms = [idiom for idiom in IDIOMS if idiom != "numpy" or place().type == "cpu"]  # whose memory it shares
    loops = {idiom: LOOPS[(turn + number + [*PATTERNS].index(pattern)) % 3] for number, idiom in enumerate(idioms)}
    runs = {idiom: PATTERNS[pattern].but(idiom=idiom, loop=loop) for idiom, loop in loops.items()}
    return {idiom: train(rank, run).parameters for idiom, run in runs.items()}


def drop_by_model(rank: int, inner: bool) -> list[Tensor]:
    """Rank 0 drops, by a model's `zero_grad`, what the third window has come to; rank 1 has joined with its share."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 2).double())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with Join([ddp, optimizer]) as join:
        for x in join.batches([batch(0, rank, step) for step in range(8 - 3 * rank)]):
            begins = join.step % 2 == 0
            if join.step == 0:
                optimizer.zero_grad()  # of which no later step makes use
            elif begins or join.step == 5:
                (ddp.module if inner else ddp).zero_grad()
            if (rank, join.step) == (0, 4):
                continue
            with ddp.no_sync() if begins else nullcontext():
                ddp(x).pow(2).mean().backward()
            if not begins:
                optimizer.step()
    return [p.detach() for p in ddp.parameters()]


@pytest.mark.parametrize("inner", [False, True])
def test_a_models_zero_grad_counts_too(workers: Workers, inner: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        if step % 2 == 0 or step == 5:
            optimizer.zero_grad()
        for rank in range(2):
            if step < 8 - 3 * rank and (rank, step) != (0, 4):
                (model(batch(0, rank, step)).pow(2).mean() / 2).backward()
        if step % 2:
            optimizer.step()
    for parameters in workers.run(2, drop_by_model, inner):
        assert difference(parameters, [p.detach() for p in model.parameters()]) < 1e-10
