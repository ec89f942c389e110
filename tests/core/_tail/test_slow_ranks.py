"""A joined rank that is slow loses nothing of what the others announce."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.core.loops.training import Training, check_exact
from tests.support.joinables import Counter
from tests.support.workers import Workers
from torch_join import Join


class Dawdler(Counter):
    """In place of a joined rank 2 it stays away for a while afterwards."""

    def main_hook(self) -> None:
        super().main_hook()
        if dist.get_rank() == 2:
            time.sleep(0.6)  # threads delete what has been read four times a second


def dawdle(rank: int, lengths: tuple[int, ...]) -> list[Tensor]:
    training, dawdler = Training(lengths, rank), Dawdler()
    with Join([training.ddp, training.optimizer, dawdler], timeout=timedelta(seconds=10)) as join:
        for batch in join.batches(training.batches):
            dawdler.count()
            training.step(batch)
    return training.parameters


@pytest.mark.parametrize("lengths", [(4, 1, 1), (4, 1, 2)])
def test_nothing_is_deleted_that_a_slow_joined_rank_has_not_read(workers: Workers, lengths: tuple[int, ...]) -> None:
    check_exact(workers.run(3, dawdle, lengths), lengths)
