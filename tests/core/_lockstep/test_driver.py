"""Loops that a framework runs: what their steps leave behind."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.inside import keys_of
from tests.support.workers import Workers
from torch_join._control.rendezvous import open_channel
from torch_join._lockstep.lockstep_join import LockstepJoin
from torch_join._lockstep.step_driver import StepDriver
from torch_join._shadow.model_shadow import ModelShadow

STEPS = 60


def count_keys(rank: int) -> tuple[list[bool], list[int]]:
    channel = open_channel()
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    driver = StepDriver(channel)
    join = LockstepJoin(driver, ModelShadow(ddp))
    length = 1 if rank == 0 else STEPS
    joined, counts = [], []
    join.begin(0, 1 if rank == 0 else None, 1)
    for step in range(STEPS):
        joined.append(join.joined)
        with join.around_step():
            if join.joined:
                loss = join.shadow_forward()
            else:
                with join.active_step(), join.loss_step():
                    loss = ddp(torch.ones(1, 2)).sum()
            join.backward(loss.backward)
        join.arrive(STEPS if step == STEPS - 2 and rank else None, int(step + 1 < length))
        join.meet()
        if step in (10, STEPS - 2):
            counts.append(keys_of(channel))
    dist.barrier()  # all have read what closing deletes
    driver.close()
    channel.close()
    return joined, counts


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_was_announced_in_a_step_is_deleted_after_the_next_meeting(workers: Workers, world_size: int) -> None:
    found = workers.run(world_size, count_keys, deadline=60.0)
    for rank, (joined, (early, late)) in enumerate(found):
        assert joined == [False] + [rank == 0] * (STEPS - 1)
        assert late <= early + 2


def meet_unheard(rank: int) -> list[object]:
    channel = open_channel()
    driver = StepDriver(channel)
    join = LockstepJoin(driver, ModelShadow(DistributedDataParallel(nn.Linear(2, 1))))
    join.begin(0, None, 1)
    seen: list[object] = []
    for step in range(STEPS):
        assert not join.arrive(STEPS + 1 if step == STEPS - 1 else None, 1, {"from": rank}, waits=False)
        if step % 3 == 0:  # all ranks meet, perhaps before another one has heard what was said
            seen.append(channel.gather((rank, step)))
            time.sleep(0.5 if step == 30 + 3 * rank else 0)  # what all have read is deleted meanwhile
        seen.append(join.meet())
    seen.append(join.is_last_step)
    driver.close()
    channel.close(meets=True)
    return seen


def test_all_ranks_may_meet_while_some_have_not_heard_the_others(workers: Workers) -> None:
    first, second = workers.run(2, meet_unheard)
    assert first == second
    assert first[-1] is True
    notices = {rank: {"from": rank} for rank in range(2)}
    assert first[:2] == [[(0, 0), (1, 0)], notices]
    assert first.count(notices) == STEPS - 1
