"""What a step's own code changes by hand, given to ranks that do not run it."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.workers import Workers
from torch_join.integration import StepMirror


def change(rank: int) -> tuple[list[int], list[Tensor]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    mirror = StepMirror(ddp)
    mirror.remember()
    if rank == 1:
        with torch.no_grad():
            ddp.module[1].weight.clamp_(-0.1, 0.1)  # of weight clipping
            ddp.module[0].bias.zero_()
    changes = mirror.changes(with_parameters=True)
    found = [changes.parameters]
    torch.distributed.broadcast_object_list(found, src=1)
    changes.parameters[:] = found[0]
    mirror.take(changes, src=1)
    return found[0], [p.detach().clone() for p in ddp.parameters()]


def test_parameters_that_a_step_changes_by_hand_are_taken(workers: Workers) -> None:
    (places, mine), (_, theirs) = workers.run(2, change)
    assert places == [1, 2]
    assert all(map(torch.equal, mine, theirs))
    assert mine[1].tolist() == [0.0, 0.0]
