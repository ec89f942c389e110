"""How a loop over `join_batches` ends that was left, or whose iterator is held: at the next thing done with others."""

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate_join import join_uneven_inputs
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.inside import accelerate_loops, end_accelerate_loops
from tests.support.small import Training, alone, batches_of, loss, network, steps_of
from tests.support.workers import Workers
from torch_join import JoinWarning

EPOCHS = 2
LIMIT = timedelta(seconds=20)  # of a wait for another rank, which none of these comes to


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def shard(rank: int, lengths: Sequence[int], streams: bool = False) -> Any:
    batches = batches_of(rank, lengths)
    return DataLoaderShard(Stream(batches) if streams else batches, batch_size=None)  # type: ignore[arg-type]


def exact(lengths: Sequence[int], last: int | None = None) -> Any:
    """Return what a single process makes of the steps of all ranks, up to one of that number in each epoch."""
    return pytest.approx(alone(len(lengths), EPOCHS * steps_of(lengths, last)), abs=1e-12)


class Accelerated(Training):
    """A small training that an accelerator has prepared."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__()
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(self.net, self.optimizer)

    def step(self, *batches: Tensor, share: float = 1.0) -> None:
        for x in batches:
            self.accelerator.backward(loss(self.model, x) * share)
        self.optimizer.step()
        self.optimizer.zero_grad()


def do_next(accelerator: Any, model: Any, what: str) -> Any:
    """Do what comes after a loop, in scripts."""
    world_size = accelerator.num_processes
    if what == "wait":
        accelerator.wait_for_everyone()
    elif what == "reduce":
        dist.all_reduce(total := torch.ones(1))
        assert total == world_size
        assert accelerator.reduce(torch.ones(1), "mean") == 1
    elif what == "gather":
        assert len(accelerator.gather(torch.ones(1))) == world_size
    elif what == "objects":
        assert gather_object([dist.get_rank()]) == [*range(world_size)]
    elif what == "broadcast":
        assert broadcast(torch.tensor([dist.get_rank()])) == 0
    elif what == "save" and accelerator.is_main_process:
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save(accelerator.unwrap_model(model).state_dict(), path := Path(folder) / "model")
            return torch.load(path)["weight"].flatten().tolist()
    elif what == "save_state" and accelerator.is_main_process:
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
    elif what == "prepare":
        accelerator.prepare(nn.Linear(4, 1))
    elif what == "free_memory":
        accelerator.free_memory()
        accelerator.prepare(nn.Linear(4, 1))
    elif what == "evaluate":
        loader = accelerator.prepare(DataLoader(torch.arange(13.0), batch_size=2))  # type: ignore[arg-type]
        assert sum(len(accelerator.gather_for_metrics(x)) for x in loader) == 13
    elif what == "forward":
        with torch.no_grad():
            model(torch.ones(2, 3, dtype=torch.float64))
        accelerator.wait_for_everyone()
    elif what == "trigger":
        accelerator.set_trigger()
        assert accelerator.check_trigger()
    return None


def go_through(batches: Any, step: Any, how: str, done: list[int], most: int, own: int) -> Any:
    """Go through a loop, and leave it in one of several ways; return what holds it."""
    if how in ("held", "held to the end"):
        iterator = iter(batches)
        for _ in range(own):
            step(next(iterator))
        return iterator
    for index, x in enumerate(batches):
        step(x)
        done.append(index)
        if (how == "total" and len(done) == most) or (how == "own" and index + 1 == own) or (how == 1 and index == 1):
            break
    return None


def leave(rank: int, lengths: Sequence[int], how: str, what: str, streams: bool, ends: str) -> tuple[Any, Any]:
    with accelerator_of(rank) as accelerator:
        training, loader = Accelerated(accelerator), shard(rank, lengths, streams)
        done: list[int] = []
        for _ in range(EPOCHS):
            batches = accelerator.join_batches(loader, timeout=LIMIT)
            held = go_through(batches, training.step, how, done, EPOCHS * max(lengths), lengths[rank])
        found = do_next(accelerator, training.model, what)
        if ends == "exit":
            end_accelerate_loops()
        else:
            accelerator.end_training()
        del held
        assert not accelerate_loops()
        return training.weight, found


AFTER = ["wait", "reduce", "gather", "objects", "broadcast", "save", "save_state", "prepare", "free_memory"]
AFTER += ["evaluate", "forward", "trigger", ""]


@pytest.mark.covering(1)
@pytest.mark.parametrize("what", AFTER)
@pytest.mark.parametrize("how", ["total", "own"])
@pytest.mark.parametrize("lengths", [(7, 3), (3, 7)])
def test_what_comes_next_with_others_ends_it(workers: Workers, lengths: Any, how: str, what: str) -> None:
    streams = len(what) % 2 == 0 and how == "total"  # which may be left by all at the same step
    for weights, saved in workers.run(2, leave, lengths, how, what, streams, "end"):
        assert weights == exact(lengths)
        assert saved in (None, weights)


@pytest.mark.parametrize(("lengths", "how"), [((7, 3, 5), "total"), ((0, 5, 3), "own"), ((5, 4), 1)])
@pytest.mark.parametrize("ends", ["end", "exit"])
def test_on_three_ranks_and_where_all_leave(workers: Workers, lengths: Any, how: Any, ends: str) -> None:
    for weights, _ in workers.run(len(lengths), leave, lengths, how, "wait", False, ends):
        assert weights == exact(lengths, 2 if how == 1 else None)


def train(rank: int, lengths: Sequence[int], form: str, how: Any) -> tuple[list[float], int, list[float]]:
    """Return the weight, the loader's epoch, and how many samples the ranks had in each step."""
    with accelerator_of(rank) as accelerator:
        training, loader, counts = Accelerated(accelerator), shard(rank, lengths), list[float]()

        def step(x: Tensor) -> None:
            counts.append(float(accelerator.gather(torch.tensor([len(x)])).sum()))
            training.step(x)

        def epochs() -> None:
            for _ in range(EPOCHS):
                batches = accelerator.join_batches(loader) if form == "batches" else loader
                go_through(batches, step, how, [], 0, lengths[rank])

        if form == "decorator":
            join_uneven_inputs(accelerator)(epochs)()
        else:
            with accelerator.join_uneven_inputs() if form == "with" else nullcontext():
                epochs()
        accelerator.end_training()
        assert not accelerate_loops()
        assert type(accelerator).__name__ == "Accelerator"
        return training.weight, loader.iteration, counts


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", ["with", "batches", "decorator"])
@pytest.mark.parametrize("how", ["for", "held", 1])
@pytest.mark.parametrize("lengths", [(3, 7), (5, 2), (4, 4)])
def test_each_form_ends_with_its_loop(workers: Workers, lengths: tuple[int, ...], form: str, how: Any) -> None:
    for weight, epochs, counts in workers.run(2, train, lengths, form, how):
        assert weight == exact(lengths, 2 if how == 1 else None)
        assert epochs == EPOCHS or how == 1
        assert {*counts} <= {2.0, 4.0}


