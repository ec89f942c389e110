"""Models that are frozen and trained in turn, by `requires_grad_`: joined ranks, whose code does not run, follow."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.covering import others_long
from tests.support.cases import difference
from tests.support.inside import planned_rows
from tests.support.workers import Workers
from torch_join import Join

Models = Sequence[Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Program:
    """Epochs of a loop over two adversaries, of which one or the other trains in a window of steps."""

    lengths: Sequence[Sequence[int]]
    weighting: str = "world"
    rebalance: bool = False
    kind: str = "turns"  # or "halves" of both in turn, "between" two forwards, "decay" of what forward had frozen
    window: int = 1  # steps, of which the last one syncs
    norm: bool = False  # buffers, which each forward broadcasts
    talks: bool = False  # another collective comes in backward
    loop: str = "batches"  # or "plain"
    ddp: dict[str, Any] = field(default_factory=dict)

    def batch(self, rank: int, epoch: int, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * epoch + 50 * rank + index)
        return torch.randn(1 + (3 * rank + index) % 4, 3, generator=generator, dtype=torch.float64)

    def rows(self, epoch: int) -> list[dict[int, tuple[int, int]]]:
        """By step and rank that trains: whose batch, and which of its."""
        lengths = self.lengths[epoch]
        if self.rebalance:
            return planned_rows(lengths)
        return [{r: (r, step) for r, n in enumerate(lengths) if step < n} for step in range(max(lengths))]

    def modules(self) -> list[nn.Sequential]:
        torch.manual_seed(0)
        norms = [[nn.BatchNorm1d(4).eval()] if self.norm else [] for _ in range(2)]
        return [nn.Sequential(nn.Linear(3, 4), *norm, nn.Tanh(), nn.Linear(4, 3)).double() for norm in norms]

    def before_step(self, modules: Sequence[nn.Sequential], step: int) -> None:
        odd = step // self.window % 2 == 1
        for module, trains in zip(modules, (not odd, odd), strict=True):
            module.requires_grad_(trains)
            if self.kind == "halves":
                module.requires_grad_(True)[0 if trains else -1].requires_grad_(False)

    def loss(self, models: Models, modules: Sequence[nn.Sequential], x: Tensor) -> Tensor:
        made = models[0](x)
        if self.kind == "between":
            modules[1].requires_grad_(True)
            loss = (models[1](x) - 1).pow(2).mean()
            modules[1].requires_grad_(False)
            loss = loss + models[1](made).pow(2).mean()
            modules[1].requires_grad_(True)
            return loss
        loss = (models[1](torch.tanh(made)) - 1).pow(2).mean()
        if self.kind == "decay":
            modules[1].requires_grad_(True)
            loss = loss + sum(p.pow(2).sum() for p in modules[1].parameters())
        return loss


class Talk(torch.autograd.Function):
    """The identity, in whose backward there is a collective."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1))
        return gradient


def optimizers(modules: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1) for module in modules]


def state(modules: Sequence[nn.Module]) -> tuple[list[Tensor], list[bool]]:
    every = [p for module in modules for p in module.parameters()]
    return [p.detach() for p in every], [p.requires_grad for p in every]


def train(rank: int, program: Program) -> tuple[list[Tensor], list[bool]]:
    modules = program.modules()
    models = [DistributedDataParallel(module, **program.ddp) for module in modules]
    steppers = optimizers(modules)
    modules[1].requires_grad_(False)
    options = {"backward_collectives": True} if program.talks else {}
    given: list[Any] = [*models, *steppers]
    with Join(given, rebalance=program.rebalance, weighting=program.weighting, **options) as join:  # type: ignore[arg-type]
        for epoch, lengths in enumerate(program.lengths):
            mine = [program.batch(rank, epoch, index) for index in range(lengths[rank])]
            for step, x in enumerate(mine if program.loop == "plain" else join.batches(mine)):
                program.before_step(modules, step)
                ends = (step + 1) % program.window == 0
                with ExitStack() as stack:
                    for model in models if not ends else ():
                        stack.enter_context(model.no_sync())
                    loss = program.loss(models, modules, x)
                    (Talk.apply(loss) if program.talks else loss).backward()  # type: ignore[no-untyped-call]
                for stepper in steppers if ends else ():
                    stepper.step()
                    stepper.zero_grad()
    return state(modules)


def reference(program: Program) -> tuple[list[Tensor], list[bool]]:
    modules = program.modules()
    steppers = optimizers(modules)
    modules[1].requires_grad_(False)
    for epoch, lengths in enumerate(program.lengths):
        for step, row in enumerate(program.rows(epoch)):
            here = [program.batch(owner, epoch, index) for owner, index in row.values()]
            total = {"world": len(lengths), "active": len(here), "samples": sum(map(len, here))}[program.weighting]
            for x in here:
                program.before_step(modules, step)
                share = (len(x) if program.weighting == "samples" else 1) / total
                (program.loss(modules, modules, x) * share).backward()
            for stepper in steppers if (step + 1) % program.window == 0 else ():
                stepper.step()
                stepper.zero_grad()
    return state(modules)


UNUSED = {"find_unused_parameters": True}
# Rank 0 is the first to join; it is the one without a batch; it stays to the end.
LENGTHS = [(1, 6, 3), (2, 5, 3)], [(0, 5), (1, 4)], [(5, 1, 0), (4, 2, 0)]
KINDS: dict[str, dict[str, Any]] = {
    "turns": {},
    "turns, buffers": {"norm": True},
    "turns, unused": {"ddp": UNUSED},
    "turns, small buckets": {"ddp": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}},
    "turns, windows": {"window": 2},
    "turns, pieces": {"talks": True},
    "turns, pieces, unused": {"talks": True, "ddp": UNUSED},
    "halves": {"kind": "halves", "ddp": UNUSED},
    "halves, pieces": {"kind": "halves", "talks": True, "ddp": UNUSED},
    "between": {"kind": "between"},
    "between, pieces": {"kind": "between", "talks": True},
    "decay": {"kind": "decay"},
    "decay, pieces": {"kind": "decay", "talks": True},
    "turns, windows, pieces": {"window": 2, "talks": True},
}


def crossed() -> Iterator[tuple[str, Program]]:
    weightings = ("world", "active", "samples")
    for i, (name, options) in enumerate(KINDS.items()):
        for j, weighting in enumerate(weightings):
            for rebalance in (False, True):
                lengths = LENGTHS[(i + j) % 3] if name != "turns" else LENGTHS[j]
                title = f"{name}, {weighting}{', rebalanced' if rebalance else ''}"
                yield title, Program(lengths, weighting, rebalance, **options)
    yield "turns, windows, another leader", Program([(1, 4), (4, 0), (0, 3)], window=2)
    for lengths in LENGTHS:
        yield f"turns, plain for, {lengths[0]}", Program(lengths[:1], loop="plain")


PROGRAMS = dict(crossed())
# Each kind with each weighting, rebalanced or not in turn.
PAIRS = [name for place, name in enumerate(PROGRAMS) if place % 4 in (0, 3) or place >= 6 * len(KINDS)]


@pytest.mark.parametrize("name", others_long(PROGRAMS, *PAIRS))
def test_it_is_what_one_process_computes(workers: Workers, name: str) -> None:
    program = PROGRAMS[name]
    parameters, trained = reference(program)
    for theirs, flags in workers.run(len(program.lengths[0]), train, program):
        assert difference(theirs, parameters) < 1e-10
        assert flags == trained
