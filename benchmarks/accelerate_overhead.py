"""Measure what `accelerate_join` costs in an Accelerate script, against none and Accelerate's own method.

    python -m benchmarks.accelerate_overhead [--seconds 200] [--world-size 2] [--only TEXT] [--json PATH] [--quick]

As in `join_overhead`. Accelerate's method does nothing on CPUs; on GPUs it enters torch's Join with the model, which
is what is measured here in its place.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from accelerate_join import Accelerator
from benchmarks._launch import main
from benchmarks._paired import Case
from benchmarks.join_overhead import cases_in_pairs, is_last_rank
from benchmarks.step_overhead import WARM_UP, Batches, Workload

CERTAIN_TARGET = 1.01  # times a plain loop, at 15 ms
HEARTBEAT_TARGET = 1.04


@dataclass(frozen=True)
class Way:
    """A way to train: the context, and the loader's class."""

    name: str
    context: Callable[[Accelerator, Any], AbstractContextManager[Any]]


PLAIN = Way("plain loop", lambda accelerator, model: nullcontext())
TORCH = Way("Accelerate's", lambda accelerator, model: TorchJoin([model]))
OURS = Way("accelerate_join", lambda accelerator, model: accelerator.join_uneven_inputs(even_batches=False))
BEATS = Way(
    "accelerate_join, may_break",
    lambda accelerator, model: accelerator.join_uneven_inputs(even_batches=False, may_break=True),
)


def first(batches: list[Any]) -> Any:
    return batches[0]


def train(way: Way, workload: Workload, lengths: list[int]) -> list[float]:
    """Train one epoch; return this rank's step durations, from one step's begin to the next, in milliseconds."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.Adam(workload.network.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(workload.network, optimizer)
    # Each "sample" is a batch.
    if len({*lengths}) == 1:
        dataset = Batches(workload.batch, sum(lengths))
        loader = accelerator.prepare(DataLoader(dataset, batch_size=1, collate_fn=first))
    else:
        dataset = Batches(workload.batch, lengths[dist.get_rank()])
        loader = DataLoaderShard(dataset, device=accelerator.device, batch_size=1, collate_fn=first)
    starts = []
    dist.barrier()
    with way.context(accelerator, model):
        for images, labels in loader:
            starts.append(time.perf_counter())
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    return [1000 * (after - before) for before, after in pairwise(starts)]


def even_step(way: Way, workload: Workload) -> float:
    """Return what a step takes where all ranks have as many batches."""
    length = WARM_UP + workload.steps + 1
    return statistics.median(train(way, workload, [length] * dist.get_world_size())[WARM_UP:])


def tail_step(way: Way, workload: Workload) -> float:
    """Return what a step of rank 0 takes after the last rank has joined."""
    tail_begins = 2 * WARM_UP
    lengths = [tail_begins + workload.steps + 1] * (dist.get_world_size() - 1) + [WARM_UP]
    durations = train(way, workload, lengths)
    return 0.0 if is_last_rank() else statistics.median(durations[tail_begins:])


def cases_of(workload: Workload) -> list[Case]:
    at_15_ms = workload.milliseconds == 15
    settings = [
        ("even", even_step, PLAIN, TORCH, None),
        ("even", even_step, PLAIN, OURS, CERTAIN_TARGET if at_15_ms else None),
        ("even", even_step, PLAIN, BEATS, HEARTBEAT_TARGET if at_15_ms else None),
        ("tail", tail_step, TORCH, OURS, None),
        ("tail", tail_step, TORCH, BEATS, None),
    ]
    return cases_in_pairs(workload, settings)


if __name__ == "__main__":
    main("benchmarks.accelerate_overhead", __doc__, cases_of)
