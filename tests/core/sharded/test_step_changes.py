"""What a step changes of shards besides gradients, while some rank has joined: right, or an error on all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join

Lengths = tuple[int, ...]


class Net(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.float64))
        self.single = nn.Parameter(torch.zeros(1, dtype=torch.float64))  # the lowest rank holds it

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return nn.functional.linear(x, self.weight) + self.single


def change(how: str, net: Any, teacher: Any, optimizer: Any, step: int) -> None:
    weight, group = net.weight, optimizer.param_groups[0]
    if how == "teacher":
        teacher.weight.to_local().lerp_(weight.to_local(), 0.5)
    elif how == "annealed":
        teacher.weight.sub_(1.0)
    elif how == "one rank's":
        net.single.mul_(0.5)
    elif how == "clamped":
        weight.to_local().clamp_(-9)  # which alters nothing
    elif how == "cleared" and step == 1:
        optimizer.state.clear()
    elif how == "halved" and step == 1:
        optimizer.state[weight]["momentum_buffer"].mul_(0.5)
    elif how == "moved" and step == 1:
        group["params"] = [net.single]
        optimizer.add_param_group({"params": [weight], "momentum": 0.0})
    elif how == "hook" and step == 1:
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))


def train(rank: int, lengths: Lengths, how: str) -> tuple[list[float], list[str]]:
    net, teacher = (fully_shard(Net(), reshard_after_forward=True) for _ in range(2))
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    x = torch.ones(1, 1, dtype=torch.float64)
    with warned("the ranks differ in") as said, Join([net, optimizer, teacher]) as join:
        for _ in join.batches([0] * lengths[rank]):
            with torch.no_grad():
                target = teacher(x) if how != "unused" else 0.0
            if how == "divided":
                net.set_gradient_divide_factor(1.0 + join.step)
            optimizer.zero_grad()
            (net(x) - target).square().sum().add(net(x).sum()).backward()
            if how == "swapped":
                kept = [p.to_local().detach().clone() for p in net.parameters()]
                with torch.no_grad():
                    for p in net.parameters():
                        p.to_local().add_(0.5)
                    net(x)
                    for p, old in zip(net.parameters(), kept, strict=True):
                        p.to_local().copy_(old)
            optimizer.step()
            with torch.no_grad():
                change(how, net, teacher, optimizer, join.step)
    return [v.item() for p in net.parameters() for v in p.full_tensor().flatten()], said  # type: ignore[attr-defined]


SHARDS, STATE, HOOK = "sharded parameters were modified", "The state of SGD was modified", "A hook of a sharded grad"
REFUSED = {
    **dict.fromkeys(("teacher", "annealed", "one rank's", "clamped", "swapped"), SHARDS),
    **dict.fromkeys(("cleared", "halved", "moved"), STATE),
    "hook": HOOK,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", [(1, 4), (4, 0)])
@pytest.mark.parametrize("how", REFUSED)
def test_what_joined_ranks_cannot_repeat_raises(workers: Workers, how: str, lengths: Lengths) -> None:
    outcomes = workers.outcomes(2, train, lengths, how, timeout=10.0)
    assert all(REFUSED[how] in outcome.error for outcome in outcomes), outcomes
    assert not any(outcome.error for outcome in workers.outcomes(2, train, (3, 3), how))


@pytest.mark.skipif(not hasattr(FSDPModule, "set_gradient_divide_factor"), reason="torch has it from 2.8 on")
def test_by_what_the_sum_is_divided_joined_ranks_hear(workers: Workers) -> None:
    # With one rank or two the sum over the active ones is divided by the same.
    weights = [weight for weight, _ in workers.run(2, train, (1, 3), "divided")]
    assert weights[0] == weights[1]
    assert len({*weights[0][:4]}) == 1


def test_a_model_may_be_given_and_never_run(workers: Workers) -> None:
    (used, _), (found, _) = workers.run(2, train, (1, 3), "unused")
    assert used == found


def test_an_attribute_that_a_forward_counts_is_named(workers: Workers) -> None:
    (_, said), (_, none) = workers.run(2, train, (1, 3), "")
    assert ".calls (" in said[0]
    assert not none
