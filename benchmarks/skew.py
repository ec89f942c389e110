"""Measure an epoch against how unevenly its batches are dealt, for each way to train on them.

    python -m benchmarks.skew [--seconds 300] [--sizes 1] [--batches 240] [--only TEXT] [--reference ddp] [--quick]
    python -m benchmarks.skew --model

A step takes 15 ms, for which the host waits as for a device; reading a batch copies it. So what is seen is what
ranks wait for each other, and what moving batches takes of the host's time. Each epoch is measured in a pair with
plain DDP (or Lightning's `ddp`) on even shards of as many batches, in the same processes and one after the other;
the ratio is at least 1 where nothing is left out. What a `with` takes at its begin and end is a part of it: the fewer
batches there are, the more that is. With `--reference same` the even shards are trained on in the same way, with
`--reference join` under Join without rebalancing.

The ways, besides: `pad` has short ranks go through their own batches again until the longest is done, `drop` ends
with the shortest. Both are plain DDP.

How exact: the largest difference of a parameter, in float64, from one process that trains on the same batches in the
same steps; for `pad` and `drop`, on each batch once, in the steps of `join`.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks._paired import bootstrap_interval
from lightning_join import DDPJoinStrategy
from torch_join import Join

STEP = 0.015  # seconds
SKEWS = ((1, 1), (2, 1), (9, 1), (7, 2, 1))
FEATURES = 256


class Batches(Dataset[Tensor]):
    """`length` batches, whose first numbers say whose they are and which."""

    def __init__(self, rank: int, length: int, megabytes: float) -> None:
        self.rank, self.length = rank, length
        self.batch = torch.zeros(max(1, round(megabytes * 1e6 / 4 / FEATURES)), FEATURES)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        batch = self.batch.clone()
        batch[0, 0], batch[0, 1] = self.rank, index
        return batch


class Stream(IterableDataset[Tensor]):
    """The same without a length."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return (self.batches[index] for index in range(len(self.batches)))


def work(network: nn.Module, batch: Tensor) -> Tensor:
    """Do what a step does on the device, in `STEP` seconds."""
    end = time.perf_counter() + STEP
    loss = loss_of(network, batch)
    time.sleep(max(0.0, end - time.perf_counter()))
    return loss


def loss_of(network: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (network(batch[:8].double() / 64) - 1).pow(2).mean()
    return loss


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))
        self.double()


