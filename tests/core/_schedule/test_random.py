"""Random plain loops in which batches are rebalanced: as one process that follows the schedule, and whose batch it is.

`-m long` runs 300 of them, or as many as TORCH_JOIN_CASES says, from the seed TORCH_JOIN_SEED on.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from tests import emulator
from tests.core.loops import test_join_properties as properties
from tests.core.loops.test_join_properties import BATCH, Found
from tests.support import loops
from tests.support.cases import Batch
from tests.support.inside import gives_at_most, planned_rows
from tests.support.loops import COLLECTIVES, Claims, Program, Stream
from tests.support.workers import WorkerError, Workers

# torch says so where a GradScaler has skipped the first step.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
FEW = 2  # calls of the workers, of 12 programs each
CASES = int(os.environ.get("TORCH_JOIN_CASES", 300))
FIRST = int(os.environ.get("TORCH_JOIN_SEED", FEW))

KNOWN = ("list", "tuple", "loader")  # their lengths are certain
STREAMS = ("stream", "generator", "shorter", "longer")
Place = tuple[int, int]  # a batch: its owner, and its index


@dataclass(frozen=True)
class Case(Program):
    """A program in which ranks loop over loaders of many kinds, of batches of many kinds."""

    loaders: tuple[tuple[str, ...], ...] = ()  # by epoch and rank
    nest: str = "tuple"
    most_gifts: tuple[int, ...] = ()  # by rank, in one step
    rebalance: bool = True

    def rows(self, epoch: int) -> list[dict[int, Place]]:
        lengths = self.data.lengths_in(epoch)
        pairs = zip(lengths, self.loaders[epoch], strict=True)
        return planned_rows(lengths, [length if kind in KNOWN else None for length, kind in pairs], self.most_gifts)

    def trained(self, rank: int, epoch: int) -> list[Place]:
        """What a rank trains on."""
        return [row[rank] for row in self.rows(epoch) if rank in row]


@dataclass
class Sample:
    """A batch of a class of the user's."""

    x: Any
    y: Any
    place: Place


Nest = Callable[[Batch, Place], Any]
NESTS: dict[str, Nest] = {
    "tuple": lambda batch, place: (*batch, place),
    "dict": lambda batch, place: {"x": batch[0], "more": {"y": [batch[1]]}, "place": place},
    "transposed": lambda batch, place: {"x": batch[0].t().contiguous().t(), "more": {"y": [batch[1]]}, "place": place},
    "large": lambda batch, place: {
        "pad": batch[0].new_full((len(batch[0]), 7000), 10 * place[0] + place[1]),
        **NESTS["dict"](batch, place),
    },
    "of two kinds": lambda batch, place: NESTS[("tuple", "large")[place[1] % 2]](batch, place),
    "sample": lambda batch, place: Sample(*batch, place),
    "numpy": lambda batch, place: {"x": batch[0].cpu().numpy(), "y": batch[1].cpu().numpy(), "place": place},
    "samples": lambda batch, place: [Sample(x, y, place) for x, y in zip(*batch, strict=True)],
}
COUNTED = ("tuple", "dict", "transposed", "large", "of two kinds")  # that "samples" and `count_of` can count


def unpacked(nest: Any) -> tuple[Batch, Place]:
    if isinstance(nest, list):
        return (torch.stack([one.x for one in nest]), torch.stack([one.y for one in nest])), nest[0].place
    if isinstance(nest, tuple):
        return nest[:2], nest[2]
    if isinstance(nest, Sample):
        return (nest.x, nest.y), nest.place
    if "more" in nest:
        owner, index = place = nest["place"]
        assert "pad" not in nest or nest["pad"].eq(10 * owner + index).all()
        return (nest["x"], nest["more"]["y"][0]), place
    x, y = (torch.from_numpy(nest[name]).to(emulator.place()) for name in "xy")
    return (x, y), nest["place"]


LOADERS: dict[str, Callable[[list[Any]], Iterable[Any]]] = {
    "list": list,
    "tuple": tuple,
    "loader": lambda batches: DataLoader(batches, batch_size=None, collate_fn=same),  # type: ignore[arg-type]
    "stream": lambda batches: DataLoader(Stream(batches), batch_size=None, collate_fn=same),
    "generator": lambda batches: (batch for batch in batches),
    "shorter": lambda batches: Claims(batches, len(batches) + 2),
    "longer": lambda batches: Claims(batches, max(0, len(batches) - 1)),
}


