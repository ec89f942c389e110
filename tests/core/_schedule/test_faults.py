"""Rebalanced loops that are left, batches that cannot travel, and loaders that are not what they seem."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.support.front_ends.plain import Loop, Stream
from tests.support.inside import planned_rows
from tests.support.run import Batch, difference
from tests.support.stopped import GRACE, TIMEOUT
from tests.support.warned import warned
from tests.support.workers import Outcome, Workers, connect
from torch_join import Join, JoinValueError

WITHIN = TIMEOUT + GRACE  # seconds until a rank raises what another one has told, or why it hears nothing
LENGTHS = (4, 9, 2)
LOOPS = ("sized", "iterable")
GIVER, RECEIVER = 1, 2  # rank 0 trains on its own batches


class BrokenError(Exception):
    """What the user's code raises."""


def first(batch: Any) -> Any:
    return batch


# ---------------------------------------------------------------- loops that are left


class Small:
    """A model and an optimizer; what is trained on has a place."""

    def __init__(self, lengths: tuple[int, ...], wraps: bool = True, weighting: str = "world") -> None:
        self.lengths, self.weighting = lengths, weighting
        self.models = Loop(lengths).build()
        self.model: Any = DistributedDataParallel(self.models) if wraps else self.models
        self.optimizer = torch.optim.Adam(self.models.parameters(), lr=0.05)

    @property
    def data(self) -> Any:
        return Loop(self.lengths)

    def join(self, **options: Any) -> Join:
        options = {"rebalance": True, "timeout": timedelta(seconds=30), "weighting": self.weighting, **options}
        return Join([self.model, self.optimizer], **options)

    def step(self, batches: list[Batch]) -> None:
        self.optimizer.zero_grad()
        for x, y in batches:
            shares = len(batches) if self.weighting == "samples" else len(self.lengths)  # batches are of one size
            weight = 1.0 if self.model is not self.models else 1 / shares
            ((self.model(x) - y).pow(2).mean() * weight).backward()
        self.optimizer.step()

    def go_through(self, join: Join, rank: int, epoch: int, loop: str = "sized") -> None:
        for batch in join.batches(loader_of(loop, self.data.batches(rank, epoch))):
            self.step([batch])

    def follow(self, rows: list[dict[int, tuple[int, int]]], epoch: int) -> None:
        """Do in one process what ranks do in these steps."""
        for row in rows:
            self.step([self.data.batch(owner, epoch, index) for owner, index in row.values()])

    @property
    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.models.parameters()]


def loader_of(loop: str, batches: list[Any]) -> Any:
    return DataLoader(Stream(batches), batch_size=None) if loop == "iterable" else batches


def rows_of(lengths: tuple[int, ...], loop: str) -> list[dict[int, tuple[int, int]]]:
    return planned_rows(lengths, [None] * len(lengths) if loop == "iterable" else None)


def leave(rank: int, lengths: tuple[int, ...], stop: int, loop: str, when: str, weighting: str) -> list[Tensor]:
    """Break in the first epoch, then go through another loop and through another epoch."""
    small = Small(lengths, weighting=weighting)
    with small.join() as join:
        for step, batch in enumerate(join.batches(loader_of(loop, small.data.batches(rank, 0)))):
            if when == "before" and step == stop:
                break
            small.step([batch])
            if when == "after" and step + 1 == stop:
                break
        for batch in join.batches(loader_of(loop, small.data.batches(rank, 1)[::-1])):
            small.step([batch])
        small.go_through(join, rank, 2, loop)
    return small.parameters


