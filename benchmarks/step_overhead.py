"""Measure what a training step costs under Lightning's `ddp_join`, against `ddp` and against itself.

    python -m benchmarks.step_overhead [--seconds 230] [--world-size 2] [--only TEXT] [--json PATH] [--quick]

Durations on a shared machine drift by more than what is measured here. So only ratios count, each
of two measurements that follow one another within a second in the same processes: short fits under
the two strategies, taking turns in who goes first, or the two halves of one epoch. All cases take
turns too, until the time is up. Pairs during which other programs took processor time are left out
(on Linux, where one can know).
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops import training_epoch_loop
from lightning.pytorch.strategies import Strategy
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_join
from benchmarks._paired import Case, table_of, take_turns

WARM_UP = 3  # steps at the beginning of a fit that are not counted (DDP rebuilds its buckets, for one)
# Steps in a block, by the milliseconds that forward and backward take: a block takes about 0.2 s.
STEPS = {15: 10, 2: 30}
EVEN_TARGET = 1.01
TAIL_TARGET = 1.10


class Batches(Dataset[Any]):
    """The same batch `length` times, in memory of its own as from any loader, or in the same (`copies` of 1)."""

    def __init__(self, batch: Any, length: int, copies: int = 4) -> None:
        self.batches = [[part.clone() for part in batch] for _ in range(copies)]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.batches[index % len(self.batches)]


class BatchStream(IterableDataset[Any]):
    """The same, without a length."""

    def __init__(self, batch: Any, length: int, copies: int = 4) -> None:
        self.batches = Batches(batch, length, copies)

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[index] for index in range(self.batches.length))


class Workload:
    """A network and a batch whose forward and backward take a given time on one thread."""

    def __init__(self, milliseconds: int, batch_size: int) -> None:
        self.milliseconds = milliseconds
        self.steps = STEPS[milliseconds]
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch_size, 64, generator=generator)
        self.batch = images, torch.randint(10, (batch_size,), generator=generator)
        widths = (64, 256, 256, 256)
        hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.network = nn.Sequential(*hidden, nn.Linear(widths[-1], 10))

    def forward_backward(self) -> None:
        images, labels = self.batch
        cross_entropy(self.network(images), labels).backward()


def calibrate(milliseconds: int) -> int:
    """Return the batch size with which forward and backward take about `milliseconds`."""
    size = 64
    for _ in range(4):
        workload = Workload(milliseconds, size)
        durations = []
        for _ in range(40):
            start = time.perf_counter()
            workload.forward_backward()
            durations.append(time.perf_counter() - start)
        size = max(1, round(size * milliseconds / 1000 / statistics.median(durations)))
    return size


class Model(pl.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Stopwatch(Callback):
    """Durations of the steps, from one `on_train_batch_start` to the next, so that they hold all of a step."""

    def __init__(self) -> None:
        self._starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._starts.append(time.perf_counter())

    @property
    def milliseconds(self) -> list[float]:
        return [1000 * (end - start) for start, end in pairwise(self._starts)]


class KeepBusy(Callback):
    """Makes a joined rank compute as much as if it had a batch."""

    def __init__(self, workload: Workload) -> None:
        self._workload = Workload(workload.milliseconds, len(workload.batch[0]))

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, lightning_join.DDPJoinStrategy)
        if trainer.strategy.joined:
            self._workload.forward_backward()


def fit(
    strategy: str | Strategy,
    workload: Workload,
    data: Dataset[Any],
    callbacks: Sequence[Callback] = (),
    make: Callable[[nn.Module], pl.LightningModule] = Model,
) -> list[float]:
    """Train for one epoch and return this rank's step durations in milliseconds."""
    stopwatch = Stopwatch()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[*callbacks, stopwatch],
    )
    trainer.fit(make(workload.network), DataLoader(data, batch_size=None))
    return stopwatch.milliseconds


