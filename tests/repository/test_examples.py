"""The examples run, as the commands that the docs name, or in processes that there are."""

import contextlib
import importlib
import io
import os
import re
from typing import Any
from unittest import mock

import pytest
import torch

from tests.covering import others_long
from tests.needs import has
from tests.support.commands import DIFFERENCE, ROOT, run
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.workers import Workers

# What each command's output must hold; a group is a number that must be next to zero.
COMMANDS = {
    "-m torch.distributed.run --standalone --nproc-per-node=2 examples/quickstart.py": (
        r"the largest difference from one process is ([\d.e+-]+)"
    ),
    "examples/torch_loop.py": DIFFERENCE,
    "examples/sharded_digits.py": DIFFERENCE,
    "examples/experts.py": DIFFERENCE,
    "examples/recommender.py": DIFFERENCE,
    "examples/custom_joinable.py": "Rank 0: 5 inputs, 8 counted in the loop, 8 in all",
    "examples/lightning_digits.py": DIFFERENCE,
    "-m torch.distributed.run --standalone --nproc-per-node=3 examples/accelerate_digits.py": DIFFERENCE,
    "examples/accelerate_digits.py --notebook": DIFFERENCE,
    "examples/fabric_digits.py": DIFFERENCE,
    "examples/fabric_gpt.py": DIFFERENCE,
    "examples/transformers_gpt2.py": DIFFERENCE,
    "examples/ray_digits.py": DIFFERENCE,
}


# What each of them imports takes longer than what it trains: one is run as a command by default, and some below.
@pytest.mark.parametrize("command", others_long(COMMANDS, *(each for each in COMMANDS if "quickstart" in each)))
def test_command_runs(command: str) -> None:
    if "sharded" in command and not has("fully_shard on the CPU") and not torch.cuda.is_available():
        pytest.skip("needs fully_shard on the CPU")
    for package, name in (("transformers", "transformers"), ("torchrec", "recommender"), ("ray", "ray_")):
        if name in command:
            pytest.importorskip(package)
    check(command, run(command))


def test_rays_page_shows_lines_of_its_example() -> None:
    page, example = ((ROOT / name).read_text() for name in ("docs/ray.md", "examples/ray_digits.py"))
    shown = "".join(re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)).split("\n")
    assert len(shown) > 10
    assert {line.strip() for line in shown} <= {line.strip() for line in example.split("\n")}


def check(command: str, output: str) -> None:
    found = re.search(COMMANDS[command], " ".join(output.split()))
    assert found, output
    assert all(float(number) <= 1e-10 for number in found.groups()), output


def call(rank: int, module: str, name: str, args: tuple[Any, ...]) -> str:
    """Call a function of an example on a rank that has been started, and return what it prints."""
    before, printed = dict(os.environ), io.StringIO()
    try:
        with accelerator_of(rank), contextlib.redirect_stdout(printed):
            getattr(importlib.import_module(module), name)(*args)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return printed.getvalue()


def test_fabrics_runs_on_ranks_that_there_are(workers: Workers) -> None:
    printed, _ = workers.run(2, call, "examples.fabric_gpt", "main", ())
    check("examples/fabric_gpt.py", printed)


def test_accelerates_runs_on_ranks_that_there_are(workers: Workers) -> None:
    printed, *_ = workers.run(3, call, "examples.accelerate_digits", "work", ())
    check("examples/accelerate_digits.py --notebook", printed)


def test_transformers_runs_on_ranks_that_there_are(workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    example = importlib.import_module("examples.transformers_gpt2")

    def spawn(function: Any, args: tuple[Any, ...], nprocs: int) -> None:
        workers.run(nprocs, call_with_its_rank, function.__module__, function.__name__, args)

    with mock.patch.object(torch.multiprocessing, "spawn", spawn), accelerator_of(0):
        example.main()
    check("examples/transformers_gpt2.py", capsys.readouterr().out)


def call_with_its_rank(rank: int, module: str, name: str, args: tuple[Any, ...]) -> None:
    call(rank, module, name, (rank, *args))
