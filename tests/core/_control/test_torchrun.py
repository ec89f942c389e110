"""What torchrun reports of a job in which one rank fails: that rank as the root cause, and why the others ended."""

import re
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import atexit, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_join import Join

def batches(rank):
    for step in range(5):
        if step == 2 and rank == 1:
            atexit.register(time.sleep, 3)  # it has something left to do, and the others have not
            raise RuntimeError("out of luck")
        yield torch.ones(1, 1)

dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Linear(1, 1))
with Join([net]) as join:
    for batch in join.batches(batches(dist.get_rank())):
        net(batch).sum().backward()
"""


def test_torchrun_names_the_rank_that_failed(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(_PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(program)]
    told = subprocess.run(launch, capture_output=True, text=True, timeout=90, check=False).stderr
    others, _, cause = told.partition("Root Cause (first observed failure):")
    assert re.findall(r"rank +: (\d)", cause) == ["1"], told
    assert "traceback : Rank 1 failed, so rank 0 cannot continue. Rank 1: RuntimeError: out of luck" in others
