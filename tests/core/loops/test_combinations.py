"""Programs that random combinations of features have found to be wrong, against one process in float64."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.support.cases import difference
from tests.support.workers import Workers
from torch_join import Join

Lengths = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Program:
    """Some epochs of a loop over windows of micro-batches, the last of which syncs."""

    lengths: Lengths
    window: int = 1
    weighting: str = "world"
    frozen: bool = False  # the first layer is, when the `with` begins
    layers: int = 1  # of which that, and what follows, is so
    thaws: tuple[int, int] | None = None  # the epoch and step at which it no longer is
    freezes: int | None = None  # the step at which it is
    masked: int | None = None  # the rank whose batches count nothing in the first epoch
    breaks: bool = False  # the first epoch ends with its first step
    doubled: bool = False  # each step has two forwards, each with a backward
    clears: bool = True  # before a window, or after it
    zero: bool = False  # ZeRO with bucket views
    momentum: float = 0.0
    one_context: bool = True
    sparse: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)

    def epochs(self, rank: int) -> Iterator[list[Tensor]]:
        for epoch, lengths in enumerate(self.lengths):
            yield [self.batch(rank, epoch, step) for step in range(lengths[rank])]

    def batch(self, rank: int, epoch: int, step: int) -> Tensor:
        if self.sparse:
            return torch.tensor([step % 5, (step + rank) % 5])
        generator = torch.Generator().manual_seed(100 * rank + 10 * epoch + step)
        size = 1 + 3 * rank if self.weighting == "samples" else 2
        return torch.randn(size, 2, generator=generator, dtype=torch.float64)

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        first = nn.Embedding(5, 3, sparse=True) if self.sparse else nn.Linear(2, 3)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(3, 1)).double()

    def before_step(self, model: nn.Sequential, epoch: int, step: int) -> None:
        if self.thaws == (epoch, step):
            model[: self.layers].requires_grad_(True)
        if self.freezes == step:
            model[0].requires_grad_(False)

    def losses(self, run: Callable[[Tensor], Tensor], x: Tensor, rank: int, epoch: int, step: int) -> Iterator[Tensor]:
        is_masked = self.masked == rank and epoch == 0 and (not self.sparse or step % 2 == 0)
        yield run(x).pow(2).mean() * (0.0 if is_masked else 1.0)
        if self.doubled:
            yield run(2 * x).pow(2).mean()


def train(rank: int, program: Program) -> list[Tensor]:
    model = program.model()
    ddp = DistributedDataParallel(model, **program.ddp)
    options = {"lr": 0.1, "momentum": program.momentum}
    optimizer: torch.optim.Optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, **options)
        if program.zero
        else torch.optim.SGD(model.parameters(), **options)
    )
    model[: program.layers].requires_grad_(not program.frozen)
    outer = Join([ddp, optimizer], weighting=program.weighting) if program.one_context else nullcontext()  # type: ignore[arg-type]
    with outer as whole:
        for epoch, batches in enumerate(program.epochs(rank)):
            inner = nullcontext(whole) if whole else Join([ddp, optimizer], weighting=program.weighting)  # type: ignore[arg-type]
            if program.thaws == (epoch, -1):
                model[0].requires_grad_(True)
            with inner as join:
                for step, x in enumerate(join.batches(batches)):
                    program.before_step(model, epoch, step)
                    begins, ends = step % program.window == 0, step % program.window == program.window - 1
                    if begins and program.clears:
                        optimizer.zero_grad()
                    for loss in program.losses(ddp, x, rank, epoch, step) if ends else ():
                        loss.backward()
                    if not ends:
                        with ddp.no_sync():
                            for loss in program.losses(ddp, x, rank, epoch, step):
                                loss.backward()
                    if ends:
                        optimizer.step()
                        if not program.clears:
                            optimizer.zero_grad()
                    if program.breaks and epoch == 0:
                        break
    return [p.detach() for p in model.parameters()]


def reference(program: Program) -> list[Tensor]:
    model = program.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=program.momentum)
    model[: program.layers].requires_grad_(not program.frozen)
    shards = [list(program.epochs(rank)) for rank in range(len(program.lengths[0]))]
    for epoch, lengths in enumerate(program.lengths):
        if program.thaws == (epoch, -1):
            model[0].requires_grad_(True)
        for step in range(1 if program.breaks and epoch == 0 else max(lengths)):
            program.before_step(model, epoch, step)
            if step % program.window == 0 and program.clears:
                optimizer.zero_grad()
            here = {rank: mine[epoch][step] for rank, mine in enumerate(shards) if step < lengths[rank]}
            total = {"world": len(lengths), "active": len(here), "samples": sum(map(len, here.values()))}
            for rank, x in here.items():
                share = (len(x) if program.weighting == "samples" else 1) / total[program.weighting]
                for loss in program.losses(model, x, rank, epoch, step):
                    (loss * share).backward()
            if step % program.window == program.window - 1:
                optimizer.step()
                if not program.clears:
                    optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


UNUSED = {"find_unused_parameters": True}
PROGRAMS = {
    "unfrozen in the tail": Program([(1, 4)], weighting="active", frozen=True, thaws=(0, 2), ddp=UNUSED),
    "unfrozen in the first step": Program([(1, 4)], frozen=True, thaws=(0, 0), ddp=UNUSED),
    "unfrozen, even": Program([(2, 2)] * 2, weighting="samples", frozen=True, thaws=(1, -1), ddp=UNUSED),
    "all unfrozen in the first step": Program([(1, 4)], weighting="samples", frozen=True, layers=3, thaws=(0, 0)),
    "all unfrozen, even": Program([(2, 2)] * 2, weighting="samples", frozen=True, layers=3, thaws=(0, 0)),
    "two backwards, views": Program(
        [(0, 2), (2, 2)], doubled=True, ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}
    ),
    "static graph": Program([(1, 3), (2, 2)], ddp={"static_graph": True}),
    "a window over two contexts": Program([(1, 1), (0, 2)], window=2, clears=False, one_context=False),
    "a window over two loops": Program([(1, 1), (0, 2)], window=2, clears=False),
    "windows over three contexts": Program([(2, 2), (1, 1), (0, 2)], window=2, clears=False, one_context=False),
    "break amid a window": Program([(1, 3), (2, 2)], window=2, clears=False, breaks=True),
    "break amid a masked window": Program([(1, 3, 3), (2, 2, 2)], window=2, clears=False, breaks=True, masked=1),
    "frozen, ZeRO": Program([(1, 4)], freezes=2, zero=True, momentum=0.9, ddp=UNUSED),
    "sparse, masked": Program([(0, 2), (2, 2)], window=2, masked=1, sparse=True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_what_one_process_computes(workers: Workers, name: str) -> None:
    program = PROGRAMS[name]
    for parameters in workers.run(len(program.lengths[0]), train, program):
        assert difference(parameters, reference(program)) < 1e-10


def scale_sparse(rank: int, lengths: Sequence[int]) -> list[Tensor]:
    program = Program([lengths], sparse=True)
    model = program.model()
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([ddp, optimizer]) as join:
        for step in join.batches(range(lengths[rank])):
            optimizer.zero_grad()
            ddp(program.batch(rank, 0, step)).pow(2).mean().backward()
            for p in model.parameters():
                p.grad.mul_(0.5)  # type: ignore[union-attr]
            optimizer.step()
    gradients = [p.grad for p in model.parameters()]
    return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]  # type: ignore[misc]


def test_a_sparse_gradient_that_was_changed_is_handed_over(workers: Workers) -> None:
    first, second = workers.run(2, scale_sparse, (1, 3))
    assert difference(first, second) == 0


def leave_and_evaluate(rank: int, lengths: Sequence[int]) -> list[bool]:
    program = Program([(3, 3)])
    model = program.model()
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with Join([ddp, optimizer], may_break=True) as join:
        for step in join.batches(range(3)):
            optimizer.zero_grad()
            ddp(program.batch(rank, 0, step)).pow(2).mean().backward()
            optimizer.step()
            if step + 1 == lengths[rank]:
                break
        ddp.eval()
        with torch.no_grad():
            for step in join.batches(range(2)):
                ddp(program.batch(rank, 1, step))
                seen.append(ddp.training or model[1].training)
    return seen


@pytest.mark.parametrize("lengths", [(2, 9), (9, 1)])  # the other comes to the end of its loop
def test_what_a_rank_sets_after_a_break_stays(workers: Workers, lengths: Sequence[int]) -> None:
    assert workers.run(2, leave_and_evaluate, lengths) == [[False, False]] * 2
