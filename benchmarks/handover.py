"""Measure a handover of a large model with its optimizer, next to a plain broadcast of as many bytes.

    python -m benchmarks.handover [--parameters 100] [--rounds 5] [--json PATH] [--quick]

Two ranks on this machine. Durations on a shared machine drift, so only the ratio of a handover and the
broadcast right after it counts; the table holds the median of the rounds. Extra memory is the highest
that a process's memory rises above what it held before (on Linux, where one can know); a rank that has
never stepped also keeps the optimizer state that it lacked.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from tests.support.inside import checksum
from torch_join._handover.handover import hand_over
from torch_join.integration import Channel, open_channel

STATUS = Path("/proc/self/status")
PEAK_RESET = Path("/proc/self/clear_refs")
WIDTH = 2048


def make_model(parameters: int) -> nn.Module:
    """Return a network of about as many parameters, in matrices and vectors as a transformer has them."""
    width = min(WIDTH, int(parameters**0.5) // 4)
    layers = max(1, round(parameters / (width * width + 3 * width)))
    blocks = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.LayerNorm(width))]
    return nn.Sequential(*blocks)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that `action` takes until all ranks are through."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def memory(field: str) -> int:
    """Return a field of this process's memory in bytes, 0 where it cannot be known."""
    if not STATUS.exists():
        return 0
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def peak_rise(action: Callable[[], Any]) -> int:
    """Return by how many bytes this process's memory rises at most during `action`, on the worst rank."""
    if PEAK_RESET.exists():
        PEAK_RESET.write_text("5")
    before = memory("VmRSS")
    action()
    rise = torch.tensor(max(0, memory("VmHWM") - before))
    dist.all_reduce(rise, dist.ReduceOp.MAX)
    return int(rise)


def measure(parameters: int, rounds: int) -> dict[str, Any]:
    """Measure on each rank; the result is the same on all."""
    channel: Channel = open_channel()
    model = make_model(parameters)
    optimizer = torch.optim.Adam(model.parameters())
    if channel.rank == 1:
        step(model, optimizer)
    objects = [model, optimizer]
    created: list[int] = []
    first = timed(lambda: created.append(peak_rise(lambda: hand_over(objects, 1, channel))))
    rises = [peak_rise(lambda: hand_over(objects, 1, channel))]
    alike = len(set(channel.gather(checksum(objects)))) == 1
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    flat = torch.zeros(size // 4)
    pairs = []
    for turn in range(rounds + 1):
        handed = timed(partial(hand_over, objects, turn % 2, channel))
        pairs.append((handed, timed(lambda: dist.broadcast(flat, 0))))
    seconds, plain = zip(*pairs[1:], strict=True)  # the first broadcast also touches its memory first
    digest = timed(lambda: checksum(objects))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(tensors),
        "bytes": size,
        "handover_s": statistics.median(seconds),
        "broadcast_s": statistics.median(plain),
        "ratio": statistics.median(handed / other for handed, other in pairs[1:]),
        "ratios": [handed / other for handed, other in pairs[1:]],
        "first_handover_s": first,
        "checksum_s": digest,
        "peak_extra_bytes": rises[0],
        "peak_extra_bytes_where_state_is_created": created[0],
        "created_bytes": size - sum(p.numel() * p.element_size() for p in model.parameters()),
        "alike": alike,
    }


def table_of(result: dict[str, Any]) -> Table:
    size, mega = result["bytes"] / 1e9, 2**20
    title = (
        f"{result['parameters'] / 1e6:.1f} million parameters with Adam: {size:.2f} GB in {result['tensors']} tensors"
    )
    table = Table(title=title)
    for column in ("", "seconds", "GB/s", "extra memory, MiB"):
        table.add_column(column, justify="right" if column else "left")
    rows = [
        ("handover", result["handover_s"], result["peak_extra_bytes"]),
        (
            "the first one: state is created",
            result["first_handover_s"],
            result["peak_extra_bytes_where_state_is_created"],
        ),
        ("plain broadcast", result["broadcast_s"], None),
        ("checksum", result["checksum_s"], None),
    ]
    for name, seconds, extra in rows:
        table.add_row(name, f"{seconds:.3f}", f"{size / seconds:.2f}", "" if extra is None else f"{extra / mega:.1f}")
    table.caption = (
        f"handover / broadcast: {result['ratio']:.2f}; state created: {result['created_bytes'] / mega:.1f} MiB"
    )
    return table


def work(arguments: argparse.Namespace) -> None:
    """Measure, in each of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure(round(arguments.parameters * 1e6), arguments.rounds)
    if dist.get_rank() == 0:
        Console(width=100).print(table_of(result))
        if arguments.json:
            report = {"torch": torch.__version__, "cores": os.cpu_count(), "world_size": 2, **result}
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def launch(arguments: argparse.Namespace) -> int:
    """Start the processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.handover", f"--parameters={arguments.parameters}", f"--rounds={arguments.rounds}"]
    command += ["--json", str(arguments.json)] if arguments.json else []
    # One arena that gives memory back, or what malloc keeps of earlier buckets would count as used.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100, metavar="MILLIONS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one million parameters, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to a file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.parameters, arguments.rounds = 1.0, 3
    if "LOCAL_RANK" in os.environ:
        work(arguments)
    else:
        sys.exit(launch(arguments))


if __name__ == "__main__":
    main()
