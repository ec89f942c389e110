"""Start the processes of a benchmark, and let each measure its cases in turns."""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks._paired import Case, table_of, take_turns
from benchmarks.step_overhead import STEPS, WARM_UP, Workload, calibrate


def main(module: str, description: str | None, cases_of: Callable[[Workload], list[Case]]) -> None:
    """Measure the cases of each workload, in as many processes as the command line says.

    Args:
        module: The benchmark's own name, as `python -m` takes it.
        description: What `--help` prints.
        cases_of: The cases.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200, help="how long to measure")
    parser.add_argument("--quick", action="store_true", help="take a few seconds, to see that it runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="leave out cases whose names do not hold it")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to a file")
    parser.add_argument("--batch-sizes", type=int, nargs=len(STEPS), help=argparse.SUPPRESS)  # set by `_launch`
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds = 1.0
    if "LOCAL_RANK" in os.environ:
        _work(arguments, cases_of)
    else:
        sys.exit(_launch(module, arguments))


def _work(arguments: argparse.Namespace, cases_of: Callable[[Workload], list[Case]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch_sizes = dict(zip(STEPS, arguments.batch_sizes, strict=True))
    workloads = [Workload(milliseconds, size) for milliseconds, size in batch_sizes.items()]
    if arguments.quick:
        workloads = [workload for workload in workloads if workload.milliseconds == min(batch_sizes)]
        for workload in workloads:
            workload.steps = WARM_UP
    cases = [case for workload in workloads for case in cases_of(workload) if arguments.only in case.name]
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
                "parameters": sum(p.numel() for p in workloads[0].network.parameters()),
                "cases": summaries,
            }
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # ends the group's threads, which cycles keep: they must not outlive the interpreter


def _launch(module: str, arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    sizes = {milliseconds: calibrate(milliseconds) for milliseconds in STEPS}
    found = ", ".join(f"{milliseconds} ms with {size} samples" for milliseconds, size in sizes.items())
    print(f"Forward and backward take {found}. Measuring for about {arguments.seconds:.0f} s.", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={arguments.world_size}", "-m", module]
    command += [f"--seconds={arguments.seconds}", "--batch-sizes", *map(str, sizes.values())]
    command += ["--json", str(arguments.json)] if arguments.json else []
    command += ["--quick"] if arguments.quick else []
    command += ["--only", arguments.only]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
