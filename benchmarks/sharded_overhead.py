"""Measure what `torch_join.Join` costs with a sharded model in a plain loop, against FSDP alone.

    python -m benchmarks.sharded_overhead [--seconds 200] [--world-size 2] [--only TEXT] [--json PATH] [--quick]

As in `join_overhead`. Each rank is bound to a core of its own, else a joined rank's idle core would make the others
faster. A step in the tail is compared with one on even inputs, both under `Join`.
"""

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks._launch import main
from benchmarks._paired import Case
from benchmarks.step_overhead import WARM_UP, Batches, Model, Workload, fit
from lightning_join import ModelParallelJoinStrategy
from torch_join import Join

EVEN_TARGET, TAIL_TARGET = 1.01, 1.05  # at 15 ms
Shard = Callable[[nn.Sequential], nn.Module]


def second(network: nn.Sequential, mesh: Any = None) -> nn.Module:
    for layer in network:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def first(network: nn.Sequential) -> nn.Module:
    return FullyShardedDataParallel(
        network, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True
    )


def run(shard: Shard, workload: Workload, length: int, joins: bool) -> list[float]:
    """Train one epoch; return this rank's step durations, from one step's begin to the next, in ms."""
    model = shard(deepcopy(workload.network))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loader: Iterable[Any] = DataLoader(Batches(workload.batch, length), batch_size=None)
    starts = []
    dist.barrier()
    with Join([model, optimizer]) if joins else nullcontext() as join:
        for images, labels in join.batches(loader) if join is not None else loader:
            starts.append(time.perf_counter())
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    return [1000 * (after - before) for before, after in pairwise(starts)]


def even_step(shard: Shard, workload: Workload, joins: bool) -> float:
    """Return what a step takes where all ranks have as many batches."""
    return statistics.median(run(shard, workload, WARM_UP + workload.steps + 1, joins)[WARM_UP:])


def tail_step(shard: Shard, workload: Workload, _: bool) -> float:
    """Return what a step of rank 0 takes after the last rank has joined."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    durations = run(shard, workload, WARM_UP if is_last else 2 * WARM_UP + workload.steps + 1, True)
    return statistics.median(durations[2 * WARM_UP :]) if durations[2 * WARM_UP :] else 0.0


def pair(
    shard: Shard, workload: Workload, measure: Callable[[Shard, Workload, bool], float], joins: bool, swap: bool
) -> tuple[float, float]:
    """Return an even step, under Join or not, and what is compared with it."""
    bind()
    measures = [partial(even_step, shard, workload, joins), partial(measure, shard, workload, True)]
    found = [one() for one in (reversed(measures) if swap else measures)]
    return (found[1], found[0]) if swap else (found[0], found[1])


class ShardedModel(Model):
    """The network as Lightning shards it."""

    def configure_model(self) -> None:
        if not isinstance(self.network, FSDPModule):
            self.network = deepcopy(self.network)
            second(self.network, self.device_mesh["data_parallel"])


def lightning_pair(workload: Workload, swap: bool) -> tuple[float, float]:
    """Measure a step under Lightning's own strategy and one under ours, where all ranks have as many batches."""
    bind()
    medians = {}
    ways: list[Any] = [ModelParallelStrategy, ModelParallelJoinStrategy]
    for way in reversed(ways) if swap else ways:
        strategy = way(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
        data = Batches(workload.batch, WARM_UP + workload.steps)
        medians[way] = statistics.median(fit(strategy, workload, data, make=ShardedModel)[WARM_UP:])
    return medians[ModelParallelStrategy], medians[ModelParallelJoinStrategy]


def lightning_tail(workload: Workload, _: bool) -> tuple[float, float]:
    """Measure rank 0's step before and after the last rank joins."""
    bind()
    joins_at = WARM_UP + workload.steps
    is_last = dist.get_rank() == dist.get_world_size() - 1
    data = Batches(workload.batch, joins_at if is_last else joins_at + workload.steps)
    strategy = ModelParallelJoinStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    durations = fit(strategy, workload, data, make=ShardedModel)
    return statistics.median(durations[WARM_UP:joins_at]), statistics.median(durations[joins_at:])


def bind() -> None:
    """Bind this rank to a core."""
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) >= dist.get_world_size():
        os.sched_setaffinity(0, {dist.get_rank()})


def cases_of(workload: Workload) -> list[Case]:
    for each in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(each).setLevel(logging.WARNING)  # they greet at every fit
    targets = (EVEN_TARGET, TAIL_TARGET) if workload.milliseconds == 15 else (None, None)
    cases = []
    for name, shard in (("fully_shard", second), ("FSDP1", first)):
        settings = (("even: Join / plain", even_step, False, targets[0]), ("tail / even", tail_step, True, targets[1]))
        for what, measure, joins, target in settings:
            measured = partial(pair, shard, workload, measure, joins)
            cases.append(Case(f"{name}, {workload.milliseconds} ms, {what}", measured, target))
    name = f"Lightning's fully_shard, {workload.milliseconds} ms"
    cases.append(Case(f"{name}, even: join / plain", partial(lightning_pair, workload), targets[0]))
    cases.append(Case(f"{name}, tail / even", partial(lightning_tail, workload), targets[1]))
    return cases


if __name__ == "__main__":
    main("benchmarks.sharded_overhead", __doc__, cases_of)
