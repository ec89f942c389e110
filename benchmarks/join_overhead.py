"""Measure what `torch_join.Join` costs in a plain loop, against plain DDP and torch's Join.

    python -m benchmarks.join_overhead [--seconds 200] [--world-size 2] [--only TEXT] [--json PATH] [--quick]

As in `step_overhead`, only ratios count, each of two measurements that follow one another within a second
in the same processes and take turns in who goes first; all cases take turns too. Pairs during which other
programs took processor time are left out (on Linux, where one can know).
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks._paired import Case, table_of, take_turns
from benchmarks.step_overhead import STEPS, WARM_UP, Batches, Workload, calibrate
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
    "heartbeat=True",
    lambda ddp, optimizer: Join([ddp, optimizer], heartbeat=True),
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


def make_cases(batch_sizes: dict[int, int], quick: bool) -> list[Case]:
    def cases_of(workload: Workload) -> Iterator[Case]:
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
        for name, measure, reference, compared, target in settings:
            title = f"{name}, {workload.milliseconds} ms: {compared.name} / {reference.name}"
            yield Case(title, partial(pair, measure, workload, reference, compared), target)

    workloads = [Workload(milliseconds, size) for milliseconds, size in batch_sizes.items()]
    if quick:
        workloads = [workload for workload in workloads if workload.milliseconds == min(batch_sizes)]
        for workload in workloads:
            workload.steps = WARM_UP
    return [case for workload in workloads for case in cases_of(workload)]


def work(arguments: argparse.Namespace) -> None:
    """Measure, in each of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch_sizes = dict(zip(STEPS, arguments.batch_sizes, strict=True))
    cases = [case for case in make_cases(batch_sizes, arguments.quick) if arguments.only in case.name]
    take_turns(cases, arguments.seconds)
    if dist.get_rank() == 0:
        summaries = [case.summary() for case in cases]
        Console(width=125).print(
            table_of(summaries, "Milliseconds per step: compared / reference", "reference", "compared")
        )
        if arguments.json:
            report = {
                "torch": torch.__version__,
                "cores": os.cpu_count(),
                "world_size": dist.get_world_size(),
                "batch_sizes": batch_sizes,
                "parameters": sum(p.numel() for p in Workload(2, 1).network.parameters()),
                "cases": summaries,
            }
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # ends the group's threads, which cycles keep: they must not outlive the interpreter


def launch(arguments: argparse.Namespace) -> int:
    """Find the batch sizes and start the processes."""
    torch.set_num_threads(1)
    sizes = {milliseconds: calibrate(milliseconds) for milliseconds in STEPS}
    found = ", ".join(f"{milliseconds} ms with {size} samples" for milliseconds, size in sizes.items())
    print(f"Forward and backward take {found}. Measuring for about {arguments.seconds:.0f} s.", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={arguments.world_size}", "-m", "benchmarks.join_overhead"]
    command += [f"--seconds={arguments.seconds}", "--batch-sizes", *map(str, sizes.values())]
    command += ["--json", str(arguments.json)] if arguments.json else []
    command += ["--quick"] if arguments.quick else []
    command += ["--only", arguments.only]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200, help="how long to measure")
    parser.add_argument("--quick", action="store_true", help="take a few seconds, to see that it runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="leave out cases whose names do not hold it")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to a file")
    parser.add_argument("--batch-sizes", type=int, nargs=len(STEPS), help=argparse.SUPPRESS)  # set by `launch`
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds = 1.0
    if "LOCAL_RANK" in os.environ:
        work(arguments)
    else:
        sys.exit(launch(arguments))


if __name__ == "__main__":
    main()
