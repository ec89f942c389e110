"""Active ranks that do different things in the tail of a loop are told so."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.front_ends.plain import Loop
from tests.support.workers import Workers, connect
from torch_join import Join


def disagree(rank: int, lengths: tuple[int, ...], kind: str, odd_step: int) -> None:
    connect()
    models = Loop(lengths).build()
    ddp = DistributedDataParallel(models)
    optimizer = torch.optim.SGD(models.parameters(), lr=0.05)
    with Join([ddp, optimizer], timeout=timedelta(seconds=10)) as join:
        for step, (x, y) in enumerate(join.batches(Loop(lengths).batches(rank, 0))):
            assert step < odd_step + 20, "nobody has noticed"
            odd = rank == 2 and step == odd_step
            # They would come to the same sync, and look for each other's words in different places.
            with ddp.no_sync() if kind == "backward" and step == odd_step else nullcontext():
                loss = (ddp(x) - y).pow(2).mean()
                if not odd or kind != "backward":
                    loss.backward()
            # Both pair with what the other ranks do without a word of complaint.
            if kind == "operation":
                dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
            elif kind == "shape":
                dist.all_reduce(torch.ones(1, 2) if odd else torch.ones(2))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("lengths", "odd_step", "kind"),
    [
        ((1, 6, 6), 3, "operation"),
        ((8, 2, 8), 3, "shape"),
        ((1, 400, 400), 19, "operation"),
        ((1, 20, 12), 11, "operation"),  # it leaves with that step
        ((6, 4, 6, 1), 3, "backward"),  # another one does
    ],
)
def test_ranks_that_disagree_are_told(workers: Workers, lengths: tuple[int, ...], odd_step: int, kind: str) -> None:
    outcomes = workers.outcomes(len(lengths), disagree, lengths, kind, odd_step, deadline=30.0, timeout=2.0)
    for outcome in outcomes:
        assert "The active ranks ran different operations in the tail of a loop" in outcome.error, outcomes
        assert "rank 2 had announced" in outcome.error
        assert outcome.seconds < 10, outcomes
