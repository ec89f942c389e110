"""What a loop that is even costs, in counts: the calls of this project's functions, and the ranks' exchanges."""

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_join.fabric import DDPJoinStrategy
from tests.support.calls import Calls
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.workers import Workers

STEP, LOOP = 46, 570  # calls at most


def count(rank: int) -> Any:
    fabric = fabric_of(2, DDPJoinStrategy())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    data: Any = torch.ones(10, 3, dtype=torch.float64)
    training = fabric.setup_dataloaders(DataLoader(data, batch_size=1), use_distributed_sampler=False)
    empty = fabric.setup_dataloaders(DataLoader(data[:0], batch_size=1), use_distributed_sampler=False)
    calls, steps, loops = Calls(), [], []
    for batch in training:
        sys.setprofile(calls)
        fabric.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        steps.append(calls.take())  # from a step's begin to the next one's
    calls.take()
    for _ in range(3):
        for _ in empty:
            pass
        loops.append(calls.take())
    sys.setprofile(None)
    return steps, loops


def test_an_even_step_and_an_empty_loop_cost_few_calls_and_exchanges(workers: Workers) -> None:
    for steps, loops in workers.run(2, to_the_end, count):
        assert [exchanges for _, exchanges in steps[4:9]] == [0] * 5
        assert [exchanges for _, exchanges in loops] == [2] * 3
        assert max(calls for calls, _ in steps[4:9]) <= STEP, steps
        assert max(calls for calls, _ in loops) <= LOOP, loops
