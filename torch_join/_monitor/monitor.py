"""`JoinMonitor`: measures how uneven the inputs of a loop are, and the cost of that."""

import time
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from torch_join._base.errors import JoinTypeError, JoinValueError, JoinWarning, name_ranks
from torch_join._base.weighting import Weighting
from torch_join._control.channel import Channel
from torch_join._monitor.page import page
from torch_join._monitor.plot import check_can_draw, draw_timeline
from torch_join._monitor.records import EpochRecord, RankRecord

_NAME = "join-report.html"
_SECONDS, _SHARE = 1.0, 0.01  # writing may take so many seconds, plus this share of the time since the monitor was made
_Measured = tuple[bool, RankRecord]


class JoinMonitor:
    """Measures the cost of uneven inputs in each loop over `join.batches`, and writes a report page.

    ```python
    monitor = JoinMonitor("report.html")
    for epoch in range(epochs):
        with Join([ddp, optimizer], monitor=monitor) as join:
            for batch in join.batches(loader):
                ...
    print(monitor.epochs[-1])
    ```

    Pass a monitor on all ranks. Each step reads the clock twice; at the end of a loop, the ranks exchange their
    measurements, and the lowest rank writes the files. A loop does not count as an epoch if no model ran a backward in
    it (an evaluation, for example), if it had no batches, or if an error ended it.

    Seconds count from the meeting of all ranks at the start of the loop, so hosts' clocks need not agree. They measure
    Python code: the monitor does not wait for pending GPU work.

    Args:
        report: The path of the self-contained page: a file that ends in `.html` or `.htm`, or a folder for a
            `join-report.html`. The page is replaced after each epoch, or less often if writing takes more than a second
            plus one percent of the time. At the end, it shows all epochs.
        plot: The path of a PNG file with a bar per rank, drawn with matplotlib (`pip install 'torch-join[plot]'`).

    Raises:
        JoinTypeError: `report` or `plot` is not a path.
        JoinValueError: `plot` is given, but matplotlib is missing.

    Attributes:
        epochs: The records of all ranks in each epoch, the same on every rank.

    Limits:
        A resumed epoch counts from the batch where it resumes, and earlier epochs are not on the page. If the number of
        ranks changes, the page shows only epochs with the latest number. A file that cannot be written causes a
        warning. With several process groups, give each group its own file, because each group's lowest rank writes.
    """

    def __init__(self, report: str | PathLike[str] | None = None, *, plot: str | PathLike[str] | None = None) -> None:
        self._report = None if report is None else _file_of(report)
        self._plot = None if plot is None else _checked(plot, "plot", "the PNG file to write", "timeline.png")
        if plot is not None:
            check_can_draw()
        self._rebalances, self._weighting = False, "world"
        self._unwritten: set[Path] = set()  # paths for which there was a warning
        self._made, self._spent = time.monotonic(), 0.0
        self._at_exit: Finalize | None = None  # while files are yet to be written
        self.epochs: list[EpochRecord] = []

    def __getattr__(self, name: str) -> NoReturn:
        # A trainer that was given this monitor as a callback looks for a callback's hooks.
        kinds = "lightning_join.JoinMonitor or accelerate_join.transformers.JoinMonitor, with the same arguments"
        remedy = "" if name.startswith("_") else f". A trainer's callback is {kinds}"
        raise AttributeError(f"'JoinMonitor' object has no attribute {name!r}{remedy}")

    def add_loop(
        self,
        mine: RankRecord,
        channel: Channel,
        trains: bool,
        rebalances: bool,
        weighting: Weighting,
        number: int | None = None,
    ) -> EpochRecord | None:
        """Add a loop that has ended; all ranks call this, and exchange their measurements.

        Args:
            mine: This rank's measurements.
            channel: The channel between the ranks.
            trains: Whether this rank saw a backward in the loop.
            rebalances: Whether batches were rebalanced.
            weighting: How gradients were combined.
            number: The epoch's number; by default, epochs are counted here.

        Returns:
            The record of all ranks, or `None` if no rank trained, or no rank had a batch.
        """
        answers = channel.gather((trains, mine), of=_Measured)
        if not (any(trained for trained, _ in answers) and any(rank.batches for _, rank in answers)):
            return None
        record = EpochRecord.of(len(self.epochs) if number is None else number, [rank for _, rank in answers])
        self._rebalances = rebalances
        self._weighting = weighting if isinstance(weighting, str) else getattr(weighting, "__name__", "a function")
        self.epochs.append(record)
        if channel.rank == 0:
            self.write_in_time()
        return record

    def write_in_time(self) -> None:
        """Write the files now or, if writing has used up its share of the time, after a later epoch or at exit."""
        if self._spent <= _SECONDS + _SHARE * (time.monotonic() - self._made):
            self.write()
        elif self._at_exit is None:
            self._at_exit = Finalize(None, self.write, exitpriority=0)

    def write_rest(self) -> None:
        """Write the files if that was postponed; called when training has ended."""
        if self._at_exit is not None:
            self.write()

    def write(self) -> None:
        """Write the requested files, on one rank; an existing file is replaced atomically."""
        epochs = [epoch for epoch in self.epochs if len(epoch.ranks) == len(self.epochs[-1].ranks)]
        if not epochs:
            return
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        begin = time.monotonic()
        if self._report is not None:
            text = page(epochs, self._rebalances, self._weighting)
            self._try(self._report, lambda path: path.write_text(text, encoding="utf-8"))
        if self._plot is not None:
            self._try(self._plot, lambda path: draw_timeline(epochs, path))
        self._spent += time.monotonic() - begin

    def _try(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file; if that fails, warn once, since training continues."""
        try:
            _replace(path, write)
        except Exception as error:
            if path not in self._unwritten:
                self._unwritten.add(path)
                JoinWarning.warn(
                    f"JoinMonitor cannot write {path}: {error}. Training continues without it. Pass a writable path."
                )

    @property
    def steps(self) -> int:
        """The number of steps in all epochs."""
        return sum(epoch.steps for epoch in self.epochs)


def check_monitored(monitored: Sequence[bool]) -> None:
    """Raise if only some ranks have a monitor (`monitored`, by rank), since ranks exchange their measurements.

    Raises:
        JoinValueError: Some ranks have a monitor, and others do not.
    """
    if any(monitored) and not all(monitored):
        owners = name_ranks(rank for rank, has in enumerate(monitored) if has)
        lacking = name_ranks(rank for rank, has in enumerate(monitored) if not has)
        raise JoinValueError(
            f"A JoinMonitor is among the callbacks of {owners}, but not of {lacking}. Use it on all ranks or on none,"
            " because the ranks exchange their measurements."
        )


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in a temporary folder next to `path`, then move it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".join-report-", dir=path.parent) as folder:
        beside = Path(folder) / path.name
        write(beside)
        beside.replace(path)


def _file_of(report: str | PathLike[str]) -> Path:
    path = _checked(report, "report", "the page to write, or of its folder", "report.html")
    return path if path.suffix.lower() in (".html", ".htm") else path / _NAME


def _checked(path: object, name: str, what: str, example: str) -> Path:
    if not isinstance(path, (str, PathLike)):
        raise JoinTypeError(
            f"{name} must be the path of {what}, got {path!r}. Write JoinMonitor({name}={example!r}), or leave"
            f" `{name}` out."
        )
    return Path(path).absolute()