@pytest.mark.covering(1)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("loop", "weighting"), [("sized", "world"), ("iterable", "world"), ("sized", "samples")])
@pytest.mark.parametrize(("lengths", "stop"), [((2, 9), 1), ((9, 1, 2), 2), ((2, 9), 4), ((0, 4, 1), 1), ((0, 5), 2)])
def test_a_break_on_all_ranks_leaves_no_gift_behind(
    workers: Workers, lengths: tuple[int, ...], stop: int, loop: str, when: str, weighting: str
) -> None:
    found: list[list[Tensor]] = workers.run(len(lengths), leave, lengths, stop, loop, when, weighting)
    one = Small(lengths, wraps=False, weighting=weighting)
    rows = rows_of(lengths, loop)
    one.follow(rows[:stop], 0)
    backwards = [{rank: (owner, lengths[owner] - 1 - i) for rank, (owner, i) in row.items()} for row in rows]
    one.follow(backwards, 1)
    one.follow(rows, 2)
    for mine in found:
        assert difference(mine, one.parameters) < 1e-10
        assert all(torch.equal(a, b) for a, b in zip(mine, found[0], strict=True))


def end_alone(rank: int, who: int, stop: int, how: str, loop: str, weighting: str) -> None:
    connect()
    small = Small((2, 9), weighting=weighting)
    with small.join() as join:
        for batch in join.batches(loader_of(loop, small.data.batches(rank, 0))):
            if how == "gathers":
                join.all_gather(torch.ones(1))
            elif how == "raises" and join.step == stop:
                if rank == who:
                    raise BrokenError("amid a step")
                time.sleep(0.5)
            small.step([batch])
            if how != "raises" and rank == who and join.step + 1 == stop:
                break


# Of those who wait for 20 seconds none does: they hear of it before they wait for its gradients, or in a gather.
@pytest.mark.parametrize(
    ("who", "stop", "how", "loop", "weighting", "timeout"),
    [
        *((*where, "", loop, "world", TIMEOUT) for where in ((0, 1), (1, 1), (0, 3), (1, 4)) for loop in LOOPS),
        *((1, 3, "", loop, weighting, 20.0) for weighting in ("world", "samples") for loop in LOOPS),
        *((who, 4, "gathers", "sized", "world", 20.0) for who in (0, 1)),
        *((who, 3, "raises", "sized", "world", 20.0) for who in (0, 1)),
    ],
)
def test_what_ends_the_loop_of_one_rank_is_told(
    workers: Workers, who: int, stop: int, how: str, loop: str, weighting: str, timeout: float
) -> None:
    outcomes = workers.outcomes(2, end_alone, who, stop, how, loop, weighting, timeout=timeout, deadline=45.0)
    for outcome in outcomes:
        says = "amid a step" if how == "raises" else f"Rank {who} left the loop with `break`"
        assert says in outcome.error, outcomes
        assert outcome.seconds < (WITHIN if timeout == TIMEOUT else 10.0), outcomes


# ---------------------------------------------------------------- one `with` after the other


def fail_and_go_on(rank: int, lengths: tuple[int, ...], who: int, loop: str) -> tuple[list[str], list[Tensor]]:
    """Raise between two steps of one context, at the end of another, and train in a third."""
    connect()
    errors, small = [], Small(lengths)
    for where in ("body", "exit"):
        broken = Small(lengths)
        try:
            with broken.join() as join:
                for step, batch in enumerate(join.batches(loader_of(loop, broken.data.batches(rank, 0)))):
                    broken.step([batch])
                    if (rank, step, where) == (who, 1, "body"):
                        raise BrokenError(where)
                if (rank, where) == (who, "exit"):
                    raise BrokenError(where)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    with small.join() as join:
        small.go_through(join, rank, 0, loop)
    return errors, small.parameters


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("who", [0, 1], ids=["receiver", "giver"])
def test_after_an_exception_that_is_caught_another_context_is_exact(workers: Workers, who: int, loop: str) -> None:
    lengths = (2, 9)
    outcomes = workers.outcomes(2, fail_and_go_on, lengths, who, loop, timeout=10.0, deadline=60.0)
    assert not any(outcome.error for outcome in outcomes), outcomes
    one = Small(lengths, wraps=False)
    one.follow(rows_of(lengths, loop), 0)
    for rank, outcome in enumerate(outcomes):
        errors, parameters = outcome.value
        assert len(errors) == 2
        for error, where in zip(errors, ("body", "exit"), strict=True):
            assert f"BrokenError: {where}" in error
            assert error.startswith("PeerFailedError") == (rank != who)
        assert difference(parameters, one.parameters) < 1e-10


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("may_break", "rebalance=True cannot be combined with may_break=True"),
        ("throw_on_early_termination", "no rank runs out before"),
    ],
)
def test_options_that_contradict_it_are_refused(option: str, says: str) -> None:
    with pytest.raises(JoinValueError, match=says):
        Join([nn.Linear(1, 1)], rebalance=True, **{option: True})


