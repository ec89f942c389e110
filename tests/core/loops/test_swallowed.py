"""An error that all ranks got, and that some of them swallow within the `with`: the ranks cannot meet any more."""

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from tests.support.workers import Workers, connect
from torch_join import Join, PeerFailedError

TIMEOUT = 30.0  # of `Join`, in seconds
SOON = 4.0  # before a wait is looked into, which is after five seconds
LENGTHS = (6, 2)
ALL = (0, 1)


class BrokenError(Exception):
    """What a loader raises."""


@dataclass(frozen=True)
class Swallowing:
    """Where rank 0's loader breaks, which ranks go on after that, and with what."""

    step: int
    ranks: tuple[int, ...]
    then: str = "end"  # the `with`, or begin "another" loop, or raise an error of the user's: "raise"
    loop: str = "sized"  # or "stream", "heartbeat", "early"


class Loader:
    """The batches of a rank."""

    def __init__(self, rank: int, breaks_at: int) -> None:
        self.length, self.breaks_at = LENGTHS[rank], breaks_at if rank == 0 else -1

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(self.length):
            if step == self.breaks_at:
                raise BrokenError("a bad sample")
            yield torch.ones(2, 3)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.loader)


def watch(rank: int, case: Swallowing) -> tuple[str, str, float]:
    """Return what was swallowed, what was raised, and how long it took from there to here."""
    connect()
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.Adam(ddp.parameters())

    def train(join: Join, step: int) -> None:
        loader: Any = Loader(rank, step)
        for x in join.batches(loader if case.loop == "sized" else Stream(loader)):
            optimizer.zero_grad()
            ddp(x).sum().backward()
            optimizer.step()

    swallowed = raised = ""
    entered: list[Any] = []
    start = time.monotonic()
    options = {"may_break": case.loop == "heartbeat", "throw_on_early_termination": case.loop == "early"}
    try:
        with Join([ddp, optimizer], timeout=timedelta(seconds=TIMEOUT), **options) as join:
            entered.append(weakref.ref(join))
            try:
                train(join, case.step)
            except Exception as error:
                swallowed, start = text(error), time.monotonic()
                if rank not in case.ranks:
                    raise
                if case.then == "raise":
                    raise ValueError("of the user's") from error
            if case.then == "another":
                train(join, -1)
    except Exception as error:
        raised = text(error)
    seconds = time.monotonic() - start
    del join
    gc.collect()
    assert entered[0]() is None, "a reference to Join"
    return swallowed, raised, seconds


def text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


CASES = {
    "all-even": Swallowing(1, ALL),
    "all-tail": Swallowing(4, ALL, loop="stream"),
    "all-heartbeat": Swallowing(4, ALL, loop="heartbeat"),
    "all-early": Swallowing(-1, ALL, loop="early"),
    "failed-one": Swallowing(4, (0,), loop="stream"),
    "other-one": Swallowing(4, (1,)),
    "another-loop": Swallowing(4, ALL, "another"),
    "another-loop-even": Swallowing(1, (0,), "another", "stream"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_raised_again_where_the_ranks_would_meet(workers: Workers, name: str) -> None:
    for swallowed, raised, seconds in workers.run(2, watch, CASES[name]):
        assert swallowed
        assert raised == swallowed
        assert seconds < SOON


def test_each_rank_has_an_error_of_its_own(workers: Workers) -> None:
    (_, culprit, _), (_, other, _) = workers.run(2, watch, CASES["all-tail"])
    assert culprit == "BrokenError: a bad sample"
    assert other.startswith(f"{PeerFailedError.__name__}: Rank 0 failed")
    assert culprit in other


def test_an_error_in_its_place_passes(workers: Workers) -> None:
    for swallowed, raised, seconds in workers.run(2, watch, Swallowing(4, ALL, "raise")):
        assert swallowed
        assert raised == "ValueError: of the user's"
        assert seconds < SOON


def test_one_process_goes_on(workers: Workers) -> None:
    ((swallowed, raised, _),) = workers.run(1, watch, Swallowing(4, ALL, "another"))
    assert swallowed == "BrokenError: a bad sample"
    assert raised == ""
