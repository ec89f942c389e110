"""Measure what `torch_join.Join` costs in a plain loop, against plain DDP and torch's Join.

    python -m benchmarks.join_overhead [--seconds 200] [--world-size 2] [--only TEXT] [--json PATH] [--quick]

As in `step_overhead`, only ratios count, each of two measurements that follow one another within a second
in the same processes and take turns in who goes first; all cases take turns too. Pairs during which other
programs took processor time are left out (on Linux, where one can know).
"""

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks._launch import main
from benchmarks._paired import Case
from benchmarks.step_overhead import WARM_UP, Batches, Workload
from torch_join import Join

EVEN_TARGET = 1.01  # times plain DDP, at 15 ms
JOIN_TARGET = 1.00  # times torch's Join
Loader = Iterable[Any]


@dataclass(frozen=True)
class Way:
    """A way to train: the context, and what the loop goes over in it."""

    name: str
    context: Callable[[DistributedDataParallel, torch.optim.Optimizer], AbstractContextManager[Any]]
    loop: Callable[[Any, Loader], Loader] = lambda _, loader: loader


DDP = Way("plain DDP", lambda ddp, optimizer: nullcontext())
TORCH = Way("torch's Join", lambda ddp, optimizer: TorchJoin([ddp]))
SIZED = Way("join.batches", lambda ddp, optimizer: Join([ddp, optimizer]), lambda join, loader: join.batches(loader))
BEATS = Way(
    "may_break=True",
    lambda ddp, optimizer: Join([ddp, optimizer], may_break=True),
    lambda join, loader: join.batches(loader),
)
PLAIN = Way("plain for", lambda ddp, optimizer: Join([ddp, optimizer]))


def run(way: Way, workload: Workload, length: int) -> tuple[list[float], float]:
    """Train one epoch; return this rank's step durations, from one step's begin to the next, and the whole, in ms."""
    ddp = DistributedDataParallel(workload.network)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-4)
    loader: Loader = DataLoader(Batches(workload.batch, length), batch_size=None)
    starts = []
    dist.barrier()
    begin = time.perf_counter()
    with way.context(ddp, optimizer) as join:
        for images, labels in way.loop(join, loader):
            starts.append(time.perf_counter())
            optimizer.zero_grad()
            cross_entropy(ddp(images), labels).backward()
            optimizer.step()
    end = time.perf_counter()
    return [1000 * (after - before) for before, after in pairwise(starts)], 1000 * (end - begin)


def is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def even_step(way: Way, workload: Workload) -> float:
    """Return what a step takes where all ranks have as many batches."""
    durations, _ = run(way, workload, WARM_UP + workload.steps + 1)
    return statistics.median(durations[WARM_UP:])


def tail_step(way: Way, workload: Workload) -> float:
    """Return what a step of rank 0 takes after the last rank has joined."""
    tail_begins = 2 * WARM_UP
    durations, _ = run(way, workload, WARM_UP if is_last_rank() else tail_begins + workload.steps + 1)
    return statistics.median(durations[tail_begins:]) if durations[tail_begins:] else 0.0


def uneven_epoch(way: Way, workload: Workload) -> float:
    """Return what an epoch takes, by the longest rank's steps, in which the last rank has half of the batches."""
    length = 2 * workload.steps
    _, total = run(way, workload, length // 2 if is_last_rank() else length)
    return total / length


def pair(
    measure: Callable[[Way, Workload], float], workload: Workload, reference: Way, compared: Way, swap: bool
) -> tuple[float, float]:
    durations = {}
    for way in (compared, reference) if swap else (reference, compared):
        durations[way.name] = measure(way, workload)
    return durations[reference.name], durations[compared.name]


def cases_in_pairs(workload: Workload, settings: Iterable[tuple[Any, ...]]) -> list[Case]:
    """Return a case for each setting: a name, what to measure, a way as reference, another one, and a target."""
    return [
        Case(
            f"{name}, {workload.milliseconds} ms: {compared.name} / {reference.name}",
            partial(pair, measure, workload, reference, compared),
            target,
        )
        for name, measure, reference, compared, target in settings
    ]


def cases_of(workload: Workload) -> list[Case]:
    settings = [
        ("even", even_step, DDP, TORCH, None),
        ("even", even_step, DDP, SIZED, EVEN_TARGET if workload.milliseconds == 15 else None),
        ("even", even_step, TORCH, BEATS, JOIN_TARGET),
        ("even", even_step, TORCH, PLAIN, JOIN_TARGET),
        ("tail", tail_step, TORCH, SIZED, JOIN_TARGET),
        ("tail", tail_step, TORCH, BEATS, JOIN_TARGET),
        ("tail", tail_step, TORCH, PLAIN, JOIN_TARGET),
        ("uneven epoch", uneven_epoch, TORCH, SIZED, None),
    ]
    return cases_in_pairs(workload, settings)


if __name__ == "__main__":
    main("benchmarks.join_overhead", __doc__, cases_of)
