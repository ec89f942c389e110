"""The evened loader: the seam for a framework that iterates a loader itself, here the smallest one that there is."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.small import Training, loss, steps_of
from tests.support.workers import WorkerError, Workers
from torch_join import EarlyTerminationError
from torch_join.integration import (
    Evened,
    EvenedLoader,
    LockstepJoin,
    ModelShadow,
    Options,
    StepDriver,
    open_channel,
)

EPOCHS = 2
LENGTHS = [(0, 3, 2), (4, 1, 4), (2, 0, 0), (3, 3, 3), (0, 0, 0)]


class Stream:
    """Has no length."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)


class More(Stream):
    """Has one batch less than it says."""

    def __len__(self) -> int:
        return len(self._batches) + 1


def batch(rank: int, step: int) -> Tensor:
    rows = 1 + (rank + step) % 3
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def two_ahead(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    iterator = iter(batches)
    while read := [*islice(iterator, 2)]:
        yield from read


def train(rank: int, lengths: Sequence[int], kind: Any, **chosen: Any) -> tuple[list[float], list[list[float]], int]:
    """Train as a framework does; return the weight, the samples that this rank was given, and the number of steps."""
    channel, training, device = open_channel(), Training(DistributedDataParallel), torch.device("cpu")
    driver = StepDriver(channel, Options.of(chosen))
    join = LockstepJoin(driver, ModelShadow(training.model))

    def begin(mine: Any) -> Any:
        return join.begin(0, None if mine[0] else 0, 0, mine, [training.optimizer])

    evened = Evened(driver, device, begin, join.finish)
    own = kind([batch(rank, step) for step in range(lengths[rank])])
    loader = EvenedLoader(own, lambda batch: batch[:0], rebalances=driver.rebalancing.enabled)
    loader.lengths = channel.gather(loader.length, of=int | None)
    seen: list[list[float]] = []
    steps = 0
    for _ in range(EPOCHS):
        for mine in two_ahead(evened.go_through(loader)):
            found, steps = evened.take(mine), steps + 1
            assert found is not None
            join.go_to(found)
            training.optimizer.zero_grad()
            with join.around_step():
                if join.joined:
                    assert not len(mine)
                    value = join.shadow_forward()
                else:
                    seen += mine.tolist()
                    with join.active_step(), join.loss_step():
                        value = loss(training.model, mine) * join.loss_factor
                join.backward(value.backward)
            training.optimizer.step()
        assert loader.is_last_step == (max(lengths) > 0)
    if None not in loader.lengths and kind is not More:
        assert len(loader) * EPOCHS == steps
    evened.leave()
    driver.rebalancing.close()
    driver.close()
    channel.close(meets=True)
    return training.weight, seen, steps


def alone(lengths: Sequence[int], weighting: str) -> list[float]:
    training = Training()
    for places in steps_of(lengths) * EPOCHS:
        batches = [batch(*place) for place in places]
        if weighting == "samples":
            training.step(torch.cat(batches))
        else:
            training.step(*batches, share=1 / len(lengths if weighting == "world" else places))
    return training.weight


@pytest.mark.parametrize(
    ("lengths", "kind", "weighting"),
    [
        (LENGTHS[0], list, "world"),
        (LENGTHS[0], Stream, "samples"),
        (LENGTHS[1], More, "active"),
        (LENGTHS[1], list, "samples"),
        (LENGTHS[2], Stream, "world"),
        (LENGTHS[3], list, "active"),
        (LENGTHS[4], Stream, "samples"),
    ],
)
def test_a_framework_that_reads_ahead_is_exact(
    workers: Workers, lengths: tuple[int, ...], kind: Any, weighting: str
) -> None:
    found = workers.run(3, partial(train, lengths=lengths, kind=kind, weighting=weighting))
    for rank, (weight, seen, steps) in enumerate(found):
        assert weight == pytest.approx(alone(lengths, weighting), abs=1e-12)
        assert seen == EPOCHS * [row for step in range(lengths[rank]) for row in batch(rank, step).tolist()]
        assert steps == EPOCHS * max(lengths)


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_it_gives_batches_to_others(workers: Workers, lengths: tuple[int, ...], kind: Any) -> None:
    found = workers.run(3, partial(train, lengths=lengths, kind=kind, rebalance=True, weighting="samples"))
    every = [row for rank, length in enumerate(lengths) for step in range(length) for row in batch(rank, step).tolist()]
    assert sorted(row for _, seen, _ in found for row in seen) == sorted(EPOCHS * every)
    assert {steps for *_, steps in found} == {EPOCHS * -(-sum(lengths) // 3)}
    assert found[0][0] == found[1][0] == found[2][0]


def misled(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(rank, (2, 1, 1), More, weighting="active")
    return [str(warning.message) for warning in said]


def test_lengths_that_prove_wrong_are_told(workers: Workers) -> None:
    for said in workers.run(3, misled):
        assert [text.partition(", ")[0] for text in said] == [
            f"The train dataloader of rank {rank} reported {length + 1} batches but yielded only {length}"
            for _ in range(EPOCHS)
            for rank, length in enumerate((2, 1, 1))
        ]


def test_all_ranks_raise_where_the_first_one_ends(workers: Workers) -> None:
    with pytest.raises(WorkerError) as caught:
        workers.run(3, partial(train, lengths=(1, 2, 2), kind=list, throw_on_early_termination=True), deadline=60.0)
    assert str(caught.value).count(EarlyTerminationError.__name__) >= 3
