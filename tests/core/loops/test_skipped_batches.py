"""Ranks that skip different batches, where lengths are certain and no rank waits, are warned of; nothing else is."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join


def adversarial(rank: int, lengths: tuple[int, ...], skipped: tuple[int, ...]) -> list[str]:
    """Train two models in each step, but the second one not in the step that this rank skips."""
    models = [DistributedDataParallel(nn.Linear(1, 1)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    with warned() as said, Join([*models, *optimizers]) as join:
        for step, batch in enumerate(join.batches([torch.ones(2, 1)] * lengths[rank])):
            for which, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if which and step == skipped[rank]:
                    continue
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
    return said


@pytest.mark.parametrize(("lengths", "skipped"), [((5, 4), (1, 2)), ((4, 6, 5), (2, 1, 2))])
def test_one_model_of_several(workers: Workers, lengths: Any, skipped: Any) -> None:
    first, *others = workers.run(len(lengths), adversarial, lengths, skipped)
    (text,) = [text for text in first if "Ranks skipped different batches" in text]
    (early,) = [rank for rank, step in enumerate(skipped) if step == 1]
    assert f"Rank {early} did not sync gradients in step 1 of the loop" in text
    assert not any("skipped" in text for texts in others for text in texts)


@pytest.mark.parametrize(("lengths", "skipped"), [((5, 4), (1, 1)), ((4, 6, 5), (2, 2, 2))])
def test_all_ranks_may_skip_a_step(workers: Workers, lengths: Any, skipped: Any) -> None:
    for texts in workers.run(len(lengths), adversarial, lengths, skipped):
        assert not any("skipped" in text for text in texts)
