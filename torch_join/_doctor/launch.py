"""Three ranks on this machine, where the doctor is asked for alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import torch.distributed as dist

from torch_join import __version__
from torch_join._doctor.job import OUTSIDE, note_end
from torch_join._doctor.report import Finding, document

_RANKS = 3
_LONGER = 30.0  # seconds, to start and to end, besides the checks
_ENDS_WITHIN = 3.0  # after rank 0
_LOOKS_EVERY = 0.05
PARENT = "TORCH_JOIN_DOCTOR_PARENT"  # the process that has started this rank
UNUSED = "TORCH_JOIN_DOCTOR_UNUSED"  # what the environment says of a job that was not asked
SAID = 3  # a rank's exit code where a check has failed and it has said so: Python ends with 1 by itself


def launch(is_json: bool, seconds: float) -> int:
    """Start the ranks, of which the first prints, and return its exit code.

    Args:
        is_json: Whether it prints a JSON document.
        seconds: How long the checks may take.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(_RANKS),
        "LOCAL_WORLD_SIZE": str(_RANKS),
        "TORCHELASTIC_RESTART_COUNT": "0",
        OUTSIDE: "True",
        PARENT: str(os.getpid()),
        UNUSED: ", ".join(_job_around(os.environ)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [sys.executable, "-m", "torch_join", "doctor", *(["--json"] if is_json else [])]
    processes: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of `finally`
    try:
        for rank in range(_RANKS):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env={**os.environ, **common, **own}))
        code = _wait(processes, store, time.monotonic() + seconds + _LONGER)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    if code in (0, SAID):
        return int(code == SAID)
    text = "rank 0 did not come to its end" if code is None else f"rank 0 ended with {name_of(code)}"
    finding = Finding("ranks", "failed", text, "What it has written to stderr says more.", is_broken=True)
    about = {"torch_join": __version__, "world_size": _RANKS, "seconds": None}
    print(document([finding], about) if is_json else finding.line)
    return 1


def _job_around(environment: Mapping[str, str]) -> list[str]:
    """Return what says that there is a job of several ranks, of which this process does not know its own."""
    sizes = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    found = [f"{name}={environment[name]}" for name in sizes if environment.get(name, "1") not in ("", "0", "1")]
    return [*found, *(f"{name}={environment[name]}" for name in ("MASTER_ADDR",) if name in environment)]


def end_without_parent() -> None:
    """End this rank without a word if what has started it has gone: what it finds then is of that."""
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        os._exit(1)


def watch_parent() -> None:
    """Do so from now on, wherever this rank waits."""

    def look() -> None:
        while True:
            end_without_parent()
            time.sleep(10 * _LOOKS_EVERY)

    if PARENT in os.environ:
        threading.Thread(target=look, daemon=True).start()


def _wait(processes: "list[subprocess.Popen[bytes]]", store: dist.Store, deadline: float) -> int | None:
    """Wait for rank 0, and then briefly for the others; return its exit code, or `None` if it is late."""
    first, known = processes[0], set[int]()
    while first.poll() is None:
        if time.monotonic() > deadline:
            return None
        for rank, process in enumerate(processes):
            if rank not in known and (code := process.poll()) is not None:
                known.add(rank)
                note_end(store, rank, name_of(code))
        time.sleep(_LOOKS_EVERY)
    end = time.monotonic() + _ENDS_WITHIN
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(_LOOKS_EVERY)
    return first.returncode


def name_of(code: int) -> str:
    """Write an exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    known = {number.value for number in signal.Signals}
    return f"signal {signal.Signals(-code).name if -code in known else -code}"
