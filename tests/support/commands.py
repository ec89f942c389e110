"""Commands that examples and programs are started by."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 300.0  # seconds; on two cores none takes more than half a minute, and four of these under load
DIFFERENCE = r"Largest difference of a parameter from one process on the same schedule: (\S+)"


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled, once for all of pytest's processes."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            part = folder.with_suffix(".part")
            part.mkdir(exist_ok=True)
            make(part)
            part.rename(folder)
    return folder


def run(command: str) -> str:
    """Run Python with these arguments and return what it prints; it and all that it starts end by the deadline.

    What has not ended then prints its stack.
    """
    process = subprocess.Popen(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        parent = psutil.Process(process.pid)
        everyone = [*parent.children(recursive=True), parent]
        for number in (signal.SIGABRT, signal.SIGKILL):
            for each in everyone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(number)
            psutil.wait_procs(everyone, timeout=5)
        output, _ = process.communicate()
        pytest.fail(f"{command} did not end within {DEADLINE:.0f} s:\n{output}")
    assert process.returncode == 0, output
    return output
