"""Plans of epochs, without processes: every batch once, in the fewest steps, the same rows wherever one begins."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_join._schedule.plan import Plan, Row, steps_of

PROFILE = settings(derandomize=True, deadline=None, database=None, max_examples=50)
Batch = tuple[int, int]  # its owner, and its index


@dataclass(frozen=True)
class Epoch:
    """How many batches ranks have, and how many they may give away in a step."""

    lengths: tuple[int, ...]
    donated: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.lengths)

    @property
    def batches(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """How many steps there are at the least because no rank gets rid of its batches faster."""
        return max(math.ceil(length / (1 + most)) for length, most in zip(self.lengths, self.donated, strict=True))

    @property
    def least(self) -> int:
        """How many steps any schedule has at the least."""
        return max(math.ceil(self.batches / self.world_size), self.longest)


def schedule(lengths: Sequence[int], donated: Sequence[int] | None = None) -> list[Row]:
    """Return all rows of an epoch in which ranks give away up to so many batches in a step, or as many as they like."""
    plan = Plan(lengths, [len(lengths)] * len(lengths) if donated is None else donated)
    return [plan.plan() for _ in range(plan.steps_left or 0)]


LENGTHS = (
    st.integers(0, 60),
    st.integers(0, 4),
    st.integers(20, 25),
    st.sampled_from((0, 0, 0, 1, 7, 90)),
    st.sampled_from((1, 3, 90)),
)


@st.composite
def epochs(draw: st.DrawFn, most: int = 64, limited: bool = True) -> Epoch:
    world_size = draw(st.integers(1, 8) | st.integers(1, most)) if most > 8 else draw(st.integers(1, most))
    lengths = draw(st.lists(draw(st.sampled_from(LENGTHS)), min_size=world_size, max_size=world_size))
    unlimited = [world_size] * world_size
    limits = st.lists(st.sampled_from((0, 1, 2, 8, world_size)), min_size=world_size, max_size=world_size)
    return Epoch(tuple(lengths), tuple(draw(limits) if limited and draw(st.booleans()) else unlimited))


@dataclass
class Ranks:
    """What ranks do as `Rebalancer` has them: read ahead, say where they end, plan together."""

    plan: Plan
    left: list[int]  # really
    at: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    most_ahead: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at, self.most_ahead = [0] * len(self.left), [0] * len(self.left)

    def settle(self) -> None:
        """Meet until all ranks know that they have what the next row asks of them."""
        while True:
            read = self.plan.ahead
            self.most_ahead = list(map(max, self.most_ahead, read))
            ended = {rank: left for rank, left in enumerate(self.left) if left < read[rank]}
            self.plan.announce({rank: left for rank, left in ended.items() if left != self.plan.left[rank]})
            if all(now <= before for now, before in zip(self.plan.ahead, read, strict=True)):
                return

    def step(self) -> bool:
        """Plan a row; return whether there was one."""
        self.settle()
        row = self.plan.plan()
        for share in row:
            if share is not None:
                self.left[share.owner] -= 1
                self.at[share.owner] += 1
        self.rows += [row] if any(row) else []
        return any(row)

    def finish(self) -> list[Row]:
        """Plan all rows that are left, and return all that were planned."""
        while self.step():
            assert min(self.left) >= 0, "a row takes a batch that there is not"
        return self.rows


def planned(epoch: Epoch, said: Sequence[int | None]) -> Ranks:
    """Go through an epoch, of whose lengths the ranks know at first what is `said`."""
    ranks = Ranks(Plan(said, epoch.donated), list(epoch.lengths))
    ranks.finish()
    return ranks


def begun(epoch: Epoch, data: st.DataObject) -> Ranks:
    """Go through some steps of an epoch, of whose lengths the ranks know all or none."""
    knows = data.draw(st.booleans())
    ranks = Ranks(Plan(epoch.lengths if knows else [None] * epoch.world_size, epoch.donated), list(epoch.lengths))
    for _ in range(data.draw(st.integers(0, epoch.least))):
        ranks.step()
    return ranks


def active(row: Row) -> set[int]:
    return {rank for rank, share in enumerate(row) if share is not None}


def counts(row: Row) -> list[int]:
    """By rank, how many of its batches are trained on in this step, wherever."""
    owners = [share.owner for share in row if share is not None]
    return [owners.count(rank) for rank in range(len(row))]


def batches_of(rows: Iterable[Row]) -> list[Batch]:
    return [(share.owner, share.batch_idx) for row in rows for share in row if share is not None]


def check_rules(rows: Sequence[Row], donated: Sequence[int], gone: Mapping[int, int] | None = None) -> None:
    """Check what holds for any rows; `gone` are ranks that leave, and at which row."""
    before = set(range(len(donated)))
    for step, row in enumerate(rows):
        now = active(row)
        assert now, f"step {step} has no batch"
        assert now <= before, f"a rank comes back at step {step}"
        before = now
        taken = counts(row)
        for rank, share in enumerate(row):
            assert not taken[rank] or (share is not None and share.owner == rank), "a rank gives, and has not its own"
            assert taken[rank] <= 1 + donated[rank]
            assert share is None or rank not in (gone or {}) or step < (gone or {})[rank]
        for share in row:
            assert share is None or share.batch_idx >= (row[share.owner] or share).batch_idx, "its own comes first"
    for owner in range(len(donated)):
        by_row = [sorted(index for rank, index in batches_of([row]) if rank == owner) for row in rows]
        indices = [index for row in by_row for index in row]
        assert indices == sorted(indices), "batches are not taken in order"


def left_after(rows: Sequence[Row], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """By rank, how many batches these rows take, and how many they leave."""
    taken = [sum(column) for column in zip(*map(counts, rows), strict=True)] or [0] * len(lengths)
    return taken, [length - number for length, number in zip(lengths, taken, strict=True)]


def check_complete(rows: Sequence[Row], lengths: Sequence[int]) -> None:
    """Check that each batch is trained on once."""
    everything = [(rank, index) for rank, length in enumerate(lengths) for index in range(length)]
    assert sorted(batches_of(rows)) == everything


# ---------------------------------------------------------------- lengths that are known


@given(epoch=epochs())
@PROFILE
def test_each_batch_is_trained_on_once_in_as_few_steps_as_can_be(epoch: Epoch) -> None:
    rows = schedule(epoch.lengths, epoch.donated)
    check_rules(rows, epoch.donated)
    check_complete(rows, epoch.lengths)
    assert len(rows) == epoch.least
    for row in rows:
        for count, length in zip(counts(row), epoch.lengths, strict=True):
            assert count in (length // epoch.least, math.ceil(length / epoch.least)), "a step takes more than it must"


@given(epoch=epochs(), data=st.data())
@PROFILE
def test_an_epoch_that_is_resumed_has_the_same_rows(epoch: Epoch, data: st.DataObject) -> None:
    rows = schedule(epoch.lengths, epoch.donated)
    done = data.draw(st.integers(0, len(rows)))
    taken, left = left_after(rows[:done], epoch.lengths)
    assert rest(Plan(left, epoch.donated, taken), len(rows) - done) == rows[done:]


def rest(plan: Plan, steps: int) -> list[Row]:
    assert plan.steps_left == steps
    rows = [plan.plan() for _ in range(steps)]
    assert plan.steps_left == 0
    assert not any(plan.plan())
    return rows


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0), (1,), (5,), (0, 1), (1, 0, 0, 0)])
def test_little_to_plan(lengths: tuple[int, ...]) -> None:
    rows = schedule(lengths)
    check_complete(rows, lengths)
    assert len(rows) == math.ceil(sum(lengths) / len(lengths)) == steps_of(lengths)


# ---------------------------------------------------------------- lengths that are not known


@given(epoch=epochs(limited=False))
@PROFILE
def test_unknown_lengths_take_no_more_steps_without_limits(epoch: Epoch) -> None:
    assert len(planned(epoch, [None] * epoch.world_size).rows) == epoch.least


@given(epoch=epochs(), all_are=st.booleans(), data=st.data())
@settings(PROFILE, max_examples=100)
def test_some_or_all_lengths_are_unknown(epoch: Epoch, all_are: bool, data: st.DataObject) -> None:
    ranks = planned(epoch, [None if all_are or data.draw(st.booleans()) else length for length in epoch.lengths])
    check_rules(ranks.rows, epoch.donated)
    check_complete(ranks.rows, epoch.lengths)
    assert epoch.least <= len(ranks.rows) <= math.ceil(epoch.batches / epoch.world_size) + epoch.longest
    if all_are:  # nobody reads further ahead than it may give
        assert all(ahead <= 1 + most for ahead, most in zip(ranks.most_ahead, epoch.donated, strict=True))


@given(epoch=epochs(), data=st.data())
@PROFILE
def test_an_epoch_of_unknown_lengths_that_is_resumed_has_the_same_rows(epoch: Epoch, data: st.DataObject) -> None:
    ranks = planned(epoch, [None] * epoch.world_size)
    done = data.draw(st.integers(0, len(ranks.rows)))
    taken, left = left_after(ranks.rows[:done], epoch.lengths)
    again = Ranks(Plan([None] * epoch.world_size, epoch.donated, taken), left)
    assert again.finish() == ranks.rows[done:]


# ---------------------------------------------------------------- what changes in the midst


@given(epoch=epochs(), data=st.data())
@PROFILE
def test_a_rank_that_has_fewer_than_it_said_corrects_it(epoch: Epoch, data: st.DataObject) -> None:
    more = data.draw(st.lists(st.sampled_from((0, 0, 1, 5)), min_size=epoch.world_size, max_size=epoch.world_size))
    said = [length + extra for length, extra in zip(epoch.lengths, more, strict=True)]
    ranks = planned(epoch, said)
    check_rules(ranks.rows, epoch.donated)
    check_complete(ranks.rows, epoch.lengths)


@given(epoch=epochs(), data=st.data())
@PROFILE
def test_announcing_fewer_in_the_midst_loses_nothing_else(epoch: Epoch, data: st.DataObject) -> None:
    ranks = begun(epoch, data)
    rank = data.draw(st.integers(0, epoch.world_size - 1))
    ranks.left[rank] = data.draw(st.integers(0, ranks.left[rank]))
    ranks.plan.announce({rank: ranks.left[rank]})
    lengths = [done + left for done, left in zip(ranks.at, ranks.left, strict=True)]
    check_complete(ranks.finish(), lengths)
    check_rules(ranks.rows, epoch.donated)


def test_a_correction_brings_nobody_back_who_has_joined() -> None:
    plan = Plan([0, 3, 3], [0, 0, 1])
    rows = [plan.plan()]
    plan.announce({1: 0})
    rows += [plan.plan() for _ in range(plan.steps_left or 0)]
    check_rules(rows, [0, 0, 1])
    assert sorted(batches_of(rows)) == [(1, 0), (2, 0), (2, 1), (2, 2)]


@given(epoch=epochs(), data=st.data())
@PROFILE
def test_without_ranks_that_leave_the_others_go_on(epoch: Epoch, data: st.DataObject) -> None:
    ranks = begun(epoch, data)
    gone = data.draw(st.sets(st.integers(0, epoch.world_size - 1), max_size=epoch.world_size - 1))
    begin = len(ranks.rows)
    ranks.plan.leave(gone)
    for rank in gone:
        ranks.left[rank] = 0
    lengths = [done + left for done, left in zip(ranks.at, ranks.left, strict=True)]
    check_complete(ranks.finish(), lengths)
    check_rules(ranks.rows, epoch.donated, dict.fromkeys(gone, begin))


# ---------------------------------------------------------------- an example to read


def test_an_epoch_of_three_ranks() -> None:
    rows = schedule((1, 6, 2))
    assert [[share and tuple(share) for share in row] for row in rows] == [
        [(1, 1), (1, 0), (2, 0)],
        [(0, 0), (1, 2), (1, 3)],
        [(1, 5), (1, 4), (2, 1)],
    ]


def test_an_epoch_in_which_one_rank_has_all() -> None:
    rows = schedule((0, 5))
    assert [[share and share.batch_idx for share in row] for row in rows] == [[1, 0], [3, 2], [None, 4]]
