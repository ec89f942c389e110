"""Random plain loops in which batches are rebalanced: as one process that follows the schedule, and whose each is."""

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
from tests.support.front_ends import plain
from tests.support.front_ends.plain import Claims, Loop, Stream
from tests.support.inside import gives_at_most, planned_rows
from tests.support.many import check_each, seeds
from tests.support.run import Batch
from tests.support.workers import Workers

# torch says so where a GradScaler has skipped the first step.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

KNOWN = ("list", "tuple", "loader")  # their lengths are certain
STREAMS = ("stream", "generator", "shorter", "longer")
Place = tuple[int, int]  # a batch: its owner, and its index


@dataclass(frozen=True)
class Case(Loop):
    """A program in which ranks loop over loaders of many kinds, of batches of many kinds."""

    loaders: tuple[tuple[str, ...], ...] = ()  # by epoch and rank
    nest: str = "tuple"
    max_sent_per_step: tuple[int, ...] = ()  # by rank, in one step
    rebalance: bool = True

    def rows(self, epoch: int) -> list[dict[int, Place]]:
        lengths = self.lengths_in(epoch)
        pairs = zip(lengths, self.loaders[epoch], strict=True)
        return planned_rows(
            lengths, [length if kind in KNOWN else None for length, kind in pairs], self.max_sent_per_step
        )

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

    def loop(program: Loop, join: Any, batches: list[Batch]) -> Iterator[Batch]:
        epoch = next(epochs)
        nests = [NESTS[case.nest](batch, (rank, index)) for index, batch in enumerate(batches)]
        trained.places.append([])
        trained.said.append([])
        for nest in join.batches(LOADERS[case.loaders[epoch][rank]](nests)):
            batch, place = unpacked(nest)
            trained.places[-1].append(place)
            trained.said[-1].append((join.batch_owner, join.owner_batch_idx))
            yield batch

    with mock.patch.object(plain, "loop", loop), gives_at_most(case.max_sent_per_step[rank]):
        return replace(trained, found=properties.train(rank, case))


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


def draw(one: random.Random, world_size: int) -> Case:
    options = properties.options(one, world_size, loops=("sized",))
    kinds = one.choice((KNOWN, STREAMS, KNOWN + STREAMS))
    most = one.choice((2, 5, 9, 14))
    donated = one.choice(((world_size,), (world_size,), (0, 1, 2, world_size)))
    epochs = range(options["epochs"])
    own = {
        "lengths": tuple(tuple(one.choice((0, one.randint(0, most))) for _ in range(world_size)) for _ in epochs),
        "loaders": tuple(tuple(one.choice(kinds) for _ in range(world_size)) for _ in epochs),
        "nest": one.choice(COUNTED if options["weighting"] in ("samples", "count") else tuple(NESTS)),
        "max_sent_per_step": tuple(one.choice(donated) for _ in range(world_size)),
        "evaluation": None,
    }
    return Case(**{**options, **own})


@seeds(range(2), of=BATCH)
def test_random_loops_are_exact(workers: Workers, seed: int) -> None:
    one, world_size = random.Random(seed), 2 + seed % 3
    check_each(workers, train, [draw(one, world_size) for _ in range(BATCH)], check, deadline=180.0)
