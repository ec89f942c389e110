"""A dataloader in the dictionary of `fabric.save` and `fabric.load`: all ranks' places, whatever stops and goes on.

As tests/core/loops/test_positions.py, whose loaders these are.
"""

import multiprocessing
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_join.fabric import DDPJoinStrategy
from tests.core.loops.test_positions import (
    EPOCHS,
    SIZE,
    Case,
    Place,
    Samples,
    check_in_new_processes,
    compare_with,
    loader_of,
    path_of,
)
from tests.core.loops.test_random_positions import steps_of
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.many import seeds
from tests.support.workers import Workers


def _train(rank: int, case: Case, folder: str, start: Place | None) -> dict[str, Any]:
    world_size = len(case.lengths)
    fabric = fabric_of(world_size, DDPJoinStrategy(**dict(case.options)))
    torch.manual_seed(11)
    net = nn.Linear(1, 1).double()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
    injects = case.kind == "injected"
    if injects:
        loader = fabric.setup_dataloaders(DataLoader(Samples(23, 1), SIZE, shuffle=True))
    else:
        loader = loader_of(case.kind, rank, world_size, case.lengths)
        is_nodes = case.kind == "nodes"
        loader = (
            fabric.strategy.batches(loader)
            if is_nodes
            else fabric.setup_dataloaders(loader, use_distributed_sampler=False)
        )
    kind = "shuffled" if dict(case.options).get("rebalance") else "stateful"
    other = fabric.setup_dataloaders(loader_of(kind, rank, world_size, (2, 1, 0)), use_distributed_sampler=False)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "other": other, "epoch": 0}
    seen: dict[Place, list[int]] = {}
    after: dict[int, list[int]] = {}
    first = 0
    if start is not None:
        fabric.load(path_of(folder, start), state)
        first = int(state["epoch"]) + (start[1] < 0)
    begun = 0 if start is None or start[1] < 0 else start[1] + 1  # of this epoch, before

    def save(place: Place) -> None:
        if start is None:
            fabric.save(path_of(folder, place), {**state, "epoch": place[0]})

    for epoch in range(first, EPOCHS):
        for step, batch in enumerate(loader, begun):
            x = (batch if isinstance(batch, Tensor) else torch.cat([*batch])).reshape(-1, 1)
            seen[epoch, step] = [int(number) for number in x.flatten().tolist()]
            optimizer.zero_grad()
            fabric.backward((model(x / 10) - x / 7).square().mean())
            optimizer.step()
            save((epoch, step))
        begun = 0
        with torch.no_grad():
            after[epoch] = [int(number) for batch in other for number in batch.flatten().tolist()]
        save((epoch, -1))
    fabric.barrier()
    return {"seen": seen, "after": after, "parameters": [p.tolist() for p in net.parameters()]}


def train(rank: int, case: Case, folder: str, start: Place | None) -> Any:
    """Train from a place on, or from the begin, and save everywhere then."""
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        return to_the_end(rank, _train, case, folder, start)


@pytest.mark.parametrize(
    ("kind", "options", "lengths"),
    [
        ("shuffled", {}, (0, 4, 9)),
        ("stateful", {}, (0, 4, 9)),
        ("stateful", {"weighting": "samples"}, (3, 0, 5)),
        ("stateful stream", {"may_break": True}, (0, 4, 9)),
        ("nodes", {}, (3, 0, 5)),
        ("stream", {}, (0, 4, 9)),
        ("stateful with replacement", {}, (0, 4, 9)),
        ("injected", {}, (4, 4, 4)),
        ("shuffled", {"rebalance": True}, (0, 4, 9)),
    ],
)
def test_a_run_goes_on_where_it_was_saved(
    workers: Workers, tmp_path: Path, kind: str, options: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    case = Case(kind, lengths, tuple(options.items()))
    places = [(0, 1), (1, 2), (1, 3), (1, steps_of(case) - 1), (0, -1)]
    places += [(0, 15)] if "replacement" in kind else []  # the next batch is of the next 32 that are drawn
    whole = workers.run(3, train, case, str(tmp_path), None)
    for place in places:
        resumed = workers.run(3, train, case, str(tmp_path), place)
        compare_with(whole, resumed, place)
        for run, one in zip(resumed, whole, strict=True):
            assert run["after"] == {at: rows for at, rows in one["after"].items() if at in run["after"]}


def train_from(rank: int, case: Case, folder: str, places: list[Place]) -> list[Any]:
    """Train as a whole, and from each of these places."""
    found = [train(rank, case, folder, None)]
    for place in places:
        dist.barrier()
        found.append(train(rank, case, folder, place))
    return found


@seeds(range(1), 100)
def test_random_runs_go_on(workers: Workers, seed: int) -> None:
    one = random.Random(seed)
    lengths = one.choice([(0, 4, 9), (4, 9, 0), (9, 0, 4), (3, 3, 3), (1, 5, 2), (2, 6), (0, 3), (5, 1)])
    kind = one.choice(["shuffled", "stateful", "stateful stream", "nodes", "stream", "sampler", "shuffling stream"])
    options = (("weighting", one.choice(["world", "active", "samples"])), ("may_break", one.random() < 0.3))
    case = Case(kind, lengths, options)
    steps = steps_of(case)
    places = [(one.randrange(EPOCHS - 1), one.randrange(-1, steps)) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = workers.run(len(lengths), train_from, case, folder, places, deadline=120.0)
    for index, place in enumerate(places):
        compare_with([runs[0] for runs in ranks], [runs[1 + index] for runs in ranks], place)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shuffled", "stateful", "stateful stream", "nodes", "stream", "sampler"])
def test_it_goes_on_in_new_processes(workers: Workers, tmp_path: Path, kind: str) -> None:
    check_in_new_processes(workers, train, kind, str(tmp_path))


def refuse(rank: int, what: str) -> None:
    """Save a loader of which nobody knows how far it has come."""
    fabric = fabric_of(2)
    model = fabric.setup(nn.Linear(1, 1).double())
    first, second = (fabric.setup_dataloaders(loader_of("stateful", rank, 2, (2, 2))) for _ in range(2))
    for batch in fabric.strategy.batches(zip(first, second, strict=True)) if what == "zip" else first:
        fabric.backward(model(torch.cat([*batch]).reshape(-1, 1)).sum())
        inner = fabric.setup_dataloaders(loader_of("stateful", rank, 2, (2, 2)))
        fabric.save("/nowhere", {"loader": first if what == "zip" else inner})


@pytest.mark.parametrize(
    ("what", "message"), [("zip", "read as a part of something else"), ("late", "that was set up inside of a loop")]
)
def test_what_nobody_knows_raises_on_all_ranks(workers: Workers, what: str, message: str) -> None:
    for outcome in workers.outcomes(2, to_the_end, refuse, what, timeout=3.0):
        assert message in outcome.error or "failed, so rank" in outcome.error, outcome.error
