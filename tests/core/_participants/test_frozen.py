"""Models that are frozen and trained in turn, by `requires_grad_`: joined ranks, whose code does not run, follow."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.covering import others_long
from tests.support.front_ends.plain import Loop, assert_exact, train
from tests.support.run import Batch, reference
from tests.support.workers import Workers


@dataclass(frozen=True)
class Turns(Loop):
    """A loop over two adversaries, of which one or the other trains in a window of steps."""

    kind: str = "turns"  # or "halves" of both in turn, "between" two forwards, "decay" of what forward had frozen
    ragged: bool = True
    clear: str = "after"
    one_context: bool = True
    talks: bool = False  # another collective comes in backward

    def build(self) -> nn.ModuleList:
        torch.manual_seed(0)
        norms = [[nn.BatchNorm1d(5).eval()] if self.model == "norm" else [] for _ in range(2)]
        return nn.ModuleList(
            nn.Sequential(nn.Linear(4, 5), *norm, nn.Tanh(), nn.Linear(5, 4)) for norm in norms
        ).double()

    def optimizers(self, net: Any, sharded: bool = False) -> list[torch.optim.Optimizer]:
        return [self.make_optimizer(module.parameters()) for module in net]

    def wrap(self, net: Any) -> tuple[list[nn.Module], Any]:
        models = [DistributedDataParallel(module, **self.ddp) for module in net]
        net[1].requires_grad_(False)
        return [*models], models

    def set_turn(self, models: Any, step: int) -> None:
        odd = step // self.accumulate % 2 == 1
        for model, trains in zip(models, (not odd, odd), strict=True):
            model.requires_grad_(trains)
            if self.kind == "halves":
                layers = [*getattr(model, "module", model).requires_grad_(True)]
                layers[0 if trains else -1].requires_grad_(False)

    def losses(self, model: Any, batch: Batch, rank: int, epoch: int, step: int) -> Iterator[Tensor]:
        self.set_turn(model, step)
        for loss in self.loss_of(model, batch[0]):
            yield Talk.apply(loss) if self.talks and dist.is_initialized() else loss

    def loss_of(self, models: Any, x: Tensor) -> Iterator[Tensor]:
        made = models[0](x)
        if self.kind == "between":
            models[1].requires_grad_(True)
            loss = (models[1](x) - 1).pow(2).mean()
            models[1].requires_grad_(False)
            loss = loss + models[1](made).pow(2).mean()
            models[1].requires_grad_(True)
        else:
            loss = (models[1](torch.tanh(made)) - 1).pow(2).mean()
        if self.kind == "decay":
            models[1].requires_grad_(True)
            loss = loss + sum(p.pow(2).sum() for p in models[1].parameters())
        yield loss


class Talk(torch.autograd.Function):
    """The identity, in whose backward there is a collective."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1))
        return gradient


UNUSED = {"find_unused_parameters": True}
# Rank 0 is the first to join; it is the one without a batch; it stays to the end.
LENGTHS = [(1, 6, 3), (2, 5, 3)], [(0, 5), (1, 4)], [(5, 1, 0), (4, 2, 0)]
KINDS: dict[str, dict[str, Any]] = {
    "turns": {},
    "turns, buffers": {"model": "norm"},
    "turns, unused": {"ddp": UNUSED},
    "turns, small buckets": {"ddp": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}},
    "turns, windows": {"accumulate": 2},
    "turns, pieces": {"talks": True},
    "turns, pieces, unused": {"talks": True, "ddp": UNUSED},
    "halves": {"kind": "halves", "ddp": UNUSED},
    "halves, pieces": {"kind": "halves", "talks": True, "ddp": UNUSED},
    "between": {"kind": "between"},
    "between, pieces": {"kind": "between", "talks": True},
    "decay": {"kind": "decay"},
    "decay, pieces": {"kind": "decay", "talks": True},
    "turns, windows, pieces": {"accumulate": 2, "talks": True},
}


def crossed() -> Iterator[tuple[str, Turns]]:
    weightings = ("world", "active", "samples")
    for i, (name, options) in enumerate(KINDS.items()):
        for j, weighting in enumerate(weightings):
            for rebalance in (False, True):
                lengths = LENGTHS[(i + j) % 3] if name != "turns" else LENGTHS[j]
                title = f"{name}, {weighting}{', rebalanced' if rebalance else ''}"
                yield title, Turns(lengths, 2, weighting=weighting, rebalance=rebalance, **options)
    yield "turns, windows, another leader", Turns([(1, 4), (4, 0), (0, 3)], accumulate=2)
    for lengths in LENGTHS:
        yield f"turns, plain for, {lengths[0]}", Turns(lengths[:1], 1, loop="plain")


PROGRAMS = dict(crossed())
# Each kind with each weighting, rebalanced or not in turn.
PAIRS = [name for place, name in enumerate(PROGRAMS) if place % 4 in (0, 3) or place >= 6 * len(KINDS)]


@pytest.mark.parametrize("name", others_long(PROGRAMS, *PAIRS))
def test_it_is_what_one_process_computes(workers: Workers, name: str) -> None:
    program = PROGRAMS[name]
    expected = reference(program)
    outcomes = workers.run(program.world_size, train, program)
    assert_exact(outcomes, expected)
    assert all(each.flags == [p.requires_grad for p in expected.net.parameters()] for each in outcomes)
