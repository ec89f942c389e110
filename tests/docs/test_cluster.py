"""The blocks of the page "On a cluster" run, on two processes: by their launchers, or by what sets their variables."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import others_long

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
# Trains on two ranks, of which the first has one batch and the other three, and says what came of it.
TRAIN = """
import os, torch, torch.distributed as dist
from torch_join import Join
dist.init_process_group("gloo")
rank = dist.get_rank()
assert dist.get_world_size() == 2 and os.environ.get("LOCAL_RANK", str(rank)) == str(rank), os.environ
model = torch.nn.Linear(1, 1, bias=False).double()
torch.nn.init.ones_(model.weight)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
with Join([ddp, optimizer]) as join:
    for x in join.batches([torch.full((1, 1), 1.0 + rank).double()] * (1, 3)[rank]):
        optimizer.zero_grad()
        ddp(x).sum().backward()
        optimizer.step()
with open(f"weight.{rank}", "w") as file:
    file.write(str(model.weight.item()))
dist.destroy_process_group()
"""
WEIGHT = 1 - 0.1 * (1 + 2) / 2 - 2 * 0.1 * 2 / 2
# A launcher that starts two ranks on this host, each with the variables that the real one sets.
STAND_IN = """#!{python}
import os, subprocess, sys
args, names = sys.argv[1:], {names!r}
shared = dict(each.split("=", 1) for flag, each in zip(args, args[1:]) if flag == "-x")
command = args[args.index({first!r}):]
ranks = [
    subprocess.Popen(command, env={{**os.environ, **shared, **dict(zip(names, (str(rank), str(rank), "2")))}})
    for rank in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""
OMPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE")]
STAND_INS = {
    "SLURM": {"srun": (["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"], "bash")},
    "mpirun": {"mpirun": (OMPI, "bash")},
    "DeepSpeed's launcher": {"deepspeed": (["RANK", "LOCAL_RANK", "WORLD_SIZE"], "train.py")},
}
# How a block for 16 processes on two hosts becomes one for two on this one.
HERE = {
    "nnodes=2": "nnodes=1",
    "nproc-per-node=8": "nproc-per-node=2",
    "num_machines=2": "num_machines=1",
    "num_processes=16": "num_processes=2",
    "node0": "127.0.0.1",
    "python train.py": f"{sys.executable} train.py",
    "torchrun": f"{sys.executable} -m torch.distributed.run",
    "accelerate launch": f"{sys.executable} -m accelerate.commands.launch",
}


def block(section: str, language: str) -> str:
    """Return the first block of a section."""
    found = re.search(rf"^## {re.escape(section)}\n.*?^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, section
    return found[1]


def check(command: list[str], folder: Path, **variables: str) -> None:
    """Run a job in a folder, and compare what its ranks have trained."""
    (folder / "train.py").write_text(TRAIN)
    path = os.pathsep.join([str(folder), *os.environ["PATH"].split(os.pathsep)])
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert float((folder / f"weight.{rank}").read_text()) == pytest.approx(WEIGHT, abs=1e-12)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("section", others_long([*STAND_INS, "torchrun", "accelerate launch"], "SLURM"))
def test_a_block_of_the_page_trains(tmp_path: Path, section: str) -> None:
    if section == "accelerate launch":
        pytest.importorskip("accelerate")
    script, port = block(section, "bash"), free_port()
    for there, here in {**HERE, "29500": str(port), "29400": str(port)}.items():
        script = script.replace(there, here)
    variables = {}
    for name, (names, first) in STAND_INS.get(section, {}).items():
        (tmp_path / name).write_text(STAND_IN.format(python=sys.executable, names=names, first=first))
        (tmp_path / name).chmod(0o700)
    if section == "SLURM":
        (tmp_path / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\necho other\n")
        (tmp_path / "scontrol").chmod(0o700)
        variables = {"SLURM_JOB_NODELIST": "host[0-1]", "SLURM_JOB_ID": str(port - 10000)}
    if section == "DeepSpeed's launcher":  # which runs Python, and passes on addresses
        stand_in = (tmp_path / "deepspeed").read_text().replace("Popen(command", "Popen([sys.executable, *command]")
        (tmp_path / "deepspeed").write_text(stand_in)
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    check(["bash", "-c", script], tmp_path, **variables)


def test_pods_of_the_page_have_what_a_rank_needs(tmp_path: Path) -> None:
    pods = block("Kubernetes: PyTorchJob", "yaml")
    assert "command: [python, train.py]" in pods
    assert sum(map(int, re.findall(r"replicas: (\d+)", pods))) == 16
    launch = f"RANK=0 {sys.executable} train.py & RANK=1 {sys.executable} train.py && wait $!"
    operator = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    check(["bash", "-c", launch], tmp_path, **operator)


def test_each_launcher_has_its_block() -> None:
    sections = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert {*STAND_INS, "torchrun", "accelerate launch", "Kubernetes: PyTorchJob"} | {"What was tested"} == {*sections}
