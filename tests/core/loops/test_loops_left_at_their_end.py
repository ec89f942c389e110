"""Loops by `iter` and `next` over `len(loader)`, which never ask for the end, and loops left by `break`."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from tests.support.small import Training, alone, batch, batches_of, loss, network, steps_of
from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join

EPOCHS = 2


def expected(lengths: tuple[int, ...], last: int | None = None) -> Any:
    return pytest.approx(alone(len(lengths), EPOCHS * steps_of(lengths, last)), abs=1e-12)


Epochs = Sequence[tuple[int, ...]]  # the ranks' numbers of batches in each


def train(rank: int, epochs: Epochs, how: str, may_break: bool = False, breaks: int = 0) -> list[float]:
    """Loop by `for` or by `next`, on rank 0 and the others if it is `mixed`; `kept` iterators are asked once more."""
    training, kept = Training(DistributedDataParallel), list[Any]()
    with Join(training.given, may_break=may_break) as join:
        for batches in (batches_of(rank, lengths) for lengths in epochs):
            if how == "for" or (how == "mixed" and rank == 0):
                for step, x in enumerate(join.batches(batches)):
                    training.step(x)
                    if step + 1 == breaks:
                        break
            else:
                iterator = iter(join.batches(batches))
                for _ in range(len(batches)):
                    training.step(next(iterator))
                kept += [iterator] if how in ("kept", "held") else []
    if how == "kept":
        for iterator in kept:
            assert next(iterator, None) is None
    return training.weight


@pytest.mark.covering(2)
@pytest.mark.parametrize("may_break", [False, True])
@pytest.mark.parametrize("how", ["next", "kept", "mixed"])
@pytest.mark.parametrize("lengths", [(3, 7), (5, 2), (4, 4), (1, 2), (6, 4, 2)])
def test_a_loop_that_never_asks_for_the_end(
    workers: Workers, lengths: tuple[int, ...], how: str, may_break: bool
) -> None:
    for weight in workers.run(len(lengths), train, [lengths] * EPOCHS, how, may_break):
        assert weight == expected(lengths)


@pytest.mark.parametrize("lengths", [(3, 7), (2, 2), (7, 3), (1, 5), (4, 3)])
def test_a_break_at_the_same_step_may_be_some_ranks_last(workers: Workers, lengths: tuple[int, ...]) -> None:
    for weight in workers.run(2, train, [lengths] * EPOCHS, "for", False, min(lengths)):
        assert weight == expected(lengths, min(lengths))


def save_behind(
    rank: int, lengths: tuple[int, ...], how: str, after: bool, options: dict[str, Any]
) -> tuple[float, float, list[float], int]:
    """Return how far what is saved after each loop is from its end; the rate, the weight, and how many warnings."""
    training, batches, off = Training(DistributedDataParallel), batches_of(rank, lengths), 0.0
    scheduler = StepLR(training.optimizer, 1, 0.5)
    kept: list[Any] = []
    with warned("of that state would be outdated") as found, Join([*training.given, scheduler], **options) as join:
        for _ in range(EPOCHS):
            if how == "zip":
                for _, x in zip(range(len(batches)), join.batches(batches), strict=False):
                    training.step(x)
            elif how == "islice":
                for x in islice(join.batches(batches), len(batches)):
                    training.step(x)
            elif how == "break":
                for step, x in enumerate(join.batches(batches)):
                    training.step(x)
                    if step + 1 == len(batches):
                        break
            else:
                kept[:] = [iter(join.batches(batches))]
                for _ in range(len(batches)):
                    training.step(next(kept[0]))
            saved = {name: value.clone() for name, value in training.model.state_dict().items()}
            if after:
                scheduler.step()
            for _ in join.batches(()):
                pass
            now = training.model.state_dict()
            off = max(off, *((saved[name] - value).abs().max().item() for name, value in now.items()))
    return off, training.optimizer.param_groups[0]["lr"], training.weight, len(found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{}, {"weighting": "samples"}, {"may_break": True}], ids=str)
@pytest.mark.parametrize("how", ["zip", "islice", "break"])
@pytest.mark.parametrize("lengths", [(2, 5), (5, 1), (3, 3), (4, 2, 3)])
def test_who_counts_to_the_last_batch_is_at_the_loops_end(
    workers: Workers, lengths: tuple[int, ...], how: str, options: dict[str, Any]
) -> None:
    for off, rate, _, warnings in workers.run(len(lengths), save_behind, lengths, how, True, options):
        assert (off, rate, warnings) == (0.0, 0.1 / 2**EPOCHS, 0)
    for _, _, weight, _ in workers.run(len(lengths), save_behind, lengths, how, False, options):
        assert weight == expected(lengths) or "weighting" in options


def test_a_state_that_is_read_too_early_is_named(workers: Workers) -> None:
    (early, _, weight, warnings), (late, _, _, none) = workers.run(2, save_behind, (2, 5), "kept", False, {})
    assert early > 1e-2
    assert late == 0
    assert (warnings, none) == (EPOCHS, 0)
    assert weight == expected((2, 5))


@pytest.mark.parametrize("how", ["zip", "islice"])
def test_so_it_is_where_a_rank_without_a_batch_never_asks(workers: Workers, how: str) -> None:
    (early, _, weight, warnings), (late, _, _, none) = workers.run(2, save_behind, (0, 5), how, False, {})
    assert early > 1e-2
    assert late == 0
    assert (warnings, none) == (EPOCHS, 0)
    assert weight == expected((0, 5))
    for outcome in workers.outcomes(2, save_behind, (0, 5), how, True, {}):
        assert "lr of Adam is 0.05 on rank 0, 0.1 on rank 1" in outcome.error


# A rank without a batch never calls `next`, and must not take the others' next loop for this one.
@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["next", "held"])
@pytest.mark.parametrize("may_break", [False, True])
@pytest.mark.parametrize(
    "epochs",
    [
        [(0, 2), (2, 2)],
        [(2, 2), (0, 2)],
        [(2, 1), (0, 2), (0, 1), (3, 1)],
        [(0, 0), (0, 2), (0, 0)],
        [(2, 0, 3), (0, 2, 0), (2, 2, 2)],
        [(2, 2, 2), (0, 0, 1)],
    ],
)
def test_a_loop_that_a_rank_never_asks_for_a_batch(workers: Workers, epochs: Epochs, may_break: bool, how: str) -> None:
    expected = alone(len(epochs[0]), [places for lengths in epochs for places in steps_of(lengths)])
    for weight in workers.run(len(epochs[0]), train, epochs, how, may_break):
        assert weight == pytest.approx(expected, abs=1e-12)


def ask(rank: int, how: str) -> str:
    ddp = DistributedDataParallel(network())
    with Join([ddp]) as join:
        first = iter(join.batches(batches_of(rank, (3, 3))))
        if how == "none":
            return ""
        if how == "other order":
            second = iter(join.batches([batch(rank, 9)]))
            assert sum(1 for _ in second) == 1
            return str(sum(1 for _ in first))
        for _ in range(rank):
            loss(ddp, next(first)).backward()
    return ""


def test_batches_that_no_rank_or_only_some_ask_for(workers: Workers) -> None:
    assert workers.run(2, ask, "none") == ["", ""]
    for how, text in (
        ("one rank", "Rank 0 created an iterator over join.batches, but never took any of its batches"),
        ("other order", "continued after its `with` had ended or another loop had started"),
    ):
        for outcome in workers.outcomes(2, ask, how):
            assert text in outcome.error, (how, outcome)


def resume(rank: int, how: str) -> int:
    ddp = DistributedDataParallel(network())
    join = Join([ddp])
    if how == "outside":
        return sum(1 for _ in join.batches([1, 2]))
    with join:
        iterator = iter(join.batches(batches_of(rank, (3, 3))))
        next(iterator)
    return sum(1 for _ in iterator)


def test_a_loop_outside_of_its_with(workers: Workers) -> None:
    for how, text in (
        ("outside", "started outside its `with`"),
        ("after", "continued after its `with` had ended or another loop had started"),
    ):
        for outcome in workers.outcomes(2, resume, how):
            assert text in outcome.error, (how, outcome)


def fail_meanwhile(rank: int) -> None:
    """Break behind the last batch of rank 0, while rank 1 fails."""
    training, batches = Training(DistributedDataParallel), batches_of(rank, (2, 5))
    with Join(training.given) as join:
        for step, x in enumerate(join.batches(batches)):
            training.step(x)
            if rank == 1 and step == 3:
                raise KeyError("of rank 1")
            if step + 1 == len(batches):
                break
        try:
            dist.all_reduce(torch.ones(1))
        except Exception as error:
            raise RuntimeError("in the collective behind the loop") from error


def test_a_failure_meanwhile_is_raised_by_the_next_collective(workers: Workers) -> None:
    first, second = workers.outcomes(2, fail_meanwhile)
    assert "in the collective behind the loop" in first.error
    assert "Rank 1 failed" in first.error
    assert "of rank 1" in second.error
