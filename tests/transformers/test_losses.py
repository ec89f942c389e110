"""Losses that depend on no parameter, or run backwards of their own; and which loss is shown."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.front_ends.transformers import Fit, Net, Recording, Trained, train
from tests.support.workers import Workers

PLAIN = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}


def by_hand(found: list[Trained], is_constant: Callable[[int, int], bool] = lambda *_: False) -> list[Tensor]:
    """Train in one process on what the ranks have seen, where some losses are constant."""
    net = Net(counts=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for each in zip(*(trained.seen for trained in found), strict=True):
        for step in range(max(map(len, each))):
            optimizer.zero_grad()
            for rank, batches in enumerate(each):
                if step < len(batches) and not is_constant(rank, step):
                    (net(**batches[step])["loss"] / len(each)).backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def assert_as(found: list[Trained], expected: list[Tensor]) -> None:
    for trained in found:
        for mine, first, right in zip(trained.parameters, found[0].parameters, expected, strict=True):
            assert torch.equal(mine, first)
            assert float((mine - right).abs().max()) < 1e-12


def skips(rank: int, step: int) -> bool:
    return rank == 1 and step in (1, 2)


class Skipping(Recording):
    """Has a constant loss on one rank, in two steps one after the other."""

    requires_grad = True

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        step = len(self.seen[-1])
        loss = super().compute_loss(*args, **kwargs)
        return torch.zeros((), requires_grad=self.requires_grad) if skips(dist.get_rank(), step) else loss


class SkippingWithoutGradient(Skipping):
    requires_grad = False


@pytest.mark.parametrize("lengths", [(4, 4), (2, 4)])
def test_constant_losses_in_two_steps(workers: Workers, lengths: tuple[int, ...]) -> None:
    found = workers.run(2, train, Fit(lengths, counts=False, extra=PLAIN), Skipping)
    assert_as(found, by_hand(found, skips))


def test_a_loss_that_requires_no_gradient_is_refused(workers: Workers) -> None:
    for outcome in workers.outcomes(2, train, Fit((4, 4), counts=False, extra=PLAIN), SkippingWithoutGradient):
        assert "The loss of rank 1 does not require a gradient" in outcome.error