def same(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Trained:
    """What one rank holds, and what it trained on by epoch: what the batches say, and what `Join` says."""

    found: Found
    places: list[list[Place]]
    said: list[list[Place]]


def train(rank: int, case: Case) -> Trained:
    trained, epochs = Trained(mock.Mock(), [], []), count()

    def loop(program: Program, join: Any, batches: list[Batch]) -> Iterator[Batch]:
        epoch = next(epochs)
        nests = [NESTS[case.nest](batch, (rank, index)) for index, batch in enumerate(batches)]
        trained.places.append([])
        trained.said.append([])
        for nest in join.batches(LOADERS[case.loaders[epoch][rank]](nests)):
            batch, place = unpacked(nest)
            trained.places[-1].append(place)
            trained.said[-1].append((join.batch_owner, join.owner_batch_idx))
            yield batch

    with mock.patch.object(loops, "loop", loop), gives_at_most(case.most_gifts[rank]):
        return replace(trained, found=properties.train(rank, case))


def train_all(rank: int, cases: list[Case]) -> list[Trained]:
    trained = []
    for case in cases:
        try:
            trained.append(train(rank, case))
        except BaseException as error:
            raise AssertionError(repr(case)) from error
    return trained


def check(case: Case, ranks: tuple[Trained, ...]) -> None:
    for rank, trained in enumerate(ranks):
        wanted = [case.trained(rank, epoch) for epoch in range(case.epochs)]
        assert trained.places == wanted, f"rank {rank} trained on other batches"
        assert trained.said == wanted, f"rank {rank} was told of other batches"
    founds = tuple(trained.found for trained in ranks)
    last = (case.rows(case.epochs - 1) or [{}])[-1]
    if len(last) in (0, case.world_size):  # DDP leaves each rank its own buffers, until the next forward
        founds = tuple(replace(found, buffers=founds[0].buffers) for found in founds)
    properties.check(case, founds)


def check_all(workers: Workers, cases: list[Case]) -> None:
    outcomes = workers.outcomes(cases[0].world_size, train_all, cases, deadline=180.0, timeout=20.0)
    errors = [f"--- rank {rank}: {outcome.trace}" for rank, outcome in enumerate(outcomes) if outcome.error]
    if errors:
        raise WorkerError("\n".join(errors))
    for case, ranks in zip(cases, zip(*(outcome.value for outcome in outcomes), strict=True), strict=True):
        try:
            check(case, ranks)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def draw(seed: int, world_size: int) -> Case:
    one = random.Random(seed)
    epochs, accumulate = one.choice((1, 2, 3)), one.choice((1, 1, 1, 2, 3))
    kinds = one.choice((KNOWN, STREAMS, KNOWN + STREAMS))
    weighting = one.choice(("world", "active", "samples", "count"))
    accumulate = (
        1 if weighting == "count" else accumulate
    )  # nobody can tell what a batch that counts 0 leaves of others
    most = one.choice((2, 5, 9, 14))
    gifts = one.choice(((world_size,), (world_size,), (0, 1, 2, world_size)))
    return Case(
        tuple(tuple(one.choice((0, one.randint(0, most))) for _ in range(world_size)) for _ in range(epochs)),
        loaders=tuple(tuple(one.choice(kinds) for _ in range(world_size)) for _ in range(epochs)),
        nest=one.choice(COUNTED if weighting in ("samples", "count") else tuple(NESTS)),
        most_gifts=tuple(one.choice(gifts) for _ in range(world_size)),
        optimizer=one.choice(("sgd", "adam", "adamw", "zero", "zero+sgd")),
        weighting=weighting,
        loss=one.choice(("simple", "penalty", "two forwards", "two models", "two backwards")),
        clear=one.choice(("before", "after", "before, zeros", "after, zeros", "model")),
        clip=one.choice((None, 0.3)),
        scheduler=one.choice((None, "step", "plateau")),
        scaler=one.choice((False, False, True)),
        accumulate=accumulate,
        norm=accumulate == 1 and one.choice((False, True)),  # under no_sync DDP leaves the ranks' buffers alone
        epochs=epochs,
        ragged=one.choice((False, True)),
        collective=one.choice(COLLECTIVES),
        asynchronous=one.choice((False, True)),
        grouped=one.choice((False, False, True)),
        one_context=one.choice((False, True)),
    )


def cases(seed: int) -> list[Case]:
    world_size = 2 + seed % 3
    return [draw(BATCH * seed + index, world_size) for index in range(BATCH)]


@pytest.mark.parametrize("seed", range(FEW))
def test_random_loops_are_exact(workers: Workers, seed: int) -> None:
    check_all(workers, cases(seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FIRST, FIRST + -(-CASES // BATCH)))
def test_many_random_loops_are_exact(workers: Workers, seed: int) -> None:
    check_all(workers, cases(seed))
