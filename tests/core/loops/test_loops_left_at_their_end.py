"""Loops by `iter` and `next` over `len(loader)`, which never ask for the end, and loops left by `break`."""

from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from accelerate_join import join_uneven_inputs
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.inside import accelerate_loops
from tests.support.small import Training, alone, batch, batches_of, loss, network, steps_of
from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join
from torch_join.integration import own_loops

EPOCHS = 2


def reference(lengths: tuple[int, ...], last: int | None = None) -> Any:
    return pytest.approx(alone(len(lengths), EPOCHS * steps_of(lengths, last)), abs=1e-12)


def train(rank: int, lengths: tuple[int, ...], how: str, breaks: int, may_break: bool = False) -> list[float]:
    training, batches = Training(DistributedDataParallel), batches_of(rank, lengths)
    kept: list[Any] = []
    with Join(training.given, may_break=may_break) as join:
        for _ in range(EPOCHS):
            if how == "for" or (how == "mixed" and rank == 0):
                for step, x in enumerate(join.batches(batches)):
                    training.step(x)
                    if step + 1 == breaks:
                        break
            else:
                iterator = iter(join.batches(batches))
                for _ in range(len(batches)):
                    training.step(next(iterator))
                if how == "kept":
                    kept.append(iterator)
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
    for weight in workers.run(len(lengths), train, lengths, how, 0, may_break):
        assert weight == reference(lengths)


@pytest.mark.parametrize("lengths", [(3, 7), (2, 2), (7, 3), (1, 5), (4, 3)])
def test_a_break_at_the_same_step_may_be_some_ranks_last(workers: Workers, lengths: tuple[int, ...]) -> None:
    for weight in workers.run(2, train, lengths, "for", min(lengths)):
        assert weight == reference(lengths, min(lengths))


def save_behind(
    rank: int, lengths: tuple[int, ...], how: str, after: bool, options: dict[str, Any]
) -> tuple[float, float, list[float], int]:
    """Return how far what is saved after each loop is from its end; the rate, the weight, and how many warnings."""
    training, batches, off = Training(DistributedDataParallel), batches_of(rank, lengths), 0.0
    scheduler = StepLR(training.optimizer, 1, 0.5)
    kept: list[Any] = []
    with warned("a checkpoint of that is old") as found, Join([*training.given, scheduler], **options) as join:
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
        assert weight == reference(lengths) or "weighting" in options


def test_a_state_that_is_read_too_early_is_named(workers: Workers) -> None:
    (early, _, weight, warnings), (late, _, _, none) = workers.run(2, save_behind, (2, 5), "kept", False, {})
    assert early > 1e-2
    assert late == 0
    assert (warnings, none) == (EPOCHS, 0)
    assert weight == reference((2, 5))


@pytest.mark.parametrize("how", ["zip", "islice"])
def test_so_it_is_where_a_rank_without_a_batch_never_asks(workers: Workers, how: str) -> None:
    (early, _, weight, warnings), (late, _, _, none) = workers.run(2, save_behind, (0, 5), how, False, {})
    assert early > 1e-2
    assert late == 0
    assert (warnings, none) == (EPOCHS, 0)
    assert weight == reference((0, 5))
    for outcome in workers.outcomes(2, save_behind, (0, 5), how, True, {}):
        assert "lr of Adam is 0.05 on rank 0, 0.1 on rank 1" in outcome.error


Epochs = list[tuple[int, ...]]


def train_by_next(rank: int, epochs: Epochs, may_break: bool, keeps: bool) -> list[float]:
    training, kept = Training(DistributedDataParallel), []
    with Join(training.given, may_break=may_break) as join:
        for lengths in epochs:
            iterator = iter(join.batches(batches_of(rank, lengths)))
            kept += [iterator] if keeps else []
            for _ in range(lengths[rank]):
                training.step(next(iterator))
    return training.weight


