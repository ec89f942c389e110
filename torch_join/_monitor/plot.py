"""A bar per rank that shows when it was active and joined, as a PNG file by matplotlib."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from torch_join._base.errors import JoinValueError
from torch_join._monitor.records import EpochRecord

_ACTIVE, _JOINED = "#4c72b0", "#dddddd"
_BARS = {_ACTIVE: "active", _JOINED: "joined"}


def check_can_draw() -> None:
    """Raise if matplotlib cannot be imported.

    Raises:
        JoinValueError: It is missing or broken; the message says what to install.
    """
    try:
        import_module("matplotlib.figure")
    except Exception as error:
        raise JoinValueError(
            f"JoinMonitor(plot=...) draws with matplotlib, which cannot be imported ({error}):"
            " `pip install 'torch-join[plot]'`, or leave `plot` out."
        ) from error


def draw_timeline(epochs: Sequence[EpochRecord], path: Path) -> None:
    """Write a bar per rank, over the epochs' seconds, as a PNG file."""
    # Not by pyplot, whose figures and backend belong to the user.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    world_size = len(epochs[0].ranks)
    figure = Figure(figsize=(10, min(30.0, 1.5 + 0.3 * world_size)), layout="constrained")
    axes = figure.subplots()
    bars: dict[str, list[list[tuple[float, float]]]] = {color: [[] for _ in range(world_size)] for color in _BARS}
    start = 0.0
    for epoch in epochs:
        axes.axvline(start, color="black", linewidth=0.5)
        for number, rank in enumerate(epoch.ranks):
            bars[_ACTIVE][number].append((start, rank.active_seconds))
            bars[_JOINED][number].append((start + rank.active_seconds, rank.seconds - rank.active_seconds))
        start += epoch.seconds
    for color, label in _BARS.items():
        for number, spans in enumerate(bars[color]):
            axes.broken_barh(spans, (number - 0.4, 0.8), color=color, label=None if number else label)
    axes.set(xlim=(0, start or 1), xlabel="seconds of training epochs, one after the other", ylabel="rank")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
