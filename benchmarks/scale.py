"""Measure what ranks pay to tell each other things.

    python -m benchmarks.scale [--world-sizes 2 8 16] [--hosts 1] [--beats 400] [--rounds 5] [--json PATH]

Real processes: what a barrier costs each of them in CPU time, all threads together. And how many messages a rank sends
and gets per step of a loop.
With `--hosts`, the ranks are dealt to as many hosts, which are all this one.

`busy` says what the main thread does between saying and hearing: nothing (it waits, and reads), Python, or small
operations of torch; it is measured at up to eight ranks.

The last table is a model, and no measurement: what a beat costs at other sizes if a process pays as much for each of
its connections there as here, for a parent as for a child. It is fitted to the largest of the sizes but one, and held
against the largest.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from torch_join import Join
from torch_join._control._links import wiring
from torch_join._control._links.layout import Layout
from torch_join.integration import open_channel

CONTEXT = multiprocessing.get_context("forkserver")
MODELLED = (64, 256, 1024)
BUSY_AT_MOST = 8  # ranks
WORK_SECONDS = 0.002


def cpu_seconds() -> float:
    """Return what this process has used, all threads together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def do_nothing() -> None:
    """Wait."""


def run_python() -> None:
    """Hold the interpreter's lock as Python does."""
    end = time.perf_counter() + WORK_SECONDS
    while time.perf_counter() < end:
        sum(range(50))


def run_torch() -> None:
    """Give the lock away often, for short."""
    end = time.perf_counter() + WORK_SECONDS
    x = torch.ones(32, 32)
    while time.perf_counter() < end:
        x = x @ x / 32


WORK: dict[str, Callable[[], None]] = {"nothing": do_nothing, "Python": run_python, "torch": run_torch}


# ---------------------------------------------------------------- in the processes


def work(connection: Any, rank: int, world_size: int, path: str, hosts: int) -> None:
    """Measure what the parent asks for."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)
    with mock.patch.object(wiring, "this_host", return_value=f"host {rank * hosts // world_size}"):
        channel = open_channel()
        connection.send(None)
        while (asked := connection.recv()) is not None:
            kind, *arguments = asked
            if kind == "loop":
                connection.send(messages_of_a_loop(*arguments))
            else:
                connection.send(beat(channel, *arguments))


def beat(channel: Any, beats: int, busy: str) -> tuple[float, float]:
    """Return the microseconds that a beat takes, and what it costs this process beside the work."""
    for _ in range(20):
        channel.barrier()
    channel.gather(None)
    alone = 0.0
    if busy != "nothing":
        start = cpu_seconds()
        for _ in range(beats):
            WORK[busy]()
        alone = cpu_seconds() - start
        channel.gather(None)
    start, used = time.perf_counter(), cpu_seconds()
    for _ in range(beats):
        channel.arrive(1)
        WORK[busy]()
        channel.wait()
    seconds, used = time.perf_counter() - start, cpu_seconds() - used - alone
    return 1e6 * seconds / beats, 1e6 * used / beats


def messages_of_a_loop(steps: int, may_break: bool) -> list[int]:
    """Return how many messages this rank has sent and got in a loop of as many steps."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model, optimizer], may_break=may_break) as join:
        links = join._driver.tail_log.channel._tree.links
        before = [*links.messages]
        for x in join.batches([torch.ones(2, 4)] * steps):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [after - then for after, then in zip(links.messages, before, strict=True)]


# ---------------------------------------------------------------- the parent


class Job:
    """The processes of one world size."""

    def __init__(self, world_size: int, hosts: int) -> None:
        self._processes, self._ranks = [], []
        path = tempfile.mktemp(prefix="scale-")
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=work, args=(theirs, rank, world_size, path, hosts), daemon=True)
            process.start()
            self._processes.append(process)
            self._ranks.append(ours)
        for connection in self._ranks:
            connection.recv()

    def ask(self, *each: tuple[Any, ...]) -> list[Any]:
        """Have the ranks do something: all the same, or each its own."""
        for connection, asked in zip(self._ranks, each if len(each) > 1 else each * len(self._ranks), strict=True):
            connection.send(asked)
        return [connection.recv() for connection in self._ranks]

    def close(self) -> None:
        """End the processes."""
        for connection in self._ranks:
            connection.send(None)
        for process in self._processes:
            process.kill()
            process.join()


