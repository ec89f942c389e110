"""What of the optimizers' hyperparameters is compared between ranks, how, and what noting them costs."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.workers import Workers
from torch_join import Join, JoinError
from torch_join._base.hyperparameters import Hyperparameters, Recorded, Steps, compare, hyperparameters
from torch_join._control.codec import decode, encode


def optimizer_of(groups: int = 1, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(groups)], **options)


# ---------------------------------------------------------------- how they are compared

LAST_BIT = math.nextafter(0.1, 1)
ALIKE = [
    (0.1, LAST_BIT),
    (-0.1, -LAST_BIT),
    (1e-300, 1e-300 * (1 + 1e-7)),
    (0.0, -0.0),
    (math.nan, math.nan),
    (math.inf, math.inf),
    ((0.1, 0.999), (LAST_BIT, 0.999)),
    ((None, 1e-3), (None, 1e-3)),
    (10**400, 10**400),
    ("same", "same"),
]
DIFFERENT = [
    (0.1, 0.1 * (1 + 1e-5)),
    (0.1, -0.1),
    (0.0, 1e-300),
    (0.0, math.nan),
    (math.inf, 1e308),
    ((0.1, 0.9), (0.1, 0.8)),
    ((0.1, 0.9), (0.1,)),
    ((None, 0.1), (0.1, 0.1)),
    (10**400, 1.5),
    (True, False),
    ("one", "other"),
    ("0.1", 0.1),
]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_of_several_optimizers_of_a_kind_each_is_compared_and_named(which: int) -> None:
    ours, theirs = ([optimizer_of() for _ in range(3)] for _ in range(2))
    theirs[which].param_groups[0]["lr"] = 0.5
    with pytest.raises(JoinError, match=rf"lr of AdamW {which + 1} is 0.001 on rank 0, 0.5 on rank 1"):
        compare([hyperparameters(ours), hyperparameters(theirs)], [0, 1])
    steps = Steps(ours)
    said = {}
    for rank, optimizers in enumerate((ours, theirs)):
        its = Steps(optimizers)
        its.begin()
        said[rank] = its.recorded(False)
    with pytest.raises(JoinError, match=rf"lr of AdamW {which + 1} is 0.001 on rank 0, 0.5 on rank 1"):
        steps.compare(said)


def noted(value: Any) -> tuple[Hyperparameters, Recorded]:
    """Return what messages say of an optimizer with this hyperparameter."""
    optimizer = optimizer_of()
    optimizer.param_groups[0]["own"] = value
    steps = Steps([optimizer])
    steps.begin()
    return (
        decode(encode(hyperparameters([optimizer])), Hyperparameters),
        decode(encode(steps.recorded(late=False)), Recorded),
    )


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_what_differs_by_rounding_is_the_same(one: Any, other: Any) -> None:
    (mine, my_words), (theirs, their_words) = noted(one), noted(other)
    assert "own of AdamW" in dict(mine)
    compare([mine, theirs], [0, 1])
    Steps([optimizer_of()]).compare({0: my_words, 1: their_words})


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_differs_is_said(one: Any, other: Any) -> None:
    (mine, my_words), (theirs, their_words) = noted(one), noted(other)
    with pytest.raises(JoinError, match=r"own of AdamW is .* on rank 0, .* on rank 1"):
        compare([mine, theirs], [0, 1])
    with pytest.raises(JoinError, match=r"own of AdamW is .* on rank 0, .* on rank 1"):
        Steps([optimizer_of()]).compare({0: my_words, 1: their_words})


class Computing(torch.optim.SGD):
    """Computes a hyperparameter from the parameters, as Prodigy does, on each rank with another last bit."""

    noise = 0.0

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            group["d"] = sum(p.sum().item() for p in group["params"]) * (1 + self.noise)
        return found


def compute(rank: int, noise: float) -> float:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 1).double())
    optimizer = Computing(ddp.parameters(), 0.1)
    optimizer.noise = noise * rank
    with Join([ddp, optimizer], audit=False) as join:
        for _ in range(2):
            for x in join.batches([torch.ones(1, 3, dtype=torch.float64)] * (1, 4, 0)[rank]):
                ddp(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return float(optimizer.param_groups[0]["d"])


def test_an_optimizer_may_compute_one(workers: Workers) -> None:
    # A few units in the last place, as with another number of threads.
    assert len(set(workers.run(3, compute, 1e-15))) == 1
    for outcome in workers.outcomes(3, compute, 1e-3):
        assert "d of Computing is" in outcome.error


# ---------------------------------------------------------------- what is noted

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda: torch.tensor(0.5), lambda value: value.fill_(0.25)),
    "list": (lambda: [0.5, 1], lambda value: value.__setitem__(0, 0.25)),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("groups", [1, 3])
def test_what_changes_in_place_stays_noted(kind: str, groups: int) -> None:
    make, change = CHANGES[kind]
    value = make()
    optimizer = optimizer_of(groups)
    steps = Steps([optimizer])
    for group in optimizer.param_groups[1:]:  # the number of groups may change, too
        group["own"] = None
    optimizer.param_groups[-1]["own"] = value
    steps.begin()
    change(value)
    steps.begin()
    name = "own of AdamW" if groups == 1 else "own (group 2) of AdamW"
    first, second = (dict(values)[name] for _, values in steps.recorded(late=True))
    assert (first, second) == ((0.5, 0.25) if kind == "tensor" else ((0.5, 1), (0.25, 1)))


def test_a_group_that_comes_within_a_loop_is_noted() -> None:
    optimizer = optimizer_of()
    steps = Steps([optimizer])
    steps.begin()
    rate = torch.tensor(0.5)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": rate})
    steps.begin()
    rate.fill_(0.25)
    del optimizer.param_groups[0]["lr"]
    steps.begin()
    before, now = (dict(values) for _, values in steps.recorded(late=True))
    assert (before["lr (group 1) of AdamW"], now["lr (group 1) of AdamW"]) == (0.5, 0.25)
    assert "lr (group 0) of AdamW" in before
    assert "lr (group 0) of AdamW" not in now


def test_noting_costs_no_more_than_copies() -> None:
    """It comes in each step, of an optimizer that may have a group for each parameter."""
    optimizer = optimizer_of(200)
    steps = Steps([optimizer])

    def shortest(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(50):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    assert shortest(steps.begin) < 3 * shortest(lambda: [dict(group) for group in optimizer.param_groups])
