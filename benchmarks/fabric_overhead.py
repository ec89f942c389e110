"""Measure what `lightning_join.fabric` costs in a script with Fabric, against Fabric's own `ddp`.

    python -m benchmarks.fabric_overhead [--seconds 200] [--world-size 2] [--only TEXT] [--json PATH] [--quick]

As in `join_overhead`.
"""

import statistics
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks._launch import main
from benchmarks._paired import Case
from benchmarks.accelerate_overhead import first
from benchmarks.join_overhead import cases_in_pairs
from benchmarks.step_overhead import WARM_UP, Batches, Workload
from lightning_join.fabric import DDPJoinStrategy

LOOPS = 50


class Way:
    """A strategy, by its class."""

    def __init__(self, name: str, strategy: type[DDPStrategy]) -> None:
        self.name, self.strategy = name, strategy


PLAIN, OURS = Way("ddp", DDPStrategy), Way("ddp_join", DDPJoinStrategy)


def script(way: Way, workload: Workload, length: int) -> tuple[Any, Any, Any, Any]:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=way.strategy())
    fabric.launch()
    optimizer = torch.optim.Adam(workload.network.parameters(), lr=1e-4)
    model, adam = fabric.setup(workload.network, optimizer)
    # Each "sample" is a batch.
    loader: Any = DataLoader(Batches(workload.batch, length), batch_size=1, collate_fn=first)
    return fabric, model, adam, fabric.setup_dataloaders(loader, use_distributed_sampler=False)


def even_step(way: Way, workload: Workload) -> float:
    """Return what a step takes where all ranks have as many batches, from one step's begin to the next, in ms."""
    fabric, model, optimizer, loader = script(way, workload, WARM_UP + workload.steps + 1)
    starts = []
    dist.barrier()
    for images, labels in loader:
        starts.append(time.perf_counter())
        fabric.backward(cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
    return statistics.median([1000 * (after - before) for before, after in pairwise(starts)][WARM_UP:])


def empty_loop(way: Way, workload: Workload) -> float:
    """Return what a loop without a batch takes."""
    fabric, _, _, loader = script(way, workload, 0)
    took = []
    for _ in range(LOOPS):
        fabric.barrier()
        begin = time.perf_counter()
        for _ in loader:
            pass
        took.append(1000 * (time.perf_counter() - begin))
    return statistics.median(took)


def cases_of(workload: Workload) -> list[Case]:
    target = {15: 1.01, 2: 1.03}.get(int(workload.milliseconds))
    settings = [("even", even_step, PLAIN, OURS, target)]
    if workload.milliseconds == 15:
        settings.append(("empty loop", empty_loop, PLAIN, OURS, None))
    return cases_in_pairs(workload, settings)


if __name__ == "__main__":
    main("benchmarks.fabric_overhead", __doc__, cases_of)
