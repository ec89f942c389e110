"""A random search over fits in which batches are rebalanced: each ends as one process does that follows the schedule.

`-m long` runs 200 of them, or as many as TORCH_JOIN_CASES says, from the seed TORCH_JOIN_SEED on. Some are resumed from
a checkpoint of one of their steps.
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.cases import (
    ANY_CHECKPOINT,
    TOLERANCE,
    Batch,
    Case,
    EpochSampler,
    Module,
    Result,
    Shard,
    Stream,
    assert_exact,
    assert_same_bits,
    build_trainer,
    difference,
    longest,
    reference,
    result_of,
    total_steps,
)
from tests.support.workers import Workers

FEW = range(5)
FIRST = int(os.environ.get("TORCH_JOIN_SEED", FEW.stop))
CASES = int(os.environ.get("TORCH_JOIN_CASES", 200))
UNUSED = ("unused", "sometimes", "turns")


@dataclass(frozen=True)
class Drawn:
    """A fit, and after which of all its steps it is resumed from, if it is."""

    case: Case
    resumes: int | None


def draw(seed: int) -> Drawn:
    chance = random.Random(seed)
    one_of = chance.choice
    world_size, epochs = one_of((2, 2, 3, 3, 4)), one_of((1, 2, 3))
    changes, iterable = one_of((False, False, True)), one_of((False, True))
    most = one_of((2, 5, 12))
    drawn = [[one_of((0, chance.randint(0, most))) for _ in range(world_size)] for _ in range(epochs if changes else 1)]
    for lengths in drawn:
        lengths[chance.randrange(world_size)] = chance.randint(1, most)  # no epoch is empty
    limit = one_of((None, None, None, chance.randint(1, 6), 1.0 if iterable else 0.5))
    if limit == 0.5:
        drawn = [[2 * length for length in lengths] for lengths in drawn]
    model, resumes = one_of(("mlp", "mlp", "norm", *UNUSED)), one_of((False, True))
    plans = (None, "step", "epoch") if changes or iterable else (None, "step", "epoch", "onecycle", "onecycle-setup")
    scheduler = one_of(plans)
    case = Case(
        drawn if changes else drawn[0],
        epochs=epochs,
        model=model,
        optimizer=one_of(("sgd", "adam", "adamw", "zero")),
        weighting=one_of(("world", "active", "samples", "count")),
        accumulate=one_of((1, 1, 2, 3)),
        clip=one_of((None, 0.3)),
        scheduler=scheduler,
        iterable=iterable,
        ragged=one_of((False, True)),
        reload=one_of((0, 0, 1)),
        limit=limit,
        hooked=one_of((False, False, True)),
        zeros=one_of((False, False, True)) and not (resumes and model in UNUSED),  # a checkpoint has no gradients
        rebalance=True,
        ddp={"find_unused_parameters": model in UNUSED, "gradient_as_bucket_view": one_of((False, True))},
    )
    if case.weighting == "count":
        case = Case(**{**vars(case), "accumulate": 1})
    if one_of((False, False, True)) and scheduler in (None, "step"):  # the reference ends in the midst of an epoch
        case = Case(**{**vars(case), "max_steps": chance.randint(1, total_steps(case))})
    steps = sum(longest(case, epoch) for epoch in range(epochs))
    return Drawn(case, chance.randrange(steps) if resumes else None)


class Placed(Module):
    """Its loaders have a state."""

    def train_dataloader(self) -> DataLoader[Batch]:
        rank = self.trainer.global_rank
        if self.case.iterable:
            return StatefulDataLoader(Stream(self.case, rank, self), batch_size=None)  # type: ignore[no-any-return]
        sampler = EpochSampler(self.case, rank)
        return StatefulDataLoader(Shard(self.case, rank), batch_size=None, sampler=sampler)  # type: ignore[no-any-return]


class Saves(pl.Callback):
    """Saves after a step, or after the first one after it in which the optimizer steps."""

    def __init__(self, at: int | None, path: Path) -> None:
        self.at, self.path = at, path
        self.place: tuple[int, int] | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        if (
            self.at is not None
            and self.place is None
            and loop.total_batch_idx >= self.at
            and not loop._should_accumulate()
        ):
            trainer.save_checkpoint(self.path)
            self.place = (trainer.current_epoch, trainer.fit_loop.batch_idx)


def fit(rank: int, drawn: Drawn, folder: str) -> tuple[Result, tuple[int, int] | None, Result | None]:
    module, saves = Placed(drawn.case), Saves(drawn.resumes, Path(folder) / "saved.ckpt")
    trainer = build_trainer(drawn.case, callbacks=[saves])
    trainer.fit(module)
    whole = result_of(trainer, module)
    if saves.place is None:
        return whole, None, None
    module, trainer = Placed(drawn.case), build_trainer(drawn.case)
    trainer.fit(module, ckpt_path=saves.path, **ANY_CHECKPOINT)
    return whole, saves.place, result_of(trainer, module)


def check(workers: Workers, drawn: Drawn, folder: Path) -> None:
    case = drawn.case
    try:
        results = workers.run(case.world_size, fit, drawn, str(folder), timeout=15.0)
        assert_exact(case, [whole for whole, _, _ in results])
        expected = reference(case)
        resumed = [again for _, _, again in results if again is not None]
        assert_same_bits(resumed or [results[0][0]])
        for whole, place, again in results:
            if place is None or again is None:
                continue
            assert difference(again.parameters, list(expected.net.parameters())) < TOLERANCE
            assert (again.lr, again.global_step) == (expected.lr, expected.steps)
            assert again.trained == [each for each in whole.trained if each > place]
    except AssertionError as error:
        raise AssertionError(f"{drawn}: {error}") from error


@pytest.mark.parametrize("seed", FEW)
def test_a_few(workers: Workers, seed: int, tmp_path: Path) -> None:
    check(workers, draw(seed), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_many(workers: Workers, seed: int, tmp_path: Path) -> None:
    check(workers, draw(seed), tmp_path)