def measure_beats(job: Job, beats: int, rounds: int, busy: str) -> Iterator[dict[str, Any]]:
    """Yield a row."""
    rows = []
    for _ in range(rounds):
        took, used = zip(*job.ask(("beat", beats, busy)), strict=True)
        rows.append((statistics.mean(took), statistics.mean(used), max(used)))
    latency, mean, busiest = map(statistics.median, zip(*rows, strict=True))
    yield {"busy": busy, "beat": latency, "mean": mean, "busiest": busiest}


def measure_loops(job: Job, world_size: int) -> Iterator[dict[str, Any]]:
    """Yield messages per step: the difference between a long and a short loop."""
    half = world_size // 2
    for name, may_break, lengths in (
        ("even, sized", False, lambda steps: [steps] * world_size),
        ("even, streaming", True, lambda steps: [steps] * world_size),
        ("tail", False, lambda steps: [5] * half + [steps] * (world_size - half)),
    ):
        short, long = (job.ask(*(("loop", steps, may_break) for steps in lengths(n))) for n in (20, 60))
        each = [sum(b) - sum(a) for a, b in zip(short, long, strict=True)]
        for who, ranks in (("joined", each[:half]), ("active", each[half:])) if name == "tail" else (("all", each),):
            yield {"loop": name, "of": who, "mean": statistics.mean(ranks) / 40, "busiest": max(ranks) / 40}


def connections(world_size: int, hosts: int) -> tuple[float, int]:
    """Return how many connections a rank has, on average and at most."""
    names = [str(rank * hosts // world_size) for rank in range(world_size)]
    counts = []
    for rank in range(world_size):
        layout = Layout(names, rank)
        counts.append(len(layout.children) + (layout.parent is not None))
    return statistics.mean(counts), max(counts)


def modelled(rows: list[dict[str, Any]], hosts: int) -> Iterator[tuple[str, ...]]:
    """Yield the model's rows."""
    links = [row for row in rows if row["busy"] == "nothing"]
    if len(links) < 2:
        return
    fitted = links[-2]
    mean, most = connections(fitted["ranks"], hosts)
    per_connection = (fitted["busiest"] - fitted["mean"]) / (most - mean) if most > mean else 0.0
    fixed = fitted["mean"] - per_connection * mean
    for world_size in sorted({links[-1]["ranks"], *MODELLED}):
        mean, most = connections(world_size, hosts)
        seen = [f"{row['mean']:.0f} / {row['busiest']:.0f}" for row in links if row["ranks"] == world_size]
        model = f"{fixed + per_connection * mean:.0f} / {fixed + per_connection * most:.0f}"
        yield str(world_size), f"{mean:.1f} / {most}", model, *(seen or ["-"])


def show(console: Console, title: str, columns: list[str], rows: list[tuple[str, ...]]) -> None:
    """Print a table."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 8, 16, 32, 64])
    parser.add_argument("--hosts", type=int, default=1, help="how many hosts the ranks are dealt to, in name")
    parser.add_argument("--beats", type=int, default=400, help="of one turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loops", action="store_true", help="count the messages of loops, too")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to a file")
    arguments = parser.parse_args()
    CONTEXT.set_forkserver_preload(["torch.distributed"])
    beats: list[dict[str, Any]] = []
    loops: list[dict[str, Any]] = []
    for world_size in arguments.world_sizes:
        job = Job(world_size, min(arguments.hosts, world_size))
        for busy in WORK if world_size <= BUSY_AT_MOST else ["nothing"]:
            for row in measure_beats(job, arguments.beats, arguments.rounds, busy):
                beats.append({"ranks": world_size, **row})
        if arguments.loops:
            loops += [{"ranks": world_size, **row} for row in measure_loops(job, world_size)]
        job.close()
    console = Console(width=125)
    show(
        console,
        "Microseconds per beat: what it takes, and CPU",
        ["ranks", "busy", "takes", "mean rank", "busiest rank"],
        [
            (
                str(r["ranks"]),
                r["busy"],
                *(f"{r[each]:.0f}" for each in ("beat", "mean", "busiest")),
            )
            for r in beats
        ],
    )
    if loops:
        show(
            console,
            "Messages per rank and step, sent and got",
            ["ranks", "loop", "of", "mean", "busiest"],
            [(str(r["ranks"]), r["loop"], r["of"], f"{r['mean']:.2f}", f"{r['busiest']:.2f}") for r in loops],
        )
    show(
        console,
        "A model of CPU microseconds per beat: mean / busiest rank",
        ["ranks", "connections", "model", "measured"],
        [*modelled(beats, arguments.hosts)],
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"beats": beats, "loops": loops}, indent=1))


if __name__ == "__main__":
    main()
