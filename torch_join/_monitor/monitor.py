"""`JoinMonitor`: how uneven the inputs of a loop are, and what that costs."""

import time
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

from torch_join._base.errors import JoinTypeError, JoinValueError, JoinWarning, name_ranks
from torch_join._control.channel import Channel
from torch_join._monitor.page import page
from torch_join._monitor.plot import check_can_draw, draw_timeline
from torch_join._monitor.records import EpochRecord, RankRecord

_NAME = "join-report.html"
_SECONDS, _SHARE = 1.0, 0.01  # that writing may take, of the time since the monitor was made
_Measured = tuple[bool, RankRecord]


class JoinMonitor:
    """Measures what uneven inputs cost, in each loop over `join.batches`, and writes a page that shows it.

    ```python
    monitor = JoinMonitor("report.html")
    for epoch in range(epochs):
        with Join([ddp, optimizer], monitor=monitor) as join:
            for batch in join.batches(loader):
                ...
    print(monitor.epochs[-1])
    ```

    All ranks give one. A step costs two looks at the clock; at a loop's end the ranks tell each other what they have
    measured, and the lowest one writes the files. A loop in which no model had a backward, such as an evaluation, is
    no epoch, nor is one without batches, nor one that an error ends.

    Seconds are those of each host's own clock, from where all ranks meet as the loop begins: clocks of different hosts
    need not agree. They are seconds of Python: work that a GPU has yet to do is not waited for.

    Args:
        report: Where to write the page: a file that ends in `.html` or `.htm`, or a folder, in which it is called
            `join-report.html`. It is one file, which loads nothing, and is replaced after each epoch, or less often
            where that takes more than a second and one percent of the time; in the end it has all epochs.
        plot: Where to write a PNG file with a bar per rank, by matplotlib (`pip install 'torch-join[plot]'`).

    Raises:
        JoinTypeError: `report` or `plot` is no path.
        JoinValueError: `plot` is given, and matplotlib is missing.

    Attributes:
        epochs: What all ranks did in each epoch, the same on every rank.

    Limits:
        An epoch that is resumed in its middle counts from there, and those before are not in the page. Where the
        number of ranks changes, the page shows the epochs with as many as the last one. A file that cannot be written
        is warned of. Of several process groups each one's lowest rank writes: give each group its own file.
    """

    def __init__(self, report: str | PathLike[str] | None = None, *, plot: str | PathLike[str] | None = None) -> None:
        self._report = None if report is None else _file_of(report)
        self._plot = None if plot is None else _checked(plot, "plot", "the PNG file to write", "timeline.png")
        if plot is not None:
            check_can_draw()
        self._rebalances = False
        self._unwritten: set[Path] = set()  # that were warned of
        self._made, self._spent = time.monotonic(), 0.0
        self._at_exit: Finalize | None = None  # where something is yet to be written
        self.epochs: list[EpochRecord] = []

    def add_loop(
        self, mine: RankRecord, channel: Channel, trains: bool, rebalances: bool, number: int | None = None
    ) -> EpochRecord | None:
        """Note a loop that has ended; all ranks call this, and tell each other what they have measured.

        Args:
            mine: What this rank has.
            channel: The ranks' channel.
            trains: Whether this rank knows of a backward in the loop.
            rebalances: Whether batches were rebalanced.
            number: The epoch's; by default they are counted here.

        Returns:
            What all ranks did, or `None` if none of them trained, or had a batch.
        """
        said = channel.gather((trains, mine), of=_Measured)
        if not (any(trained for trained, _ in said) and any(rank.batches for _, rank in said)):
            return None
        record = EpochRecord.of(len(self.epochs) if number is None else number, [rank for _, rank in said])
        self._rebalances = rebalances
        self.epochs.append(record)
        if channel.rank == 0:
            self.write_in_time()
        return record

    def write_in_time(self) -> None:
        """Write, or where that has taken its share of the time, do so after a later epoch or as the process ends."""
        if self._spent <= _SECONDS + _SHARE * (time.monotonic() - self._made):
            self.write()
        elif self._at_exit is None:
            self._at_exit = Finalize(None, self.write, exitpriority=0)

    def write_rest(self) -> None:
        """Write what was put off, if there is something: training ends."""
        if self._at_exit is not None:
            self.write()

    def write(self) -> None:
        """Write what was asked for, on one rank; a file that was there is replaced in one go."""
        epochs = [epoch for epoch in self.epochs if len(epoch.ranks) == len(self.epochs[-1].ranks)]
        if not epochs:
            return
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        begin = time.monotonic()
        if self._report is not None:
            self._try(self._report, lambda path: path.write_text(page(epochs, self._rebalances), encoding="utf-8"))
        if self._plot is not None:
            self._try(self._plot, lambda path: draw_timeline(epochs, path))
        self._spent += time.monotonic() - begin

    def _try(self, path: Path, write: Callable[[Path], object]) -> None:
        """Have a file written; warn, once, if it cannot be, as training goes on."""
        try:
            _replace(path, write)
        except Exception as error:
            if path not in self._unwritten:
                self._unwritten.add(path)
                JoinWarning.warn(
                    f"JoinMonitor cannot write {path}: {error}. Training goes on. Give it a path that can be written."
                )

    @property
    def steps(self) -> int:
        """How many steps there were in all epochs."""
        return sum(epoch.steps for epoch in self.epochs)


def check_monitored(monitored: Sequence[bool]) -> None:
    """Raise if some ranks have a monitor, by rank, and others none: they tell each other what they have measured.

    Raises:
        JoinValueError: So it is.
    """
    if any(monitored) and not all(monitored):
        having = name_ranks(rank for rank, has in enumerate(monitored) if has)
        lacking = name_ranks(rank for rank, has in enumerate(monitored) if not has)
        raise JoinValueError(
            f"A JoinMonitor is among the callbacks of {having}, and not of {lacking}. The ranks exchange their"
            " measurements: give all of them one, or none."
        )


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written beside `path`, in a folder of its own, then put in its place."""
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
            f"{name} is the path of {what}, got {path!r}. Write JoinMonitor({name}={example!r}), or leave `{name}` out."
        )
    return Path(path).absolute()
