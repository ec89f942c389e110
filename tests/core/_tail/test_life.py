"""What happens where a rank cannot go back to its loop, and what a `Join` leaves behind."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.workers import Workers
from torch_join import Join, JoinError


def leave_amid(rank: int) -> tuple[str, list[list[float]]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(2, 1).double())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    said = ""
    with Join([ddp, optimizer], may_break=True) as join:
        for attempt in range(2):
            for step, _ in enumerate(join.batches(range(3 + attempt * rank))):
                if (attempt, step) == (0, 1):
                    assert not join.joined  # so that the others count on this step
                    break
                optimizer.zero_grad()
                ddp(torch.full((1, 2), 1.0 + step + rank, dtype=torch.float64)).sum().backward()
                optimizer.step()
            try:
                assert join.active_ranks == (0, 1)
            except JoinError as error:
                said = str(error)
    return said, [p.flatten().tolist() for p in ddp.parameters()]


def test_a_program_may_go_on_after_an_error_on_its_way_back_to_a_loop(workers: Workers) -> None:
    found = workers.run(2, leave_amid, deadline=60.0)
    assert all("left its loop at step 1" in said for said, _ in found)
    assert found[0][1] == found[1][1]


def referrers(rank: int, rebalance: bool) -> list[str]:
    group = dist.new_group([0, 1])
    ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
    gc.collect()
    gc.disable()
    try:
        join = Join([ddp], rebalance=rebalance)
        with join:
            for _ in join.batches(range(1 + rank)):
                ddp(torch.ones(1, 2)).sum().backward()
        assert (join.batch_owner, join.joined) == (None, False)  # what can be asked at any time
        del join
        owners = [owner for part in gc.get_referrers(group) for owner in gc.get_referrers(part)]
        return [type(owner).__name__ for owner in owners if type(owner).__module__.startswith("torch_join")]
    finally:
        gc.enable()


@pytest.mark.parametrize("rebalance", [False, True])
def test_nothing_of_ours_holds_the_group_after_a_join(workers: Workers, rebalance: bool) -> None:
    # A group must hang up as soon as it is destroyed, and not when somebody collects.
    assert workers.run(2, referrers, rebalance, deadline=60.0) == [[], []]
