"""Runs a drawn program on a rank, and notes where it has been and how it has ended, in a file that outlives it."""

import importlib
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.hangs.script import Case, Script
from torch_join import JoinError
from torch_join.integration import own_loops

_LOOKS_EVERY = 0.2  # seconds
_OWN = str(Path(__file__).parent)


@dataclass
class Place:
    """A line of a program, and when its rank came there."""

    file: str
    line: int
    function: str
    since: float


@dataclass
class Record:
    """What is known of a rank.

    Attributes:
        places: Where it has been.
        ended: When its program ended; 0 where it has not.
        error: The kind of what it raised.
        by_name: Whether that was a `JoinError`.
        text: Its message, with those of its causes.
        said: What it has logged, and was warned of.
        parameters: What it has in the end.
    """

    places: list[Place] = field(default_factory=list)
    ended: float = 0.0
    error: str = ""
    by_name: bool = False
    text: str = ""
    said: list[str] = field(default_factory=list)
    parameters: list[list[float]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @property
    def stay(self) -> tuple[Place, float] | None:
        """Where it has been longest, and for how long."""
        ends = [*(place.since for place in self.places[1:]), self.ended or time.time()]
        stays = [(place, end - place.since) for place, end in zip(self.places, ends, strict=False)]
        return max(stays, key=lambda stay: stay[1], default=None)


def _line_of(thread: int) -> tuple[str, int, str] | None:
    """The innermost line of a program in which a thread is."""
    frame: Any = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OWN) and code.co_filename != __file__:
            return Path(code.co_filename).name, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


class _Noting(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def noting(path: Path) -> Iterator[Record]:
    """Note where this thread is, until the end of this."""
    record, thread, over = Record(), threading.get_ident(), threading.Event()

    def look() -> None:
        noted = 0
        while not over.wait(_LOOKS_EVERY):
            line, last = _line_of(thread), record.places[-1] if record.places else None
            if line is not None and (last is None or line != (last.file, last.line, last.function)):
                record.places.append(Place(*line, since=time.time()))
            if noted < (noted := len(record.places) + len(record.said)):
                record.write(path)

    handler = _Noting(record.said)
    logger = logging.getLogger("torch_join")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield record
    except BaseException as error:
        record.error, record.by_name, record.text = type(error).__name__, isinstance(error, JoinError), _text(error)
        raise
    finally:
        record.ended = time.time()
        record.said += [str(each.message) for each in caught]
        over.set()
        looker.join()
        record.write(path)
        logger.removeHandler(handler)
        logger.setLevel(level)


def _text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text if cause is None else f"{text} <- {_text(cause)}"


def run(rank: int, case: Case, folder: str) -> None:
    """Run a case's program; if it raises, end the process, as a program's would."""
    from tests.soak.hangs import programs, slips, slowness

    script = Script(rank, case)
    (slowness.slow_down if case.seconds else slips.commit)(script)
    try:
        with noting(Path(folder) / f"{rank}.json") as record:
            own_loops.to_the_end(programs.FRONT_ENDS[case.front_end], script)
            record.parameters = [p.flatten().tolist() for p in programs.parameters(script)]
    except BaseException:
        os._exit(1)


# What takes seconds to import.
_IMPORTS = {"fsdp1": "sharded", "fsdp2": "sharded", "manual": "lightning"}


def prepare(rank: int, front_end: str) -> None:
    """Import what a program needs, before its time counts."""
    importlib.import_module("tests.soak.hangs.programs")
    importlib.import_module(f"tests.support.front_ends.{_IMPORTS.get(front_end, front_end)}")


def records(folder: str, world_size: int) -> Sequence[Record]:
    """Read what the ranks have noted."""
    found = []
    for rank in range(world_size):
        path = Path(folder) / f"{rank}.json"
        try:
            noted = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # it was killed while it wrote
            found.append(Record())
            continue
        places = [Place(**each) for each in noted.pop("places")]
        found.append(Record(places, **noted))
    return found
