"""What plain loops log: of uneven epochs alone, and not of each; what steps of a tail weigh; nothing of evaluations."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.faults import logged
from tests.support.small import network
from tests.support.workers import Workers
from torch_join import Join, Weighting

LENGTHS = (0, 2, 4)  # rank 2 alone is there to the end


def rows(batch: Tensor) -> float:
    return float(len(batch))


def train(
    rank: int, epochs: list[tuple[int, ...]], iterable: bool, way: str, own_join: bool, options: dict[str, Any]
) -> list[str]:
    """Go through epochs of these lengths, by rank; return what this rank logs, without its times."""
    net = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with logged("") as lines:
        joins = [Join([net, optimizer], **options) for _ in range(len(epochs) if own_join else 1)]
        for index, lengths in enumerate(epochs):
            batches: Any = [torch.ones(2, 3, dtype=torch.float64) for _ in range(lengths[rank])]
            with torch.set_grad_enabled(way != "evaluation"):
                if own_join or not index:
                    join = joins[index].__enter__()
                loader = iter(batches) if iterable else batches
                for batch in loader if way == "plain for" else join.batches(loader):
                    optimizer.zero_grad()
                    loss = net(batch).square().mean()
                    if way != "evaluation":
                        loss.backward()
                        optimizer.step()
                    if way == "break" and join.step == 2:
                        break
                if own_join or index + 1 == len(epochs):
                    join.__exit__(None, None, None)
    return [re.sub(r"[\d.]+( s\b|%)", r"N\1", line) for line in lines]


@pytest.mark.parametrize("own_join", [False, True])
@pytest.mark.parametrize("iterable", [False, True])
def test_uneven_epochs_are_logged_ever_less_often(workers: Workers, iterable: bool, own_join: bool) -> None:
    uneven, even = (1, 3), (2, 2)
    epochs = [even, uneven, uneven, even, uneven, uneven, uneven, even]
    first, second = workers.run(2, train, epochs, iterable, "", own_join, {})
    assert first == []
    tail, *rest = second
    assert tail.startswith("Rank 0 has run out of batches; 1 of 2 ranks still have batches.")
    assert [line.partition(":")[0] for line in rest] == ["Epoch 1", "Epoch 2", "Epoch 5"]
    assert workers.run(2, train, [even] * 3, iterable, "", own_join, {}) == [[], []]


WORLD = "weighting='world': their steps are scaled by 2/3; weighting='samples' counts each sample the same."
WEIGHTS: list[tuple[Weighting, str]] = [
    ("active", "weighting='active': each step is the mean over the ranks that have a batch."),
    ("samples", "weighting='samples': each sample counts the same."),
    (rows, "weighting=rows: each batch has the weight that this function returns."),
]
EPOCH = (
    "Epoch 0: 6 batches (0, 2, 4 on 3 ranks) in N s, N% of rank-seconds idle. Joined: rank 0 at batch 0 after N s,"
    " rank 1 at batch 2 after N s."
)


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize(
    ("options", "weight"),
    [({}, WORLD), *(({"weighting": each}, text) for each, text in WEIGHTS), ({"placeholder": "last"}, WORLD)],
)
def test_the_lines_of_an_epoch(workers: Workers, options: dict[str, Any], weight: str, iterable: bool) -> None:
    lines = workers.run(3, train, [LENGTHS], iterable, "", False, options)
    assert lines[0] == []
    assert lines[1] == [f"Rank 0 has run out of batches; 2 of 3 ranks still have batches. {weight}"]
    remedy = "" if "placeholder" in options else " rebalance=True would save about 2 of 4 steps."
    assert lines[2] == [EPOCH + remedy]


def test_rebalanced_epochs(workers: Workers) -> None:
    lines = workers.run(3, train, [(0, 3, 4)], False, "", False, {"rebalance": True})
    assert [line for each in lines for line in each if "Epoch 0: 7 batches (1, 3, 3 on 3 ranks)" in line]
    assert not any("rebalance" in line for each in lines for line in each)


def test_what_is_no_epoch(workers: Workers) -> None:
    assert workers.run(3, train, [LENGTHS], False, "evaluation", False, {}) == [[], [], []]
    _, second, third = workers.run(3, train, [LENGTHS], False, "plain for", False, {})
    assert (second, third) == ([f"Rank 0 has run out of batches; 2 of 3 ranks still have batches. {WORLD}"], [])


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("options", [{}, {"may_break": True}])
def test_a_loop_that_is_left_counts_its_last_batch(workers: Workers, iterable: bool, options: dict[str, Any]) -> None:
    *_, (line,) = workers.run(3, train, [LENGTHS], iterable, "break", False, options)
    assert line.startswith("Epoch 0: 5 batches (0, 2, 3 on 3 ranks)")
    assert ("rebalance=True" in line) == (options == {})  # which `may_break` does not go with