def make_network() -> tuple[Network, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = Network()
    return network, torch.optim.SGD(network.parameters(), lr=0.01)


Steps = list[list[tuple[int, int]]]  # of each step, whose batches are trained on, and which


def in_one_process(steps: Steps, world_size: int) -> Tensor:
    """Return the parameters of one process that trains on these batches."""
    network, optimizer = make_network()
    for step in steps:
        optimizer.zero_grad()
        for rank, index in step:
            batch = torch.zeros(8, FEATURES)
            batch[0, 0], batch[0, 1] = rank, index
            (loss_of(network, batch) / world_size).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(network.parameters()).detach()


def steps_of(by_rank: Sequence[Sequence[tuple[int, int]]]) -> Steps:
    """Return what is trained on in each step, of what each rank trains on."""
    return [[one for one in step if one is not None] for step in zip_longest(*by_rank)]


class Module(pl.LightningModule):
    def __init__(self, batches: Any, seen: list[tuple[int, int]]) -> None:
        super().__init__()
        self.network, self.optimizer = make_network()
        self.batches, self.seen = batches, seen

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.append((int(batch[0, 0]), int(batch[0, 1])))
        return work(self.network, batch)

    def train_dataloader(self) -> Any:
        return self.batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    def on_train_epoch_start(self) -> None:
        dist.barrier()
        self.begin = time.perf_counter()

    def on_train_epoch_end(self) -> None:
        self.seconds = time.perf_counter() - self.begin


def lengths_of(skew: Sequence[int], batches: int, way: str) -> list[int]:
    """Return the number of batches of each rank in the ways that know nothing of each other."""
    lengths = [batches * part // sum(skew) for part in skew]
    if way == "even":
        return [ceil(sum(lengths) / len(lengths))] * len(lengths)
    if way in ("pad", "drop"):
        return [max(lengths) if way == "pad" else min(lengths)] * len(lengths)
    return lengths


@dataclass
class Epoch:
    """What one epoch took on the slowest rank, in seconds, and what this rank has trained on, and trained."""

    seconds: float
    seen: list[tuple[int, int]]
    parameters: Tensor


@dataclass(eq=False)
class Case:
    """One way to train, on one skew."""

    way: str  # "join", "rebalance", "pad", "drop"; with "Lightning: " before it, in Lightning
    skew: tuple[int, ...]
    megabytes: float
    known: bool
    batches: int  # of all ranks together
    reference: str = "ddp"
    ratios: list[float] = field(default_factory=list)
    seen: int = 0  # distinct batches
    trained: int = 0
    difference: float = 0.0  # the largest

    @property
    def name(self) -> str:
        lengths = "" if self.known else ", unknown lengths"
        return f"{':'.join(map(str, self.skew))}, {self.megabytes:g} MB{lengths}, {self.way}"

    def epoch(self, even: bool) -> Epoch:
        """Train one epoch, on even shards in the way of the reference."""
        _, separator, kind = self.way.rpartition(": ")
        rank = dist.get_rank()
        data = Batches(rank, lengths_of(self.skew, self.batches, "join")[rank], self.megabytes)
        length = lengths_of(self.skew, self.batches, "even" if even else kind)[rank]
        if even:
            data = Batches(rank, length, self.megabytes)
            kind = {"ddp": "even", "same": kind, "join": "join"}[self.reference]
        loader: Any = DataLoader(data if self.known else Stream(data), batch_size=None)  # type: ignore[arg-type]
        if kind in ("pad", "drop"):
            loader = Repeated(data, length)
        found = (in_lightning if separator else in_plain_loop)(kind, loader)
        slowest = torch.tensor(found.seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.seconds = float(slowest)
        return found

    def add_pair(self, swap: bool) -> None:
        found = {even: self.epoch(even) for even in ((False, True) if swap else (True, False))}
        self.ratios.append(found[False].seconds / found[True].seconds)
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, found[False].seen)
        trained = [one for theirs in by_rank for one in theirs]
        self.trained, self.seen = len(trained), len(set(trained))
        lengths = lengths_of(self.skew, self.batches, "join")
        if self.way.endswith(("pad", "drop")):
            by_rank = [[(rank, index) for index in range(length)] for rank, length in enumerate(lengths)]
        expected = in_one_process(steps_of(by_rank), len(lengths))
        self.difference = max(self.difference, float((found[False].parameters - expected).abs().max()))

    def summary(self) -> dict[str, Any]:
        ratios = torch.tensor(self.ratios, dtype=torch.float64)
        lengths = lengths_of(self.skew, self.batches, "join")
        return {
            "name": self.name,
            "way": self.way,
            "skew": self.skew,
            "megabytes": self.megabytes,
            "known": self.known,
            "ratio": statistics.median(self.ratios),
            "interval": bootstrap_interval(ratios),
            "pairs": len(self.ratios),
            "batches": sum(lengths),
            "distinct": self.seen,
            "trained": self.trained,
            "difference": self.difference,
        }


class Repeated(Dataset[Tensor]):
    """The first `length` batches of a rank that goes through them again and again."""

    def __init__(self, data: Batches, length: int) -> None:
        self.data, self.length = data, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.length:
            raise IndexError
        return self.data[index % max(1, len(self.data))]


def in_plain_loop(kind: str, loader: Iterable[Tensor]) -> Epoch:
    network, optimizer = make_network()
    ddp = DistributedDataParallel(network)
    joins = kind in ("join", "rebalance")
    seen = []
    dist.barrier()
    begin = time.perf_counter()
    with Join([ddp, optimizer], rebalance=kind == "rebalance") if joins else nullcontext() as join:
        for batch in join.batches(loader) if join is not None else loader:
            seen.append((int(batch[0, 0]), int(batch[0, 1])))
            optimizer.zero_grad()
            work(ddp, batch).backward()
            optimizer.step()
    seconds = time.perf_counter() - begin
    return Epoch(seconds, seen, nn.utils.parameters_to_vector(network.parameters()).detach())


def in_lightning(kind: str, loader: Any) -> Epoch:
    seen: list[tuple[int, int]] = []
    module = Module(loader, seen)
    strategy: Any = DDPJoinStrategy(rebalance=kind == "rebalance") if kind in ("join", "rebalance") else "ddp"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return Epoch(module.seconds, seen, nn.utils.parameters_to_vector(module.network.parameters()).detach())


def cases_of(arguments: argparse.Namespace, world_size: int) -> list[Case]:
    cases = [
        Case(framework + way, skew, megabytes, known, arguments.batches, arguments.reference)
        for skew in SKEWS
        if len(skew) == world_size
        for megabytes in arguments.sizes
        for known in (True, False)
        for framework in ("", "Lightning: ")
        for way in ("join", "rebalance", "pad", "drop")
        if known or way in ("join", "rebalance")
    ]
    return [case for case in cases if arguments.only in case.name]


def model() -> Table:
    """Return epochs by model, in seconds: what many ranks would take, by what was measured on few."""
    from torch_join._schedule.plan import Plan, steps_of

    table = Table(title="Seconds of an epoch, by model: steps of 15 ms, 1 MB batches")
    for column in ("ranks", "batches by rank", "read (ms)", "join", "rebalance", "even shards"):
        table.add_column(column, justify="right")
    for name, lengths in {
        "half 200, half 100": lambda w: [200] * (w // 2) + [100] * (w // 2),
        "one 900, others 100": lambda w: [900] + [100] * (w - 1),
        "one 1000, others 100": lambda w: [1000] + [100] * (w - 1),
        "one has all": lambda w: [100 * w] + [0] * (w - 1),
    }.items():
        for world_size in (8, 64):
            for read in (1.0, 5.0, 15.0):
                by_rank = lengths(world_size)
                plan = Plan(by_rank, [world_size] * world_size)
                seconds = sum(_row_seconds(plan.plan(), read) for _ in range(steps_of(by_rank)))
                join = max(by_rank) * max(STEP, read / 1000)
                even = ceil(sum(by_rank) / world_size) * max(STEP, read / 1000)
                table.add_row(str(world_size), name, f"{read:g}", f"{join:.1f}", f"{seconds:.1f}", f"{even:.1f}")
    return table


GIVING = 0.0004  # seconds of the giver's main thread, for a gift of 1 MB


def _row_seconds(row: Sequence[Any], read: float) -> float:
    """A step takes its 15 ms, or what its busiest giver reads for it, and what that one sends."""
    taken: dict[int, int] = {}
    for share in row:
        if share is not None:
            taken[share.owner] = taken.get(share.owner, 0) + 1
    most = max(taken.values())
    return max(STEP, most * read / 1000) + (most - 1) * GIVING


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    cases = cases_of(arguments, dist.get_world_size())
    for case in cases:
        case.epoch(False)  # warm up
    deadline = time.perf_counter() + arguments.seconds
    for turn in range(1_000_000):
        enough = torch.tensor(turn >= arguments.turns and time.perf_counter() > deadline)
        dist.broadcast(enough, 0)
        if enough:
            break
        for case in cases:
            case.add_pair(swap=turn % 2 == 1)
    if dist.get_rank() == 0 and arguments.json:
        arguments.json.write_text(json.dumps([case.summary() for case in cases]))
    dist.barrier()
    dist.destroy_process_group()


def table_of(summaries: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Epochs, against even shards of as many batches")
    for column in ("case", "ratio", "95% interval", "pairs", "distinct batches", "trained twice", "difference"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for one in summaries:
        low, high = one["interval"]
        table.add_row(
            one["name"],
            f"{one['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
            str(one["pairs"]),
            f"{one['distinct']} of {one['batches']}",
            str(one["trained"] - one["distinct"]),
            f"{one['difference']:.0e}",
        )
    return table


def draw(summaries: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    megabytes = summaries[0]["megabytes"]
    shown = [one for one in summaries if one["known"] and one["megabytes"] == megabytes]
    ways = list(dict.fromkeys(one["way"] for one in shown if not one["way"].startswith("Lightning")))
    skews = list(dict.fromkeys(tuple(one["skew"]) for one in shown))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for index, way in enumerate(ways):
        ratios = [next(one["ratio"] for one in shown if one["way"] == way and tuple(one["skew"]) == s) for s in skews]
        axes.bar([place + 0.2 * index for place in range(len(skews))], ratios, 0.2, label=way)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_xticks([place + 0.3 for place in range(len(skews))], [":".join(map(str, skew)) for skew in skews])
    axes.set(xlabel=f"batches of the ranks, of {megabytes:g} MB", ylabel="epoch, against even shards")
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="how long to measure, for each number of ranks")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0], help="of a batch, in MB")
    parser.add_argument("--turns", type=int, default=3, help="pairs of each case, at least")
    parser.add_argument("--batches", type=int, default=240, help="of all ranks together")
    parser.add_argument("--only", default="", metavar="TEXT", help="leave out cases whose names do not hold it")
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    parser.add_argument("--reference", choices=("ddp", "same", "join"), default="ddp", help="what even shards run in")
    parser.add_argument("--model", action="store_true", help="print epochs of 8 and 64 ranks by model")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to a file")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw those of the first size, with matplotlib")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.turns = 1.0, 1
    if "LOCAL_RANK" in os.environ:
        run(arguments)
        return
    console = Console(width=130)
    if arguments.model:
        console.print(model())
        return
    summaries: list[dict[str, Any]] = []
    for world_size in sorted({len(skew) for skew in SKEWS}):
        if not cases_of(arguments, world_size):
            continue
        path = Path(f"{arguments.json or '/tmp/skew'}.{world_size}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        command += ["-m", "benchmarks.skew", f"--seconds={arguments.seconds}", "--only", arguments.only]
        command += ["--sizes", *map(str, arguments.sizes), "--batches", str(arguments.batches), "--json", str(path)]
        command += ["--turns", str(arguments.turns), "--reference", arguments.reference]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        summaries += json.loads(path.read_text())
        path.unlink()
    console.print(table_of(summaries))
    if arguments.json:
        arguments.json.write_text(json.dumps(summaries, indent=1) + "\n")
    if arguments.plot:
        draw(summaries, arguments.plot)


if __name__ == "__main__":
    main()