def raise_within(rank: int) -> None:
    with accelerator_of(rank) as accelerator:
        training, loader = Accelerated(accelerator), shard(rank, (2, 5))

        class Broken:
            def __len__(self) -> int:
                return 4

            def __iter__(self) -> Any:
                yield from loader
                raise KeyError("in the loader")

        for x in accelerator.join_batches(Broken()):
            training.step(x)


def test_a_loader_that_raises_ends_the_context(workers: Workers) -> None:
    for outcome in workers.outcomes(2, raise_within):
        assert "in the loader" in outcome.error


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("lengths", [(7, 3), (3, 7), (0, 4), (4, 0)])
def test_a_held_iterator_is_finished_by_end_training(workers: Workers, lengths: Any, streams: bool) -> None:
    for weights, _ in workers.run(2, leave, lengths, "held", "", streams, "end"):
        assert weights == exact(lengths)


@pytest.mark.parametrize("lengths", [(7, 3), (3, 7)])
def test_a_process_that_ends_with_old_parameters_fails(workers: Workers, lengths: Any) -> None:
    short = lengths.index(3)
    outcomes = workers.outcomes(2, leave, lengths, "held", "", False, "exit")
    assert outcomes[short].trace == "exit code 1\n"
    assert (
        f"Rank {short}: JoinError: This process left a loop early and exited while the others continued"
        in outcomes[1 - short].error
    )


def fail(rank: int, how: str) -> None:
    """Leave a loop in its body on rank 1, and wait there on rank 0."""
    with accelerator_of(rank) as accelerator:
        training = Accelerated(accelerator)
        try:
            for step, x in enumerate(accelerator.join_batches(shard(rank, (7, 5)), timeout=timedelta(seconds=2))):
                if (rank, step) == (1, 2):
                    if how == "break":
                        break
                    raise ValueError("bad sample 17")
                training.step(x)
        except ValueError as error:
            if how == "end":
                sys.last_value = error
                end_accelerate_loops()
                os._exit(1)  # as a process that nobody catches it in
            raise
        finally:
            accelerator.end_training()