def plain(rank: int) -> None:
    connect()
    small = Small((2, 3))
    with small.join():
        for batch in small.data.batches(rank, 0):
            small.step([batch])


def test_a_plain_for_is_refused(workers: Workers) -> None:
    for outcome in workers.outcomes(2, plain):
        assert "rebalance=True needs a loop over join.batches, but this forward ran outside" in outcome.error


class Positioned:
    """A loader whose place can be saved."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {}


def positioned(rank: int, who: int) -> None:
    connect()
    small = Small((2, 5))
    batches = small.data.batches(rank, 0)
    with small.join() as join:
        for batch in join.batches(Positioned(batches) if rank == who else batches):
            small.step([batch])


@pytest.mark.parametrize("who", [0, 1])
def test_a_loader_with_a_state_is_refused(workers: Workers, who: int) -> None:
    for outcome in workers.outcomes(2, positioned, who):
        assert "Positioned (or an object that it reads from) has a state_dict()" in outcome.error, outcome
        assert outcome.seconds < WITHIN


# ---------------------------------------------------------------- batches that cannot travel


def give_odd(
    rank: int, lengths: tuple[int, ...], who: int, begin: int, odd: str, loop: str
) -> tuple[list[str], list[Tensor]]:
    """Train where the batches of one rank cannot be packed, or not be put together, from one on."""
    connect()
    small = Small(lengths)
    strange: Any = (lambda: 0) if odd == "lambda" else Strange()
    batches = [
        (x, y, strange if rank == who and index >= begin else None)
        for index, (x, y) in enumerate(small.data.batches(rank, 0))
    ]
    loader = DataLoader(Stream(batches), batch_size=None, collate_fn=first) if loop == "iterable" else batches
    with warned("cannot be sent to another rank") as said, small.join() as join:
        for x, y, _ in join.batches(loader):
            small.step([(x, y)])
    return said, small.parameters


class Strange:
    """What can be packed, and not be put together."""

    def __reduce__(self) -> Any:
        return (explode, ())


def explode() -> None:
    raise BrokenError("in its making")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("lengths", [(2, 9), (0, 6, 7)])
def test_who_cannot_give_its_first_batch_trains_on_all_of_them(
    workers: Workers, lengths: tuple[int, ...], loop: str
) -> None:
    outcomes = workers.outcomes(len(lengths), give_odd, lengths, GIVER, 0, "lambda", loop)
    assert not any(outcome.error for outcome in outcomes), outcomes
    said = [None] * len(lengths) if loop == "iterable" else None
    rows = planned_rows(lengths, said, [0 if rank == GIVER else len(lengths) for rank in range(len(lengths))])
    assert all(owner != GIVER or rank == GIVER for row in rows for rank, (owner, _) in row.items())
    one = Small(lengths, wraps=False)
    one.follow(rows, 0)
    for rank, outcome in enumerate(outcomes):
        warned, parameters = outcome.value
        assert len(warned) == (rank == GIVER), warned
        assert all(
            "A batch of type tuple cannot be sent to another rank" in text
            and "trains on all of its batches itself" in text
            for text in warned
        )
        assert difference(parameters, one.parameters) < 1e-10


@pytest.mark.parametrize("loop", LOOPS)
def test_a_later_batch_that_cannot_be_given_is_told(workers: Workers, loop: str) -> None:
    outcomes = workers.outcomes(3, give_odd, LENGTHS, GIVER, 3, "lambda", loop, timeout=TIMEOUT, deadline=45.0)
    check_told(outcomes, GIVER, "JoinTypeError: A batch of type tuple cannot be sent to another rank")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_that_cannot_be_put_together_is_told(workers: Workers, loop: str) -> None:
    outcomes = workers.outcomes(2, give_odd, (0, 6), GIVER, 0, "strange", loop, timeout=TIMEOUT, deadline=45.0)
    check_told(outcomes, 0, "BrokenError: in its making")


def check_told(outcomes: list[Outcome], who: int, says: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert says in outcome.error, outcomes
        assert rank == who or f"Rank {who}: " in outcome.error, outcomes
        assert outcome.seconds < WITHIN, outcomes


# ---------------------------------------------------------------- loaders that are not what they seem


class Ring:
    """A loader that reuses the memory of a few batches."""

    def __init__(self, batches: list[Batch], size: int) -> None:
        self.batches, self.size = batches, size

    def __iter__(self) -> Iterator[Batch]:
        memory = [tuple(map(torch.empty_like, self.batches[0])) for _ in range(self.size)] if self.batches else []
        for index, (x, y) in enumerate(self.batches):
            into = memory[index % self.size]
            into[0].copy_(x)
            into[1].copy_(y)
            yield into  # type: ignore[misc]


class SizedRing(Ring):
    def __len__(self) -> int:
        return len(self.batches)


class More(DataLoader[Any]):
    """A loader that yields more than its sampler says."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


