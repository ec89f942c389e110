"""`join.state_dict()` and `join.load_state_dict()`: every sample once per epoch, whatever stops and goes on.

Jobs with as many ranks each, which have new objects, go on where the one before was stopped: see resumed.py.
"""

import multiprocessing
import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from tests.core.loops.resumed import list_of, train
from tests.support.many import seeds
from tests.support.other_ranks import BEHIND, Chain, ShuffledStream, check, own
from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join


def chain_of(kind: str, lengths: tuple[int, ...], places: list[tuple[int, int]], **chosen: Any) -> Chain:
    chain = own(kind, lengths, places, once="with replacement" not in kind, **chosen)
    return replace(chain, lengths=()) if kind == "unpadded" else chain


@dataclass(frozen=True)
class Case:
    """A kind of loaders, of so many batches by rank, and how they are gone through."""

    kind: str
    lengths: tuple[int, ...] = (0, 4, 9)
    options: tuple[tuple[str, Any], ...] = ()
    contexts: bool = False  # each epoch has its own
    breaks: bool = False  # jobs end by it
    window: int = 1
    rebalance: bool = False

    def __str__(self) -> str:
        how = [name for name in ("contexts", "breaks", "rebalance") if getattr(self, name)]
        return ", ".join([self.kind, *map(str, self.lengths), *how])

    @property
    def steps(self) -> int:
        """How many an epoch has."""
        if "with replacement" in self.kind:
            return 20
        if self.rebalance or self.kind == "unpadded":  # dealt out evenly
            return -(-sum(self.lengths) // len(self.lengths))
        return -(-max(self.lengths) // self.window)

    def check(self, workers: Workers, places: list[tuple[int, int]], folder: Path) -> None:
        options = {"rebalance": self.rebalance, **dict(self.options)}
        chain = chain_of(self.kind, self.lengths, places, options=options, window=self.window)
        check(workers, chain, folder, partial(train, contexts=self.contexts, breaks=self.breaks))


KINDS = (
    *("list", "shuffled", "global", "with replacement", "unpadded", "stream", "shuffled stream", "bar", "stateful"),
    *("stateful, workers", "stateful stream", "stateful, with replacement", "nodes", "workers that stay"),
    "a numpy generator",
)
SOME, ACTIVE, SAMPLES = (("may_break", True),), (("weighting", "active"),), (("weighting", "samples"),)
CASES = [
    *(Case(kind) for kind in KINDS if kind != "workers that stay"),
    pytest.param(Case("workers that stay"), marks=pytest.mark.long),
    Case("list", breaks=True),
    Case("shuffled", (3, 0, 5), SOME, breaks=True),
    Case("unpadded", (3, 0, 5), SOME, contexts=True),
    Case("stateful", (3, 0, 5), SAMPLES + SOME, contexts=True),
    Case("stateful stream", (3, 0, 5), SOME),
    Case("shuffled", (4, 0, 6), ACTIVE, contexts=True, window=2),
    Case("stateful", (4, 0, 6), window=2),
    Case("nodes", (4, 0, 6), window=2),
    Case("list", rebalance=True),
    Case("shuffled", (9, 1, 4), SAMPLES, rebalance=True),
    Case("stream", (1, 0, 9), rebalance=True),
    Case("stream", (2, 7, 3), SAMPLES, rebalance=True),
    Case("list", (4, 4, 4), SAMPLES, rebalance=True),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("at_ends", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_goes_on_where_it_was_interrupted(workers: Workers, tmp_path: Path, case: Case, at_ends: bool) -> None:
    steps, late = case.steps, 3 * case.steps // 4
    if at_ends and not case.breaks:
        places = [(0, steps - 1), (1, late), (0, max(0, steps - 2 - late))]
    else:
        places = [(0, 0), (0, 0), (1, steps // 3), (0, BEHIND)]
    if case.kind == "workers that stay":  # in a job that has gone on, too
        places = [(0, 1), (1, 1)]
    case.check(workers, places, tmp_path)


@seeds(range(2), 300)
def test_random_runs_go_on(workers: Workers, seed: int, tmp_path: Path) -> None:
    one = random.Random(seed)
    lengths = one.choice([(0, 4, 9), (4, 9, 0), (9, 0, 4), (3, 3, 3), (1, 5, 2), (2, 6), (0, 3), (5, 1)])
    kind = one.choice([kind for kind in KINDS if "workers" not in kind])
    rebalances = one.random() < 0.3 and kind in ("list", "shuffled", "global", "stream", "shuffled stream")
    options: dict[str, Any] = {"weighting": one.choice(["world", "active", "samples"])}
    options |= {} if rebalances else {"may_break": one.choice([False, True])}
    window = 2 if kind == "shuffled" and lengths == (2, 6) else 1
    contexts, breaks = (one.random() < 0.5 for _ in range(2))
    case = Case(kind, lengths, tuple(options.items()), contexts, breaks, window, rebalances)
    places = [(one.choice([0, 0, 1]), one.choice([*range(case.steps), BEHIND])) for _ in range(3)]
    if breaks:  # before the last step
        places = [(which, one.randrange(case.steps - 1)) for which in range(2)]
    case.check(workers, places, tmp_path)


def refuse(rank: int, what: str) -> None:
    """Do something that cannot be done."""
    ddp = DistributedDataParallel(nn.Linear(1, 1).double())
    state: dict[str, Any] = {}
    with Join([ddp], rebalance=what == "no longer rebalanced") as join:
        for batch in join.batches(list_of(rank, (4, 1) if "rebalanced" in what else (4, 3))):
            ddp(batch).sum().backward()
            if join.step == ("rebalanced" not in what) and (rank == 0 or what != "some"):
                state = join.state_dict()
            if join.step == 2 and what == "in a loop":
                join.load_state_dict(state)
        if what == "another world":
            join.load_state_dict({**state, "places": state["places"][:1]})
        if what == "another version":
            join.load_state_dict({**state, "version": 99})
        if "rebalanced" in what:
            again = Join([ddp], rebalance=what == "now rebalanced")
            again.load_state_dict(state)
    if "rebalanced" in what:
        with again:
            for batch in again.batches(list_of(rank, (4, 1))):
                ddp(batch).sum().backward()
        return
    with Join([ddp]) as join:
        if what != "some ranks load" or rank == 1:
            join.load_state_dict(state)
        kind = "shuffled" if what == "another loader" else "list"
        for batch in join.batches(list_of(rank, (4, 4) if what == "longer" else (4, 3), kind)):
            ddp(batch).sum().backward()


class Secret(Sampler[int]):
    """Draws by nothing that has a state."""

    def __init__(self) -> None:
        self.random = random.SystemRandom()

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def refuse_order(rank: int, what: str) -> int:
    """Ask for a place in an order that nobody could have again; return how many batches there were."""
    samples = range(4)
    loaders: dict[str, Any] = {
        "zip": zip(DataLoader(samples), DataLoader(samples), strict=True),
        "out of order": DataLoader(samples, num_workers=1, in_order=False),
        "in a worker": DataLoader(ShuffledStream(samples), num_workers=1, persistent_workers=True),
        "not asked": DataLoader(samples, sampler=Secret()),
    }
    with (
        mock.patch.dict(multiprocessing.current_process()._config, daemon=False),  # type: ignore[attr-defined]
        Join([DistributedDataParallel(nn.Linear(1, 1))]) as join,
    ):
        for _ in join.batches(loaders[what]):
            if what != "not asked":
                join.state_dict()
        return join.step


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("zip", "The position in a zip is unknown: it is an iterator"),
        ("out of order", "The position in a DataLoader with in_order=False is unknown"),
        ("in a worker", "the stream's order is drawn from loader.dataset.random, and each worker's copy"),
        ("not asked", ""),
    ],
)
def test_an_order_that_nobody_could_have_again(workers: Workers, what: str, message: str) -> None:
    for outcome in workers.outcomes(2, refuse_order, what, timeout=3.0):
        assert message in outcome.error or "failed, so rank" in outcome.error, outcome.error
        assert bool(outcome.error) == bool(message)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("some", r"join.state_dict\(\) was called on rank 0, but rank 1 continued without the call"),
        ("in a loop", r"join.load_state_dict\(\) was called in a loop"),
        (
            "another world",
            "in the middle of a loop by 1 ranks, and there are 2 now.",
        ),
        ("another version", "version 99"),
        ("some ranks load", "rank 0: at none; rank 1: at step 2"),
        ("another loader", r"a different loader than this DataLoader \(batches: . then, unknown now"),
        ("now rebalanced", "resumed from a state that was written without rebalance=True"),
        ("no longer rebalanced", "resumed from a state that was written with rebalance=True"),
        ("longer", r"a different loader than this list \(batches: 3 then, 4 now\)"),
    ],
)
def test_what_cannot_be_resumed_raises_on_all_ranks(workers: Workers, what: str, message: str) -> None:
    found = [outcome.error for outcome in workers.outcomes(2, refuse, what, timeout=10.0)]
    assert re.search(message, " ".join(found)), found
    for error in found:
        assert re.search(message, error) or "failed, so rank" in error, found


RIGHT = ("adversaries", "turns", "left out")


def save_each_step(rank: int, way: str, lengths: tuple[int, ...]) -> None:
    """Ask for a place after each batch, where two models are trained in turns, or one over windows of two batches."""
    first: Any
    first, second = (DistributedDataParallel(nn.Linear(1, 1).double()) for _ in range(2))
    if way == "sharded":
        first = fully_shard(nn.Linear(1, 1).double(), mesh=init_device_mesh("cpu", (len(lengths),)))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
    with Join([first, second, *optimizers]) as join:
        for x in join.batches(list_of(rank, lengths)):
            if way == "adversaries":  # the second loss leaves gradients in the first model, which has stepped
                for number in range(2):
                    optimizers[number].zero_grad()
                    (second(first(x)) if number else first(x)).sum().backward()
                    optimizers[number].step()
            elif way in ("turns", "left out"):  # gradients of the first model are left, for its next zero_grad
                number = join.step % 2 if way == "turns" else 0
                optimizers[number].zero_grad()
                (second(first(x)) if number else first(x)).sum().backward()
                if way == "turns" or join.step != 1:
                    optimizers[number].step()
            else:
                if way == "sharded":
                    first.set_requires_gradient_sync(join.step % 2 == 1)
                with first.no_sync() if way == "unsynced" and join.step % 2 == 0 else nullcontext():
                    first(x).sum().backward()
                if join.step % 2 == 1:
                    optimizers[0].step()
                    optimizers[0].zero_grad()
            if way in RIGHT or join.step >= 1:
                join.state_dict()
            elif way == "synced":
                with warned("If the optimizer has already used this rank's gradients") as found:
                    join.state_dict()
                assert len(found) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", [(0, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("way", [*RIGHT, "synced", "unsynced", "sharded"])
def test_a_place_within_a_window_is_refused(workers: Workers, way: str, lengths: tuple[int, ...]) -> None:
    for outcome in workers.outcomes(2, save_each_step, way, lengths, timeout=3.0):
        if way in RIGHT:
            assert not outcome.error, outcome.error
        else:
            assert re.search("at step 2 of a loop, within an accumulation window: rank . holds", outcome.error)


def go_on_from_old(rank: int, path: str) -> list[list[float]]:
    samples = torch.arange(8.0).view(8, 1)
    loader = DataLoader(samples, 2, shuffle=True, generator=torch.Generator().manual_seed(5))
    with Join([DistributedDataParallel(nn.Linear(1, 1))]) as join:
        join.load_state_dict(torch.load(path))
        return [batch.flatten().tolist() for batch in join.batches(loader)]


def test_a_state_of_version_0_2_0(workers: Workers) -> None:
    """Amid a loop whose batches were drawn from a generator of seed 1; the next release reads it no more."""
    path = Path(__file__).parent / "written" / "state_0_2_0.pt"
    assert workers.run(1, go_on_from_old, str(path)) == [[[7.0, 1.0], [5.0, 2.0]]]
    for outcome in workers.outcomes(2, go_on_from_old, str(path)):
        assert "in the middle of a loop by 1 ranks, and there are 2 now" in outcome.error
