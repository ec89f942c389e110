"""Several loops in an epoch, each with a name: `join.state_dict()` has a place for each.

As test_positions.py: an epoch trains on two loaders in turn, and goes through a third one.
"""

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.core.loops.resumed import list_of, train
from tests.support.other_ranks import BEHIND, EVALUATED, check, own
from tests.support.workers import Workers
from torch_join import Join

NAMES = ("first", "second", "validation")
LENGTHS = ((0, 4, 6), (1, 0, 3), (3, 1, 0))  # of these loops, by rank
PLACES = {
    "in each loop": [(0, 0), (1, 100), (0, 100), (0, EVALUATED + 1)],
    "after one": [(0, EVALUATED), (0, BEHIND), (0, 1), (0, 101)],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(
    ("kinds", "options", "how"),
    [
        ("shuffled; stateful; list", {}, {}),
        ("stateful; shuffled; shuffled stream", {"may_break": True}, {"contexts": True}),
        ("shuffled stream; shuffled; shuffled", {"weighting": "samples"}, {"most": 2}),
        pytest.param("workers that stay; a numpy generator; shuffled", {}, {}, marks=pytest.mark.long),
        ("shuffled; with replacement; shuffled", {}, {"names": ("first", "", "validation"), "goes_to": True}),
        ("shuffled; shuffled stream; list", {"rebalance": True}, {}),
        # A state of one of them is its own.
        ("shuffled; list; list", {}, {"names": ("", "", "")}),
        ("stateful; list; list", {}, {"names": ("", "", "")}),
    ],
)
def test_each_goes_on_where_it_was(
    workers: Workers, tmp_path: Path, kinds: str, options: dict[str, Any], how: dict[str, Any], places: str
) -> None:
    found = PLACES[places]
    if "workers that stay" in kinds:  # see test_positions.py
        found = [(1, 100), (0, EVALUATED)]
    elif "names" in how and not any(how["names"]):
        found = [(0, 1), (1, 5)]
    once, beside = "replacement" not in kinds and "most" not in how, (*LENGTHS[1], *LENGTHS[2])
    chain = own(kinds, LENGTHS[0], found, beside=beside, once=once, options=options)
    check(workers, chain, tmp_path, partial(train, **{"names": NAMES, **how}))


def refuse(rank: int, what: str) -> list[str]:
    """Do something that cannot be done; return what was warned of."""
    ddp = DistributedDataParallel(nn.Linear(1, 1).double())
    loaders = {"a": list_of(rank, (2, 0)), "b": list_of(rank, (1, 3))}

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
        ("another name", "in the middle of the loop 'b', but the loop 'c' begins first"),
        ("does not come", "in the middle of the loop 'b', but the loop 'a' begins again first"),
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
        assert f"over a different loader than this list (batches: {then} then, {now} now)" in text


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
