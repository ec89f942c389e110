"""What a step costs in a plain loop, in counts: the calls of this project's functions, even and in the tail."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_join
from tests.support.workers import Workers
from torch_join import Join

OURS = str(Path(torch_join.__file__).parent)


def count(rank: int, sharded: bool) -> list[int]:
    """Return the calls in each step of this rank, which has 8, where the other one has 4."""
    calls, steps = 0, []

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(OURS)

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with Join([model, optimizer]) as join:
        loop = iter(join.batches([torch.ones(2, 4, dtype=torch.float64)] * (4 if rank else 8)))
        sys.setprofile(note)
        for batch in loop:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            steps.append(calls)
            calls = 0
        sys.setprofile(None)
    return steps


# How many there are depends a little on whether a message of another rank is there already.
@pytest.mark.parametrize(("sharded", "even", "tail"), [(False, 50, 220), (True, 120, 960)])
def test_a_step_makes_few_calls(workers: Workers, sharded: bool, even: int, tail: int) -> None:
    steps, _ = workers.run(2, count, sharded)
    assert steps[2] <= even
    assert steps[-2] <= tail
