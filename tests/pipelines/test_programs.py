"""Each program in examples/pipelines trains on every sample once per epoch, as one process does."""

import contextlib
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.covering import others_long
from tests.support.commands import DIFFERENCE, run
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.workers import Workers

FOLDER = Path(__file__).parents[2] / "examples" / "pipelines"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=3 "
# By program: what it reads with, and what starts it.
PROGRAMS = {
    "filtered_stream": ("torch", ""),
    "hf_parquet": ("datasets", ""),
    "litdata_stream": ("litdata", ""),
    "preempted": ("torchdata", ""),
    "token_buckets": ("accelerate", TORCHRUN),
    "torchdata_nodes": ("torchdata.nodes", ""),
    "webdataset_shards": ("webdataset", TORCHRUN),
}
# LitData writes in processes that it starts, which a worker of the tests may not; the other is two jobs.
ON_WORKERS = [name for name in PROGRAMS if name not in ("litdata_stream", "preempted")]
EPOCH = r"Epoch (\d): batches by rank: ([\d, ]+)\. Each of (\d+) samples was trained exactly once\."


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Import from the programs' folder, as a program that is started does."""
    path = [*sys.path]
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path[:] = path


def call(rank: int, name: str, *args: Any) -> str:
    """Run a program on a rank that has been started, and return what it prints."""
    before, handler, printed = dict(os.environ), signal.getsignal(signal.SIGTERM), io.StringIO()
    sys.modules.pop(name, None)  # as it is in a new process
    try:
        with importable(), accelerator_of(rank), contextlib.redirect_stdout(printed):
            program: Any = importlib.import_module(name)
            program.work(rank, *args) if hasattr(program, "work") else program.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
        os.environ.clear()
        os.environ.update(before)
    return printed.getvalue()


def assert_exact(printed: str) -> None:
    epochs = re.findall(EPOCH, printed)
    assert [epoch for epoch, *_ in epochs] == ["0", "1", "2"], printed
    for _, batches, samples in epochs:
        assert len({*batches.split(", ")}) > 1, f"even: {printed}"
        assert int(samples) > 50, printed
    found = re.search(DIFFERENCE, printed)
    assert found, printed
    assert float(found[1]) <= 1e-10, printed


@pytest.mark.parametrize("name", ON_WORKERS)
def test_program_on_ranks_that_there_are(workers: Workers, name: str) -> None:
    pytest.importorskip(PROGRAMS[name][0])
    assert_exact(workers.run(3, call, name)[0])


def test_a_job_that_is_preempted_and_one_that_goes_on(workers: Workers, tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    printed = workers.run(3, call, "preempted", tmp_path, True)
    assert printed == ["Epoch 1: preempted at step 5; ranks with a batch: (0, 1)\n", "", ""]
    assert_exact(workers.run(3, call, "preempted", tmp_path, False)[0])


@pytest.mark.parametrize("number", [2, 4])
def test_a_job_that_comes_back_with_another_number_of_ranks(workers: Workers, tmp_path: Path, number: int) -> None:
    pytest.importorskip("torchdata")
    workers.run(3, call, "preempted", tmp_path, True, True)
    printed = workers.run(number, call, "preempted", tmp_path, False, True)[0]
    assert re.findall(EPOCH, printed)[1] == ("1", ", ".join(["7"] * number), "300")
    assert float(re.findall(DIFFERENCE, printed)[0]) <= 1e-10


@pytest.mark.parametrize("name", others_long(PROGRAMS))
def test_command_runs(name: str) -> None:
    needed, start = PROGRAMS[name]
    pytest.importorskip(needed)
    assert_exact(run(f"{start}examples/pipelines/{name}.py"))


def test_each_program_is_run_and_short() -> None:
    programs = {path.stem: path for path in FOLDER.glob("*.py") if path.stem != "one_process"}
    assert programs.keys() == PROGRAMS.keys()
    for path in programs.values():
        assert len(path.read_text().splitlines()) < 100, path


def compare(rank: int, trained: list[list[list[list[int]]]]) -> str:
    """Compare a model that was not trained at all; return why the comparison fails."""
    with importable():
        shared: Any = importlib.import_module("one_process")
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as raised:
        shared.check_digits(trained[rank], shared.model_and_optimizer()[0], range(4))
    return str(raised.value)


@pytest.mark.parametrize(
    ("trained", "why"),
    [
        ([[[[0, 1]]], [[[2], [2, 3]]]], r"Epoch 0: trained on too often Counter\({2: 1}\), too seldom Counter\(\)"),
        ([[[[0, 1]]], [[[2]]]], r"Epoch 0: trained on too often Counter\(\), too seldom Counter\({3: 1}\)"),
        ([[[[0, 1]]], [[[2], [3]]]], "The parameters differ from those of one process"),
    ],
)
def test_the_comparison_notices(workers: Workers, trained: Any, why: str) -> None:
    for found in workers.run(2, compare, trained):
        assert re.match(why, found)