class Short(DataLoader[Any]):
    """A loader with a length of its own, which is less than what it yields."""

    def __len__(self) -> int:
        return max(0, super().__len__() - 1)


@dataclass
class Pair:
    """A batch whose inside nobody knows."""

    x: Tensor
    y: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x, self.y))


KINDS: dict[str, Callable[[list[Batch]], Any]] = {
    **{f"ring of {size}": lambda batches, size=size: Ring(batches, size) for size in (1, 2, 3)},  # type: ignore[misc]
    **{f"sized ring of {size}": lambda batches, size=size: SizedRing(batches, size) for size in (1, 3)},  # type: ignore[misc]
    "ring of 1, of pairs": lambda batches: (Pair(*batch) for batch in Ring(batches, 1)),
    "more": lambda batches: More(batches, batch_size=None),  # type: ignore[arg-type]
    "short": lambda batches: Short(batches, batch_size=None),  # type: ignore[arg-type]
    "masks": lambda batches: ((*batch, MASKS[min(index, 3)]) for index, batch in enumerate(batches)),
}
MASKS = [torch.ones(1 + length) for length in range(4)]  # the later batches share theirs


def deceive(rank: int, lengths: tuple[int, ...], kind: str) -> list[list[float]]:
    connect()
    small, trained = Small(lengths), []
    with small.join() as join:
        for batch in join.batches(KINDS[kind](small.data.batches(rank, 0))):
            x, y, *_ = batch
            trained.append(x[0].tolist())
            small.step([(x, y)])
    return trained


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(4, 4), (2, 9)])
def test_odd_loaders_are_exact_or_told(workers: Workers, lengths: tuple[int, ...], kind: str) -> None:
    outcomes = workers.outcomes(len(lengths), deceive, lengths, kind)
    if kind != "masks" and any(outcome.error for outcome in outcomes):
        assert all("reuses the memory" in outcome.error or "length" in outcome.error for outcome in outcomes), outcomes
        return
    assert not any(outcome.error for outcome in outcomes), outcomes
    data = Small(lengths, wraps=False).data
    wanted = [batch[0][0].tolist() for rank in range(len(lengths)) for batch in data.batches(rank, 0)]
    assert sorted(x for outcome in outcomes for x in outcome.value) == sorted(wanted * (2 if kind == "more" else 1))
