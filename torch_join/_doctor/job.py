"""The ranks that the doctor runs on, and what they tell each other: JSON in the job's store, with a deadline each."""

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_join._control.run_polling import run_polling

T = TypeVar("T")

_REQUEST_SECONDS = 10.0  # for one request to the store, of those that wait for nobody
_PAUSE = 0.01
OUTSIDE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun's variable: "True" where none of the ranks hosts the store


class LateError(Exception):
    """Something was not done by its deadline.

    Attributes:
        stack: Where it was then, the innermost call last.
    """

    def __init__(self, seconds: float, stack: Sequence[str]) -> None:
        super().__init__(f"not done after {seconds:.0f} s")
        self.stack = [*stack]


def within(seconds: float, act: Callable[[], T]) -> T:
    """Return what `act` returns, or raise what it raises.

    Raises:
        LateError: It takes longer; its thread is left to itself.
    """
    deadline, thread = time.monotonic() + seconds, []

    def begin() -> T:
        thread.append(threading.get_ident())
        return act()

    def look() -> None:
        if time.monotonic() > deadline:
            frame = sys._current_frames().get(thread[0]) if thread else None
            raise LateError(seconds, traceback.format_stack(frame) if frame is not None else [])

    return run_polling(begin, look)


class SetupError(Exception):
    """The environment of the job is wrong.

    Attributes:
        remedy: What to do.
    """

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.remedy = remedy


@dataclass
class Job:
    """This process, as a rank of several.

    Attributes:
        rank: Its number.
        world_size: How many there are.
        local_rank: Its number on this host.
        local_world_size: How many there are on this host.
        store: The job's, once it is reached.
        device: What it trains on.
        missing: On rank 0, the ranks that did not answer when they were asked.
        importing: The process that imports all frameworks, where it has been started.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    store: dist.Store | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009  it cannot be changed
    missing: set[int] = field(default_factory=set)
    importing: "subprocess.Popen[str] | None" = None

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "Job | None":
        """Return what torchrun's variables say, if they are there.

        Raises:
            SetupError: They are no numbers, or no rank of that world size.
        """
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            return None
        rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if rank >= world_size:
            raise SetupError(f"RANK is {rank}, and WORLD_SIZE {world_size}", "Number the ranks from 0.")
        _number(environment, "MASTER_PORT")
        local_rank = _number(environment, "LOCAL_RANK", rank)
        return cls(rank, world_size, local_rank, _number(environment, "LOCAL_WORLD_SIZE", world_size))

    def reach_store(self, timeout: timedelta) -> None:
        """Connect to the store that torchrun hosts, or else rank 0, which waits for nobody there.

        Raises:
            SetupError: Another program has the port.
            ConnectionError: The store is not reached in time: torch tries once more, for half as long.
        """
        hosts = self.rank == 0 and os.environ.get(OUTSIDE) != "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            store = dist.TCPStore(host, port, is_master=hosts, wait_for_workers=False, timeout=timeout)
        except Exception as error:
            if "EADDRINUSE" in str(error):
                text = f"another program listens at {self.where} (EADDRINUSE)"
                raise SetupError(text, "Choose another MASTER_PORT, on all ranks.") from error
            raise ConnectionError(f"cannot reach the store at {self.where}: {error}") from error
        self.store = dist.PrefixStore(f"torch_join/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    @property
    def where(self) -> str:
        """Where the store is to be found, in words."""
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"

    def put(self, key: str, value: Any) -> None:
        """Tell all ranks something."""
        store = self._reached()
        within(_REQUEST_SECONDS, lambda: store.set(f"doctor/{key}", json.dumps(value)))

    def get(self, key: str, seconds: float) -> Any:
        """Return what a rank has told, or will."""
        store = self._reached()
        data = within(seconds + 1.0, lambda: _wait_and_get(store, f"doctor/{key}", seconds))
        return json.loads(data)

    def has(self, key: str) -> bool:
        """Whether a rank has told this."""
        store = self._reached()
        return within(_REQUEST_SECONDS, lambda: store.check([f"doctor/{key}"]))

    def share(self, name: str, value: Any, seconds: float) -> list[Any]:
        """Return what each rank says, by rank; all call this."""
        self.put(f"{name}/{self.rank}", value)
        return [self.get(f"{name}/{rank}", seconds) for rank in range(self.world_size)]

    def collect(self, name: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """Return what ranks have said by this name, by rank: those that do it in time, and have not ended."""
        found: dict[int, Any] = {}
        missing, deadline = {*ranks}, time.monotonic() + seconds
        while missing:
            for rank in sorted(missing):
                is_gone = self.has(gone(rank))  # asked first: it may have told that before
                if self.has(f"{name}/{rank}"):
                    found[rank] = self.get(f"{name}/{rank}", _REQUEST_SECONDS)
                if rank in found or is_gone:
                    missing.discard(rank)
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
        return found

    def why_gone(self, rank: int) -> str:
        """Say what is known of a rank that does not answer."""
        if self.has(gone(rank)):
            return f"its process ended with {self.get(gone(rank), _REQUEST_SECONDS)}"
        return "it has ended, is stopped, or never began: its own log says more"

    def part(self, seconds: float) -> None:
        """Have the store stay until all have heard the last of it: it may end with rank 0."""
        with suppress(Exception):
            self.put(f"end/{self.rank}", None)
            if self.rank == 0:
                self.collect("end", {*range(self.world_size)} - self.missing, seconds)

    def _reached(self) -> dist.Store:
        assert self.store is not None
        return self.store


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    said = environment.get(name, "" if default is None else str(default))
    if not said.isdecimal():
        raise SetupError(f"{name} is {said!r}", f"Set {name} to a whole number, as torchrun does.")
    return int(said)


def note_end(store: dist.Store, rank: int, how: str) -> None:
    """Tell the ranks of one that has ended: whoever has started it does, as reached by `OUTSIDE`."""
    store.set(f"torch_join/0/doctor/{gone(rank)}", json.dumps(how))


def gone(rank: int) -> str:
    """Return the key of a rank's end."""
    return f"gone/{rank}"


def _wait_and_get(store: dist.Store, key: str, seconds: float) -> bytes:
    store.wait([key], timedelta(seconds=seconds))
    return bytes(store.get(key))
