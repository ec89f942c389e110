"""A joined rank that is slow loses nothing of what the others announce."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from tests.core.loops.test_leaving import Training, check_exact
from tests.support.joinables import WorldJoinable
from tests.support.workers import Workers
from torch_join import Join


class Dawdler(WorldJoinable, JoinHook):
    """Counts the ranks in each step; in place of a joined rank 2 it stays away for a while afterwards."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    def main_hook(self) -> None:
        self.count()
        if dist.get_rank() == 2:
            time.sleep(0.6)  # threads delete what has been read four times a second

    def count(self) -> None:
        dist.all_reduce(torch.ones(1))


def dawdle(rank: int, lengths: tuple[int, ...]) -> list[Tensor]:
    training, dawdler = Training(lengths, rank), Dawdler()
    with Join([training.ddp, training.optimizer, dawdler], timeout=timedelta(seconds=10)) as join:
        for batch in join.batches(training.batches):
            Join.notify_join_context(dawdler)
            dawdler.count()
            training.step(batch)
    return training.parameters


@pytest.mark.parametrize("lengths", [(4, 1, 1), (4, 1, 2)])
def test_nothing_is_deleted_that_a_slow_joined_rank_has_not_read(workers: Workers, lengths: tuple[int, ...]) -> None:
    check_exact(workers.run(3, dawdle, lengths), lengths)