# A rank without a batch never calls `next`, and must not take the others' next loop for this one.
@pytest.mark.covering(1)
@pytest.mark.parametrize("keeps", [False, True])
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
def test_a_loop_that_a_rank_never_asks_for_a_batch(
    workers: Workers, epochs: Epochs, may_break: bool, keeps: bool
) -> None:
    expected = alone(len(epochs[0]), [places for lengths in epochs for places in steps_of(lengths)])
    for weight in workers.run(len(epochs[0]), train_by_next, epochs, may_break, keeps):
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
        ("one rank", "Rank 0 made an iterator over join.batches and asked it for no batch"),
        ("other order", "went on after it had been left"),
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
        if how == "another":
            del iterator
            iterator = iter(join.batches(batches_of(rank, (5, 5))))
            next(iterator)
    return sum(1 for _ in iterator)


def test_a_loop_outside_of_its_with(workers: Workers) -> None:
    for how, text in (
        ("outside", "begun outside of its `with`"),
        ("after", "went on after it had been left"),
    ):
        for outcome in workers.outcomes(2, resume, how):
            assert text in outcome.error, (how, outcome)


# ---------------------------------------------------------------- Accelerate


def accelerated(rank: int, lengths: tuple[int, ...], form: str, how: str) -> tuple[list[float], int, list[float]]:
    with accelerator_of(rank) as accelerator:
        net = network()
        model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
        loader: Any = DataLoaderShard(batches_of(rank, lengths), batch_size=None)  # type: ignore[arg-type]
        counts: list[float] = []

        def step_on(x: Tensor) -> None:
            counts.append(float(accelerator.gather(torch.tensor([len(x)])).sum()))
            accelerator.backward(loss(model, x))
            optimizer.step()
            optimizer.zero_grad()

        def epochs(batches: Any) -> None:
            for _ in range(EPOCHS):
                if how == "next":
                    iterator = iter(batches())
                    for _ in range(len(loader)):
                        step_on(next(iterator))
                    continue
                for step, x in enumerate(batches()):
                    step_on(x)
                    if how == "break" and step == 1:
                        break

        if form == "decorator":
            join_uneven_inputs(accelerator)(epochs)(lambda: loader)
        elif form == "with":
            with accelerator.join_uneven_inputs():
                epochs(lambda: loader)
        else:
            epochs(lambda: accelerator.join_batches(loader))
        own_loops.finish(accelerator)  # as end_training does, which ends the group too
        assert not accelerate_loops()
        assert type(accelerator).__name__ == "Accelerator"
        return net.weight.flatten().tolist(), loader.iteration, counts


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", ["with", "batches", "decorator"])
@pytest.mark.parametrize("how", ["for", "next", "break"])
@pytest.mark.parametrize("lengths", [(3, 7), (5, 2), (4, 4)])
def test_with_accelerate(workers: Workers, lengths: tuple[int, ...], form: str, how: str) -> None:
    last = 2 if how == "break" else None
    for weight, epochs, counts in workers.run(2, accelerated, lengths, form, how):
        assert weight == reference(lengths, last)
        assert epochs == EPOCHS or how == "break"
        assert set(counts) <= {2.0, 4.0}


def raise_within(rank: int) -> str:
    with accelerator_of(rank) as accelerator:
        model = accelerator.prepare(network())
        loader: Any = DataLoaderShard(batches_of(rank, (2, 5)), batch_size=None)  # type: ignore[arg-type]

        class Broken:
            def __len__(self) -> int:
                return 4

            def __iter__(self) -> Any:
                yield from loader
                raise KeyError("in the loader")

        for x in accelerator.join_batches(Broken()):
            accelerator.backward(loss(model, x))
    return ""


def test_a_loader_that_raises_ends_the_context(workers: Workers) -> None:
    first, second = workers.outcomes(2, raise_within)
    assert "in the loader" in first.error
    assert "in the loader" in second.error


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
