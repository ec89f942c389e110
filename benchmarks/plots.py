"""Draw what steps cost, for the docs, from the tables in benchmarks/README.md: `python -m benchmarks.plots`.

Each row is a median of ratios of two steps that were measured in turns, with the interval in which the median lies.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "benchmarks" / "README.md"
OVERHEAD = ROOT / "docs" / "overhead.svg"
# By group: a row of the tables, after the title that it stands under, and what it is called in the picture.
GROUPS = {
    "even inputs, against the same without torch-join": {
        ("What a step costs", "even, sized, 15 ms, and the thread asleep"): "Lightning",
        ("What a sharded model costs", "Lightning's fully_shard, 15 ms, even: join / plain"): "Lightning, fully_shard",
        ("What a script with Fabric costs", "even, 15 ms"): "Fabric",
        ("What an Accelerate script costs", "even, 15 ms: accelerate_join / plain loop"): "Accelerate",
        ("What a script with transformers' Trainer costs", "even, 15 ms"): "Trainer",
        ("What a plain loop costs", "even, 15 ms: join.batches / plain DDP"): "plain loop",
        ("What a sharded model costs", "fully_shard, 15 ms, even: Join / plain"): "plain loop, fully_shard",
    },
    "a step in the tail, against one on even inputs": {
        ("What a step costs", "tail, 15 ms"): "Lightning",
        ("What a sharded model costs", "Lightning's fully_shard, 15 ms, tail / even"): "Lightning, fully_shard",
        ("What a sharded model costs", "fully_shard, 15 ms, tail / even"): "plain loop, fully_shard",
        ("What a sharded model costs", "FSDP1, 15 ms, tail / even"): "plain loop, FSDP1",
    },
    "a step in the tail, against torch's Join": {
        ("What a plain loop costs", "tail, 15 ms: join.batches / torch's Join"): "plain loop",
        ("What an Accelerate script costs", "tail, 15 ms: accelerate_join / Accelerate's"): "Accelerate",
    },
}


class Measured(NamedTuple):
    """A row: its ratio, and the interval around it."""

    ratio: float
    low: float
    high: float


def rows(text: str) -> dict[tuple[str, str], Measured]:
    """Return all rows that have an interval, by the title above and the first cell; of like ones the last.

    Tables of three ranks are left out: two cores run them.
    """
    found, title, columns = {}, "", ""
    for line in text.splitlines():
        if line.startswith("# "):
            title = line.removeprefix("# ")
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        columns = line if name.startswith("case") else columns
        for ratio, interval in itertools.pairwise(cells):
            ends = re.fullmatch(r"([\d.]+) to ([\d.]+)", interval)
            if ends and "three ranks" not in columns:
                found[title, name] = Measured(float(ratio), float(ends[1]), float(ends[2]))
    return found


def draw(axes: Axes, measured: dict[tuple[str, str], Measured]) -> None:
    """Draw the groups, one below the other."""
    place, places, labels = 0.0, [], []
    for number, (title, group) in enumerate(GROUPS.items()):
        axes.text(0.885, place - 0.9, title, fontsize=9, fontweight="bold", va="center")
        for name, label in group.items():
            ratio, low, high = measured[name]
            axes.plot([low, high], [place, place], color=f"C{number}", linewidth=3, solid_capstyle="butt", alpha=0.5)
            axes.plot([ratio], [place], "o", color=f"C{number}", markersize=6)
            axes.text(1.125, place, f"{ratio:.3f}", fontsize=8, va="center")
            places.append(place)
            labels.append(label)
            place += 1
        place += 1.6
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.set_yticks(places, labels, fontsize=9)
    axes.set_ylim(place - 1.8, -1.8)
    axes.set_xlim(0.88, 1.15)
    axes.set_xlabel("time of a step, as a ratio; forward and backward take 15 ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def main() -> None:
    figure = Figure(figsize=(8, 6.3), layout="constrained")
    draw(figure.subplots(), rows(TABLES.read_text()))
    figure.savefig(OVERHEAD, facecolor="white", metadata={"Date": None})
    print(OVERHEAD.relative_to(ROOT))


if __name__ == "__main__":
    main()
