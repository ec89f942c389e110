"""A model is trained beside every collective of the table."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.core._collectives.forms import FORMS, supported
from tests.emulator import place
from tests.support.collectives import DTYPES, REDUCING, WITHOUT_TENSORS, Case, Results, check, operations
from torch_join import Join
from torch_join._collectives.neutral import REDUCTIONS

MODES = (contextlib.nullcontext, torch.no_grad, torch.inference_mode)


WORLDS = [(3, 1), (1, 3, 2), (0, 2, 2)]


# torch.compile takes seconds, and `test_neutral` has it.
PLAIN_FORMS = [name for name in FORMS if not name.startswith("compiled")]


@dataclass(frozen=True)
class Play:
    """A collective, or a form of some, on a group."""

    label: str
    ranks: tuple[int, ...]
    function: Callable[[Case], Results]
    options: dict[str, Any]
    default: bool = False
    mode: int = 0


def plays(world_size: int) -> Iterator[Play]:
    """All operations, reduce operations and dtypes; by turns groups, grad modes, and synchronous or not."""
    everyone = tuple(range(world_size))
    groups = [g for n in range(1, world_size + 1) for g in itertools.combinations(everyone, n)]
    turn = itertools.count()
    for name, function in operations().items():
        for reduction in [r.op for r in REDUCTIONS] if name in REDUCING else ["SUM"]:
            for dtype in [torch.float32] * 6 if name in WITHOUT_TENSORS else DTYPES:
                if supported(name, reduction, dtype):
                    n = next(turn)
                    ranks = everyone if n % 2 else groups[n // 2 % len(groups)]
                    options = {"dtype": dtype, "reduction": reduction, "async_op": n // 2 % 2 == 0}
                    yield Play(f"{name} {options} {ranks}", ranks, function, options, n % 2 == 1, n % 3)
    for name in PLAIN_FORMS:
        if name == "sparse" and place().type != "cpu":  # NCCL has none
            continue
        for ranks, default in ((everyone, True), (everyone, False), (groups[-2], False)):
            yield Play(f"AVG {name} {ranks}", ranks, FORMS[name][0], {}, default)


def train(rank: int, lengths: Sequence[int], collective: bool) -> tuple[int, list[Any]]:
    world_size = len(lengths)
    subsets = [g for n in range(1, world_size + 1) for g in itertools.combinations(range(world_size), n)]
    groups = {ranks: dist.new_group(list(ranks)) for ranks in subsets}
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    count = 0
    with Join([model, optimizer]) as join:
        for step in join.batches(list(range(lengths[rank]))):
            optimizer.zero_grad()
            loss = model(torch.arange(6, dtype=torch.float64).view(3, 2) + rank + step).pow(2).mean()
            if collective and len(join.active_ranks) < world_size:
                todo = list(plays(world_size))
                half = len(todo) // 2
                count += issue(todo[:half], rank, join.active_ranks, groups)
                loss.backward()
                count += issue(todo[half:], rank, join.active_ranks, groups)
            else:
                loss.backward()
            optimizer.step()
    return count, [t.tolist() for t in (*model.parameters(), *model.buffers())]


def issue(todo: Sequence[Play], rank: int, active: Sequence[int], groups: dict[tuple[int, ...], Any]) -> int:
    """Issue those of the groups that this rank is in, and return how many."""
    mine = [play for play in todo if rank in play.ranks]
    for play in mine:
        ranks = [r for r in play.ranks if r in active]
        case = Case(rank, list(play.ranks), ranks, None if play.default else groups[play.ranks], **play.options)
        with MODES[play.mode]():
            results = play.function(case)
        check(play.label, results)
    return len(mine)
