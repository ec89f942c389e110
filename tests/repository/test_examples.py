"""The examples run, as the commands that the docs name."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.covering import others_long
from tests.needs import has

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 300.0  # seconds; on two cores none takes more than half a minute, and four of these under load

# What each command's output must hold; a group is a number that must be next to zero.
DIFFERENCE = r"Largest difference of a parameter from one process on the same schedule: (\S+)"
COMMANDS = {
    "examples/torch_loop.py": DIFFERENCE,
    "examples/sharded_digits.py": DIFFERENCE,
    "examples/custom_joinable.py": "Rank 0: 5 inputs, 8 counted in the loop, 8 in all",
    "examples/lightning_digits.py": DIFFERENCE,
    "-m torch.distributed.run --standalone --nproc-per-node=3 examples/accelerate_digits.py": DIFFERENCE,
    "examples/accelerate_digits.py --notebook": DIFFERENCE,
    "examples/fabric_digits.py": DIFFERENCE,
    "examples/fabric_gpt.py": DIFFERENCE,
    "examples/transformers_gpt2.py": DIFFERENCE,
}


# One for each kind of loop.
SOME = [
    command
    for command in COMMANDS
    if re.search("torch_loop|lightning_digits|nproc.*accelerate|fabric_gpt|gpt2", command)
]


@pytest.mark.parametrize("command", others_long(COMMANDS, *SOME))
def test_command_runs(command: str) -> None:
    if "sharded" in command and not has("fully_shard on the CPU") and not torch.cuda.is_available():
        pytest.skip("needs fully_shard on the CPU")
    if "transformers" in command:
        pytest.importorskip("transformers")
    output = run(command)
    found = re.search(COMMANDS[command], " ".join(output.split()))
    assert found, output
    assert all(float(number) <= 1e-10 for number in found.groups()), output


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
