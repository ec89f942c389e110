"""torchrun names the rank that failed as the root cause, and starts a job again where an agent has left."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

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


_ELASTIC = """
import json, os, sys, time, torch
import torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch_join import Join, UnpaddedDistributedSampler

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.arange(43), torch.randn(43, 3))
net = DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
sampler = UnpaddedDistributedSampler(data, shuffle=True)
join = Join([net, optimizer], weighting="samples")
saved, first = folder / "saved.pt", 0
if saved.exists():
    state = torch.load(saved, weights_only=False)
    net.module.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    join.load_state_dict(state["join"])
    first = state["epoch"]
with join, open(folder / f"log-{os.getpid()}", "w") as log:
    for epoch in range(first, 2):
        sampler.set_epoch(epoch)
        for ids, x in join.batches(DataLoader(data, 2, sampler=sampler)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            place = join.state_dict()
            if rank == join.active_ranks[0]:
                states = {"net": net.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**states, "join": place, "epoch": epoch}, folder / "new.pt")
                (folder / "new.pt").replace(saved)
            dist.barrier()  # where a step is saved, all have trained it
            print(json.dumps([epoch, join.step, world_size, ids.tolist()]), file=log, flush=True)
            time.sleep(0.3)
torch.save(net.module.state_dict(), folder / f"end-{rank}.pt")
dist.destroy_process_group()
"""


def logged(folder: Path) -> list[list]:
    """Return the epoch, the step, the number of ranks and the samples of each batch, of all ranks."""
    texts = [path.read_text() for path in folder.glob("log-*")]
    return [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("]")]


def wait_for(port: int) -> None:
    """Wait until something listens there."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.long
def test_a_job_goes_on_with_the_agent_that_is_left(tmp_path: Path) -> None:
    """Two agents of two ranks each; one leaves in the middle of an uneven epoch."""
    (tmp_path / "train.py").write_text(_ELASTIC)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3"]
    launch += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    launch += ["--rdzv-conf=last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"]
    launch += [str(tmp_path / "train.py"), str(tmp_path)]
    around = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agents = []
    try:
        for number in range(2):
            with open(tmp_path / f"agent-{number}", "w") as out:
                agents.append(subprocess.Popen(launch, env=around, stdout=out, stderr=out, start_new_session=True))
            wait_for(port)  # the first agent has the rendezvous
        deadline = time.monotonic() + 120
        while not any(row[1:3] == [3, 4] for row in logged(tmp_path)):
            assert time.monotonic() < deadline, (tmp_path / "agent-0").read_text()
            time.sleep(0.1)
        agents[1].send_signal(signal.SIGTERM)
        assert agents[0].wait(120) == 0, (tmp_path / "agent-0").read_text()
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    steps = defaultdict(list)
    for epoch, step, world_size, ids in logged(tmp_path):
        steps[epoch, step, -world_size] += ids
    assert {key[2] for key in steps} == {-4, -2}
    for epoch in range(2):
        trained = chain.from_iterable(ids for key, ids in steps.items() if key[0] == epoch)
        assert sorted(trained) == [*range(43)]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        x, net = torch.randn(43, 3), nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        for _, ids in sorted(steps.items(), key=lambda item: item[0][:2]):
            optimizer.zero_grad()
            net(x[ids]).square().mean().backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"end-{rank}.pt").items():
            assert torch.allclose(value, net.state_dict()[name], rtol=0, atol=1e-12)
