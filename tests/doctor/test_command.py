"""`python -m torch_join doctor`: alone, as ranks of a job, without any framework, and where a rank ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.covering import others_long
from torch_join import __version__

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["store", "versions", "backend", "links", "epoch", "names", "cost"]
DEADLINE = 150.0  # seconds; it takes 12 to 17 where nothing else runs on two cores
WITHOUT = "import os, sys; sys.modules.update(dict.fromkeys({frameworks}))\n"
FRAMEWORKS = ["lightning", "pytorch_lightning", "accelerate", "transformers", "torchmetrics"]


def examine(folder: Path, *command: str, site: str = "", **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the doctor; `site` is run first, in each of its processes."""
    (folder / "sitecustomize.py").write_text(site)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *(command or ("-m", "torch_join", "doctor", "--json"))],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def checks_of(said: str) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(said)["checks"]}


def test_alone(tmp_path: Path) -> None:
    done = examine(tmp_path)
    document = json.loads(done.stdout)
    checks = checks_of(done.stdout)
    verdicts = {name: check["verdict"] for name, check in checks.items()}
    # Other versions are tested too, and other processes may disturb what is measured.
    assert {**verdicts, "versions": "", "cost": ""} == {**dict.fromkeys(NAMES, "ok"), "versions": "", "cost": ""}, done
    assert (done.returncode, document["world_size"], document["torch_join"]) == (0, 3, __version__)
    assert document["verdict"] in ("ok", "warning")
    assert [each["batches"] for each in checks["epoch"]["data"]["ranks"]] == [0, 3, 5]
    assert checks["links"]["text"].startswith("all 3 ranks are connected")
    assert document["seconds"] < 60  # ten where nothing else runs


def test_an_environment_that_is_wrong(tmp_path: Path) -> None:
    variables = {"RANK": "abc", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = examine(tmp_path, **variables)
    assert done.returncode == 1
    assert checks_of(done.stdout)["setup"]["verdict"] == "failed"


@pytest.mark.parametrize("number", others_long([signal.SIGTERM, signal.SIGKILL], signal.SIGKILL))
def test_it_names_a_job_that_is_not_asked_and_leaves_no_process(number: signal.Signals) -> None:
    """The ranks write to the same pipe, which ends with the last of them."""
    command, environ = [sys.executable, "-m", "torch_join", "doctor"], {**os.environ, "SLURM_NTASKS": "4"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    job = process.stdout.readline()
    assert job.startswith("warning")
    assert "SLURM_NTASKS=4" in job
    assert process.stdout.readline().startswith(" ")  # what to do
    assert "all 3 ranks reach it" in process.stdout.readline()
    process.send_signal(number)
    said, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    failed = [line for line in said.splitlines() if line.startswith("failed")]
    assert all("lost the job's store" in line for line in failed), said
    assert number == signal.SIGKILL or not failed


def test_the_ranks_of_a_job_without_any_framework(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "torch_join", "doctor"]
    done = examine(tmp_path, *command, site=WITHOUT.format(frameworks=FRAMEWORKS))
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert done.returncode == 0, done
    assert [line.split()[1] for line in lines] == NAMES
    assert "all 2 ranks reach it" in lines[0]
    assert lines[NAMES.index("names")].endswith("all that is relied on is there: torch")


@pytest.mark.parametrize("rank", others_long([0, 2], 0))
def test_a_rank_that_ends_is_named(rank: int, tmp_path: Path) -> None:
    site = WITHOUT.format(frameworks=FRAMEWORKS) + f"if os.environ.get('RANK') == '{rank}': os._exit(7)\n"
    done = examine(tmp_path, site=site)
    assert done.returncode == 1
    assert checks_of(done.stdout)["ranks"]["text"] == f"rank {rank} ended with exit code 7"


SLEEPS = """
import os, sys, time
from dataclasses import replace
from torch_join import __main__
from torch_join._doctor import run

def sleep_on_rank_1(job):
    time.sleep(1000.0 if job.rank == 1 else 0.0)

run.CHECKS[2] = replace(run.CHECKS[2], act=sleep_on_rank_1, seconds=1.0)
sys.exit(__main__.main(["doctor", "--json"]))
"""


def test_a_rank_that_sleeps_is_named_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "sleeps.py"]
    done = examine(tmp_path, *command, site=WITHOUT.format(frameworks=FRAMEWORKS))
    checks = checks_of(done.stdout)
    assert done.returncode == 1
    assert checks["backend"]["text"].startswith("rank 1 did not answer in time")
    assert [checks[name]["verdict"] for name in NAMES] == ["ok", "ok", "failed", *["not run"] * 4]
    assert 'sleeps.py", line 8 in sleep_on_rank_1' in done.stderr
