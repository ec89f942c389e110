"""Print how far parameters are from the exact result under torch's Join and under torch_join's.

    python -m benchmarks.exactness [--json PATH] [--quick] [--markdown]

Two gloo ranks with 3 and 6 batches train a small network for two epochs in float64. A single process
applies the same steps to the batches of both: the sum of their mean losses' gradients over the world size.
The table holds the largest difference of a parameter from its result, on the worst rank.
Exits non-zero if `torch_join.Join` is not exact. The README's table is what `--markdown` prints.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from torch_join import Join

LENGTHS = (3, 6)
EPOCHS = 2
LEARNING_RATE = 0.05
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Program:
    """What a step does besides forward and backward."""

    name: str
    optimizer: str
    step_lr: bool = False
    clip: float | None = None


PROGRAMS = (
    Program("SGD", "sgd"),
    Program("SGD with momentum", "momentum"),
    Program("Adam", "adam"),
    Program("ZeRO (Adam)", "zero"),
    Program("Adam, StepLR", "adam", step_lr=True),
    Program("Adam, clip_grad_norm_", "adam", clip=0.3),
    Program("ZeRO (Adam), StepLR, clip_grad_norm_", "zero", step_lr=True, clip=0.3),
)
QUICK = ("Adam", "ZeRO (Adam)")


class Training:
    """A network, its optimizer and its scheduler; the same in one process and on each rank."""

    def __init__(self, program: Program, sharded: bool) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()
        self.clip = program.clip
        parameters = self.network.parameters()
        self.optimizer: torch.optim.Optimizer
        if program.optimizer == "zero" and sharded:
            self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=LEARNING_RATE)
        elif program.optimizer in ("adam", "zero"):
            self.optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
        else:
            momentum = 0.9 if program.optimizer == "momentum" else 0.0
            self.optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=momentum)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.8) if program.step_lr else None

    @property
    def parameters(self) -> Tensor:
        return parameters_to_vector(self.network.parameters()).detach()

    def step(self) -> None:
        if self.clip is not None:
            clip_grad_norm_(self.network.parameters(), self.clip)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


def batches(rank: int, epoch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + epoch)
    return [torch.randn(5, 4, generator=generator).double() for _ in range(LENGTHS[rank])]


def exact(program: Program) -> Tensor:
    """Train in one process and return the parameters."""
    training = Training(program, sharded=False)
    for epoch in range(EPOCHS):
        shards = [batches(rank, epoch) for rank in range(len(LENGTHS))]
        for step in range(max(LENGTHS)):
            training.optimizer.zero_grad()
            for batch in (shard[step] for shard in shards if step < len(shard)):
                loss = training.network(batch).pow(2).mean() / len(LENGTHS)
                loss.backward()
            training.step()
    return training.parameters


def trained(program: Program, ours: bool) -> Tensor:
    """Train on this rank under one of the two Joins and return the parameters."""
    training = Training(program, sharded=True)
    ddp = DistributedDataParallel(training.network)
    for epoch in range(EPOCHS):
        with context(ddp, training, ours):
            for batch in batches(dist.get_rank(), epoch):
                training.optimizer.zero_grad()
                ddp(batch).pow(2).mean().backward()
                training.step()
    return training.parameters


def context(ddp: DistributedDataParallel, training: Training, ours: bool) -> AbstractContextManager[Any]:
    if ours:
        return Join([thing for thing in (ddp, training.optimizer, training.scheduler) if thing is not None])
    # torch's takes what is a Joinable.
    sharded = isinstance(training.optimizer, ZeroRedundancyOptimizer)
    return TorchJoin([ddp, training.optimizer] if sharded else [ddp])  # type: ignore[list-item]


@dataclass(frozen=True)
class Row:
    """The largest differences from the exact result, and the largest parameter for comparison."""

    name: str
    torch: float
    ours: float
    largest: float


def measure(program: Program) -> Row:
    expected = exact(program)
    worst = {}
    for ours in (False, True):
        difference = (trained(program, ours) - expected).abs().max()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        worst[ours] = difference.item()
    return Row(program.name, worst[False], worst[True], expected.abs().max().item())


def measure_all(quick: bool = False) -> list[Row]:
    return [measure(program) for program in PROGRAMS if not quick or program.name in QUICK]


COLUMNS = ("", "torch's Join", "torch_join.Join", "largest parameter")


def cells(row: Row) -> tuple[str, ...]:
    return row.name, short(row.torch), short(row.ours), f"{row.largest:.1f}"


def short(value: float) -> str:
    """Write 0.0412 as 4e-2."""
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return "0" if value == 0 else f"{mantissa}e{int(exponent)}" if exponent else mantissa


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="Largest difference of a parameter from the exact result")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(*cells(row))
    return table


def markdown_of(rows: Sequence[Row]) -> str:
    lines = (COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *map(cells, rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def work(arguments: argparse.Namespace) -> None:
    """Train, in each of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure_all(arguments.quick)
    if dist.get_rank() == 0:
        if arguments.markdown:
            print(markdown_of(rows))
        else:
            Console(width=100).print(table_of(rows))
        if arguments.json:
            report = {"torch": torch.__version__, "rows": [asdict(row) for row in rows]}
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # ends the group's threads, which cycles keep: they must not outlive the interpreter
    if not all(row.ours <= TOLERANCE for row in rows):  # NaN neither
        sys.exit(f"torch_join.Join is off by more than {TOLERANCE:.0e}.")


def launch(arguments: argparse.Namespace) -> int:
    """Start the processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(LENGTHS)}"]
    command += ["-m", "benchmarks.exactness"]
    command += ["--json", str(arguments.json)] if arguments.json else []
    command += ["--quick"] if arguments.quick else []
    command += ["--markdown"] if arguments.markdown else []
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to a file")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--markdown", action="store_true", help="print the table as the README has it")
    arguments = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        work(arguments)
    else:
        sys.exit(launch(arguments))


if __name__ == "__main__":
    main()