@pytest.mark.parametrize("how", ["raise", "end"])
def test_an_error_in_the_body_is_told_to_the_others(workers: Workers, how: str) -> None:
    first, second = workers.outcomes(2, fail, how, timeout=3.0)
    assert "PeerFailedError: Rank 1 failed, so rank 0 cannot continue. Rank 1: ValueError: bad sample 17" in first.error
    assert second.error == ("the process ended" if how == "end" else "ValueError: bad sample 17")


def test_breaks_at_different_steps_are_named(workers: Workers) -> None:
    first, second = workers.outcomes(2, fail, "break", timeout=3.0)
    assert "a `break` at different steps" in first.error
    assert "a `break` at different steps" in second.error


def plain_epochs(rank: int, lengths: Sequence[int], form: str) -> list[str]:
    """Go through a loader that is not prepared, beside a reference model for evaluation; return the warnings."""
    with accelerator_of(rank) as accelerator, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        net = network()
        model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
        reference = accelerator.prepare_model(network(), evaluation_mode=True)
        kind: Any = DataLoaderShard if form == "shard" else DataLoader
        loader = kind(batches_of(rank, lengths), batch_size=None)
        with accelerator.join_uneven_inputs(timeout=LIMIT) as join:
            for _ in range(EPOCHS):
                for x in join.batches(loader) if form == "batches" else loader:
                    with torch.no_grad():
                        target = reference(x)
                    accelerator.backward((model(x) - target).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
        return [str(one.message) for one in said if isinstance(one.message, JoinWarning)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", ["plain", "batches", "shard"])
@pytest.mark.parametrize("lengths", [(7, 3), (3, 7), (4, 4)])
def test_epochs_that_mix_are_warned_of_and_nothing_else(workers: Workers, lengths: Any, form: str) -> None:
    short = lengths.index(3) if 3 in lengths and form == "plain" else None
    for rank, said in enumerate(workers.run(2, plain_epochs, lengths, form)):
        assert len(said) == (rank == short), said
        assert all("so the ranks were in different epochs" in one for one in said)


def stop(rank: int, lengths: Sequence[int], form: str, ends: str) -> Any:
    """Decide in the second of three epochs to stop, in the body of the loop or after it."""
    with accelerator_of(rank) as accelerator:
        training, loader = Accelerated(accelerator), shard(rank, lengths, form == "stream")
        for epoch in range(EPOCHS + 1):
            stops = False
            with accelerator.join_uneven_inputs(timeout=LIMIT) if form == "with" else nullcontext():
                for step, x in enumerate(loader if form == "with" else accelerator.join_batches(loader, timeout=LIMIT)):
                    training.step(x)
                    if (epoch, step) == (1, 4):
                        accelerator.set_trigger()
                    if form != "after" and accelerator.check_trigger():
                        stops = True
                        break
            if stops or (form == "after" and accelerator.check_trigger()):
                break
        if ends == "exit":
            end_accelerate_loops()
        else:
            accelerator.end_training()
        return training.weight


@pytest.mark.parametrize(
    ("lengths", "form", "ends"),
    [
        ((7, 3), "batches", "end"),
        ((3, 7), "batches", "end"),
        ((3, 7), "stream", "end"),
        ((7, 3), "with", "end"),
        ((0, 7), "batches", "exit"),
    ],
)
def test_a_stop_that_a_rank_was_not_told_of_is_named(workers: Workers, lengths: Any, form: str, ends: str) -> None:
    long = lengths.index(7)
    outcomes = workers.outcomes(2, stop, lengths, form, ends)
    wanted = f"Rank {long} ended training, but rank {1 - long} started another loop"
    assert wanted in outcomes[1 - long].error
    assert outcomes[long].trace == "exit code 1\n" if ends == "exit" else wanted in outcomes[long].error


@pytest.mark.parametrize("lengths", [(7, 3), (3, 7)])
def test_a_stop_that_is_decided_on_after_the_loop_is_right(workers: Workers, lengths: Any) -> None:
    for weights in workers.run(2, stop, lengths, "after", "end"):
        assert weights == exact(lengths)
