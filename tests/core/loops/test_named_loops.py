"""Several loops in an epoch, each with a name: `join.state_dict()` has a place for each.

As test_positions.py, whose loaders these are: an epoch trains on two loaders in turn, and goes through a third one.
"""

import multiprocessing
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.core.loops.test_positions import leaves, loader_of
from tests.covering import others_long
from tests.support.workers import Workers
from torch_join import Join

EPOCHS = 3
NAMES = ("first", "second", "validation")
LENGTHS = ((0, 4, 6), (1, 0, 3), (3, 1, 0))  # of these loops, by rank
Place = tuple[int, int, int]  # an epoch, which of its loops, and a step; step -1: after that loop


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        kinds: Of the loops' loaders.
        options: Of `Join`.
        one_context: Whether one `with` is around all epochs.
        names: Of the loops.
        most: How many steps the first loop has before it is left by `break`.
        goes_to: Whether a run that goes on leaves out the loops before that in which it was saved by itself.
    """

    kinds: tuple[str, str, str]
    options: tuple[tuple[str, Any], ...] = ()
    one_context: bool = True
    names: tuple[str, str, str] = NAMES
    most: int = 99
    goes_to: bool = False


def train(rank: int, case: Case, folder: str, start: Place | None, again: str = "") -> dict[str, Any]:
    """See `_train`; these processes are daemons, which may have no workers of their own."""
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        return _train(rank, case, folder, start, again)


def _train(rank: int, case: Case, folder: str, start: Place | None, again: str) -> dict[str, Any]:
    """Train from a place on, or from the begin, and save everywhere then; into `again` where it goes on."""
    torch.manual_seed(11)
    net = nn.Linear(1, 1).double()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
    loaders = [loader_of(kind, rank, 3, lengths) for kind, lengths in zip(case.kinds, LENGTHS, strict=True)]
    seen: dict[Place, list[int]] = {}
    join = Join([ddp, optimizer], **dict(case.options))
    first = (0, 0)
    if start is not None:
        saved = torch.load(path_of(folder, start), weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        join.load_state_dict(saved["join"])
        first = (start[0] + (start[2] < 0), start[1] if case.goes_to and start[2] >= 0 else 0)

    def save(place: Place) -> None:
        if start is not None and not again:
            return
        state = join.state_dict()
        if rank == min(join.active_ranks):
            states = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "join": state}, path_of(again or folder, place))

    def run(epoch: int, which: int) -> None:
        trains = which < 2
        with nullcontext() if trains else torch.no_grad():
            for batch in join.batches(loaders[which], name=case.names[which]):
                x = torch.cat([*leaves(batch)]).reshape(-1, 1)
                seen[epoch, which, join.step] = [int(number) for number in x.flatten().tolist()]
                loss = (ddp(x / 10) - x / 7).square().mean()
                if trains:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                save((epoch, which, join.step))
                if not which and join.step == case.most - 1:
                    break

    def run_epoch(epoch: int) -> None:
        with nullcontext() if case.one_context else join:
            for which in range(first[1] if epoch == first[0] else 0, 3):
                run(epoch, which)
            save((epoch, 2, -1))

    around: AbstractContextManager[Any] = join if case.one_context else nullcontext()
    with around:
        for epoch in range(first[0], EPOCHS):
            run_epoch(epoch)
    return {"seen": seen, "parameters": [p.tolist() for p in net.parameters()]}


def path_of(folder: str, place: Place) -> Path:
    return Path(folder) / f"{place}.pt"


def check(workers: Workers, case: Case, folder: Path, places: list[Place]) -> None:
    """Compare runs that go on from places, and from the last one twice, with the whole one."""
    whole = workers.run(3, train, case, str(folder), None)
    for place in places:
        compare(whole, workers.run(3, train, case, str(folder), place), place)
    again, later = folder / "again", (1, 2, 1)
    again.mkdir()
    workers.run(3, train, case, str(folder), (1, 1, 0), str(again))
    compare(whole, workers.run(3, train, case, str(again), later), later)


def compare(whole: list[dict[str, Any]], resumed: list[dict[str, Any]], place: Place) -> None:
    """Compare, by rank, a run that goes on from a place with the whole one."""
    epoch, which, step = place
    after = (epoch, which, step) if step >= 0 else (epoch + 1, -1, -1)
    for rank, (run, one) in enumerate(zip(resumed, whole, strict=True)):
        assert run["seen"] == {at: numbers for at, numbers in one["seen"].items() if at > after}, (place, rank)
    for run, one in zip(resumed, whole, strict=True):
        assert run["parameters"] == one["parameters"], place


@pytest.mark.covering(1)
@pytest.mark.parametrize("half", [0, 1])  # of the places
@pytest.mark.parametrize(
    "case",
    [
        Case(("shuffled", "stateful", "list")),
        Case(("stateful", "shuffled", "shuffling stream"), (("may_break", True),), one_context=False),
        Case(("shuffling stream", "shuffled", "shuffled"), (("weighting", "samples"),), most=2),
        Case(("workers that stay", "a numpy generator", "shuffled")),
        Case(("shuffled", "with replacement", "shuffled"), names=("first", "", "validation"), goes_to=True),
        Case(("shuffled", "shuffling stream", "list"), (("rebalance", True),)),
    ],
)
def test_each_goes_on_where_it_was(workers: Workers, tmp_path: Path, case: Case, half: int) -> None:
    check(workers, case, tmp_path, [(0, 0, 0), (1, 1, 0), (1, 1, 1), (0, 2, 0), (1, 2, 1), (0, 2, -1)][half::2])


@pytest.mark.parametrize("kind", others_long(["shuffled", "stateful", "workers that stay"], "shuffled", "stateful"))
def test_without_names_a_state_of_one_of_them_is_its_own(workers: Workers, tmp_path: Path, kind: str) -> None:
    case = Case((kind, "list", "list"), names=("", "", ""))
    whole = workers.run(3, train, case, str(tmp_path), None)
    for place in [(0, 0, 1), (1, 0, 5)]:
        compare(whole, workers.run(3, train, case, str(tmp_path), place), place)


def refuse(rank: int, what: str) -> list[str]:
    """Do something that cannot be done; return what was warned of."""
    ddp = DistributedDataParallel(nn.Linear(1, 1).double())
    loaders = {"a": loader_of("list", rank, 2, (2, 0)), "b": loader_of("list", rank, 2, (1, 3))}

    def go(join: Join, name: str, saves: bool = False, called: str | None = None) -> Any:
        state = None
        for batch in join.batches(loaders[name], name=name if called is None else called):
            ddp(batch).sum().backward()
            state = join.state_dict() if saves and join.step == 1 else state
        return state

    with Join([ddp]) as join:
        if what == "other names on ranks":
            go(join, "a", called=f"a{rank}")
        called = "" if what == "without names" else None
        go(join, "a", called=called)
        state = go(join, "b", True, called)
        if what == "without names":
            state = join.state_dict()
    states: list[Any] = [None] * 2
    torch.distributed.all_gather_object(states, state)
    state = states[1]
    with Join([ddp]) as join, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if what != "some ranks load" or rank == 1:
            join.load_state_dict(state)
        if what == "another name":
            go(join, "a", called="c")
        if what == "does not come":
            go(join, "a")
        go(join, "a", called=called)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("other names on ranks", r"different names \(rank 0: 'a0'; rank 1: 'a1'\)"),
        ("some ranks load", "rank 0: at none; rank 1: past its end"),
        ("another name", "The loop 'c' begins, and 'b', in whose middle"),
        ("does not come", "The loop 'a' begins again, and 'b', in whose middle"),
    ],
)
def test_what_cannot_be_raises_on_all_ranks(workers: Workers, what: str, message: str) -> None:
    found = [outcome.error for outcome in workers.outcomes(2, refuse, what, timeout=3.0)]
    assert re.search(message, " ".join(found)), found
    for error in found:
        assert re.search(message, error) or "failed, so rank" in error, found


def test_without_names_another_loop_s_end_is_noticed(workers: Workers) -> None:
    for rank, (then, now) in enumerate([(1, 2), (3, 0)]):
        (text,) = workers.run(2, refuse, "without names")[rank]
        assert f"over another loader than this list (batches: {then} then, {now} now)" in text


def test_one_process_has_a_place_for_each(tmp_path: Path) -> None:
    def go(join: Join, name: str, stop: int = -1) -> list[int]:
        found = []
        loader = loaders.setdefault(name, DataLoader(range(5), shuffle=True, generator=generator or torch.Generator()))
        for batch in join.batches(loader, name=name):
            found.append(batch.item())
            if join.step == stop:
                torch.save(join.state_dict(), tmp_path / "state.pt")
        return found

    names = ("a", "b", "c", "a", "b", "c")
    for shared in (None, torch.Generator()):  # one for all loaders
        loaders: dict[str, DataLoader[Any]] = {}
        generator = shared
        with Join([nn.Linear(1, 1)], enable=False) as join:
            whole = [go(join, name, stop=1 if at == 1 else -1) for at, name in enumerate(names)]
        loaders.clear()
        generator = shared and torch.Generator()
        join.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        with join:
            assert [go(join, name) for name in names] == [[], whole[1][2:], *whole[2:]]
