"""`async_save` issues its collectives in a thread of its own: named where a tail has begun, and not before."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.workers import Workers
from torch_join import Join


def save(rank: int, lengths: list[int], folder: Path) -> str:
    warnings.simplefilter("ignore")
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    try:
        with Join([ddp]) as join:
            for step in join.batches(range(lengths[rank])):
                ddp(torch.ones(1, 1)).sum().backward()
                saved: Any = dcp.async_save({"model": ddp.state_dict()}, checkpoint_id=folder / str(step))
                saved.result()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("lengths", [[1, 2], [2, 1], [2, 2]])
def test_in_a_tail_it_says_where_it_belongs(workers: Workers, tmp_path: Path, lengths: list[int]) -> None:
    even = lengths[0] == lengths[1]
    for said in workers.run(2, save, lengths, tmp_path):
        assert said == "" if even else "async_save needs all ranks, but some have finished" in said
