"""Paired measurements on a machine whose speed drifts, and which other programs use too."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

QUIET = 0.15  # how much of one core, on average, other programs may take during a pair that counts
STAT = Path("/proc/stat")


class Pair(NamedTuple):
    """Two medians in milliseconds per step, and how many cores other programs took meanwhile."""

    reference: float
    compared: float
    others: float


@dataclass
class Case:
    """Something measured in pairs: a reference and what is compared with it."""

    name: str
    measure: Callable[[bool], tuple[float, float]]
    target: float | None
    pairs: list[Pair] = field(default_factory=list)

    def add_pair(self, swap: bool) -> None:
        begin, used = time.perf_counter(), processor_seconds_of_others()
        pair = self.measure(swap)
        used = processor_seconds_of_others() - used
        self.pairs.append(Pair(*pair, others=used / (time.perf_counter() - begin)))

    def summary(self) -> dict[str, Any]:
        """Summarize the quiet pairs, or all if there is none."""
        quiet = [pair for pair in self.pairs if pair.others <= QUIET]
        pairs = quiet or self.pairs
        ratios = torch.tensor([pair.compared / pair.reference for pair in pairs], dtype=torch.float64)
        return {
            "name": self.name,
            "reference_ms": statistics.median(pair.reference for pair in pairs),
            "compared_ms": statistics.median(pair.compared for pair in pairs),
            "ratio": ratios.quantile(0.5).item(),
            "interval": bootstrap_interval(ratios),
            "target": self.target,
            "quiet": len(quiet),
            "pairs": self.pairs,
        }


def processor_seconds_of_others() -> float:
    """Return the processor time that was taken by other programs than this one's processes."""
    if not STAT.exists():
        return 0.0
    own = torch.tensor(time.process_time(), dtype=torch.float64)
    dist.all_reduce(own)
    ticks = [int(word) for word in STAT.read_text().split()[1:9]]
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK") - own.item()


def bootstrap_interval(values: Tensor, resamples: int = 10_000) -> list[float]:
    """Return the 95% confidence interval of the median."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (resamples, len(values)), generator=generator)
    medians = values[picks].quantile(0.5, dim=1)
    return medians.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()


def take_turns(cases: Sequence[Case], seconds: float) -> None:
    """Let the cases take turns; rank 0's clock decides when it is enough."""
    for case in cases:
        case.measure(False)  # warm up
    deadline = time.perf_counter() + seconds
    for turn in range(1_000_000):
        enough = torch.tensor(turn >= 2 and time.perf_counter() > deadline)
        dist.broadcast(enough, 0)
        if enough:
            break
        for case in cases:
            case.add_pair(swap=turn % 2 == 1)


def table_of(summaries: Sequence[dict[str, Any]], title: str, reference: str, compared: str) -> Table:
    """Return the summaries of cases as a table; the arguments after them are its title and column heads."""
    table = Table(title=title)
    for column in ("case", reference, compared, "ratio", "95% interval", "target", "quiet pairs"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for summary in summaries:
        low, high = summary["interval"]
        target = summary["target"]
        table.add_row(
            summary["name"],
            f"{summary['reference_ms']:.2f}",
            f"{summary['compared_ms']:.2f}",
            f"{summary['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
            "" if target is None else f"{target:.2f} {'met' if summary['ratio'] <= target else 'MISSED'}",
            f"{summary['quiet']} of {len(summary['pairs'])}",
        )
    return table
