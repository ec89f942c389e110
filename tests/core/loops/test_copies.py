"""Copies of what was given to `Join`, made inside the `with`, are as free as those made outside."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.core.loops.training import Training, check_exact
from tests.support.workers import Workers
from torch_join import Join


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copy_amid(rank: int, lengths: tuple[int, ...], how: str, may_break: bool) -> list[Tensor]:
    training = Training(lengths, rank)
    duplicate = copy.deepcopy if how == "deepcopy" else saved
    copies: list[Any] = []
    with Join([training.ddp, training.optimizer], may_break=may_break) as join:
        copies.append(duplicate(training.ddp.module if how == "inner" else training.ddp))
        for batch in join.batches(training.batches):
            training.step(batch)
            copies.append(duplicate(training.ddp.module if how == "inner" else training.ddp))
            theirs = copies[-1]
            mine = {p: p.grad for p in training.ddp.parameters()}
            for p in theirs.parameters():
                p.grad = torch.ones_like(p)
            theirs.zero_grad()
            assert all(p.grad is None for p in theirs.parameters())
            assert all(p.grad is grad and grad is not None for p, grad in mine.items())
            assert len(duplicate(training.optimizer).param_groups) == 1
    for theirs in copies:
        assert not isinstance(theirs, DistributedDataParallel) or isinstance(theirs.module, nn.Module)
        (getattr(theirs, "module", theirs)(training.batches[0][0]) if training.batches else torch.zeros(1)).sum()
    return training.parameters


@pytest.mark.covering(2)
@pytest.mark.parametrize("may_break", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "saved", "inner"])
@pytest.mark.parametrize("lengths", [(3, 3), (1, 3), (3, 0, 2)])
def test_a_model_may_be_copied_in_the_loop(
    workers: Workers, lengths: tuple[int, ...], how: str, may_break: bool
) -> None:
    check_exact(workers.run(len(lengths), copy_amid, lengths, how, may_break), lengths)