def even_pair(
    workload: Workload, dataset: Callable[..., Dataset[Any]], broadcasts: bool, swap: bool
) -> tuple[float, float]:
    """Measure a step under `ddp` and one under `ddp_join` where all ranks have as many batches.

    Args:
        workload: What a step computes.
        dataset: Makes the data.
        broadcasts: Whether `ddp` broadcasts in each step whether there was a signal, as Lightning has it.
        swap: Whether `ddp_join` comes first.
    """
    medians = {}
    without = mock.patch.object(training_epoch_loop._TrainingEpochLoop, "_broadcast_sigterm_tensor", new=_say_nothing)
    for strategy in ("ddp_join", "ddp") if swap else ("ddp", "ddp_join"):
        data = dataset(workload.batch, WARM_UP + workload.steps)
        with nullcontext() if broadcasts else without:
            medians[strategy] = statistics.median(fit(strategy, workload, data)[WARM_UP:])
    return medians["ddp"], medians["ddp_join"]


def _say_nothing(_: object) -> None:
    """Take the place of the broadcast; a mock's call takes more time than this one."""


def tail_pair(workload: Workload, busy: bool, _: bool) -> tuple[float, float]:
    """Measure rank 0's step before and after the last rank joins."""
    joins_at = WARM_UP + workload.steps
    is_last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    data = Batches(workload.batch, joins_at if is_last_rank else joins_at + workload.steps)
    durations = fit("ddp_join", workload, data, [KeepBusy(workload)] if busy else [])
    return statistics.median(durations[WARM_UP:joins_at]), statistics.median(durations[joins_at:])


def make_cases(batch_sizes: dict[int, int]) -> list[Case]:
    cases = []
    for milliseconds, size in batch_sizes.items():
        workload = Workload(milliseconds, size)
        counts = milliseconds == 15  # the targets are set for steps of this size
        even, tail = (EVEN_TARGET, TAIL_TARGET) if counts else (None, None)
        cases += [
            Case(f"even, sized, {milliseconds} ms", partial(even_pair, workload, Batches, True), even),
            Case(f"even, iterable, {milliseconds} ms", partial(even_pair, workload, BatchStream, True), even),
            Case(
                f"even, sized, {milliseconds} ms, no broadcast in ddp",
                partial(even_pair, workload, Batches, False),
                even,
            ),
            Case(
                f"even, iterable, {milliseconds} ms, no broadcast in ddp",
                partial(even_pair, workload, BatchStream, False),
                even,
            ),
            Case(f"tail, {milliseconds} ms", partial(tail_pair, workload, False), tail),
            Case(f"tail, joined rank busy, {milliseconds} ms", partial(tail_pair, workload, True), tail),
        ]
    return cases


TITLE = "Milliseconds per step: ddp against ddp_join, and an ordinary step against one in the tail"


def work(arguments: argparse.Namespace) -> None:
    """Measure, in each of the processes."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they greet at every fit
    torch.set_num_threads(1)
    batch_sizes = dict(zip(STEPS, arguments.batch_sizes, strict=True))
    cases = [case for case in make_cases(batch_sizes) if arguments.only in case.name]
    take_turns(cases, arguments.seconds)
    if dist.get_rank() > 0:
        return
    summaries = [case.summary() for case in cases]
    Console(width=125).print(table_of(summaries, TITLE, "ddp or ordinary", "ddp_join or tail"))
    if arguments.json:
        report = {
            "torch": torch.__version__,
            "lightning": pl.__version__,
            "cores": os.cpu_count(),
            "world_size": dist.get_world_size(),
            "batch_sizes": batch_sizes,
            "parameters": sum(p.numel() for p in Workload(2, 1).network.parameters()),
            "cases": summaries,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def launch(arguments: argparse.Namespace) -> int:
    """Find the batch sizes and start the processes."""
    torch.set_num_threads(1)
    sizes = {milliseconds: calibrate(milliseconds) for milliseconds in STEPS}
    found = ", ".join(f"{milliseconds} ms with {size} samples" for milliseconds, size in sizes.items())
    print(f"Forward and backward take {found}. Measuring for about {arguments.seconds:.0f} s.", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={arguments.world_size}", "-m", "benchmarks.step_overhead"]
    command += [f"--seconds={arguments.seconds}", "--batch-sizes", *map(str, sizes.values())]
    command += ["--json", str(arguments.json)] if arguments.json else []
    command += ["--only", arguments.only]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=230, help="how long to measure")
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
