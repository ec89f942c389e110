"""A random search over fits in which batches are rebalanced, some resumed: each ends as one process does."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.batches import Batches, Stream
from tests.support.front_ends.lightning import (
    ANY_CHECKPOINT,
    EpochSampler,
    Fit,
    Module,
    Result,
    assert_exact,
    assert_same_bits,
    build_trainer,
    result_of,
)
from tests.support.many import seeds
from tests.support.run import TOLERANCE, Batch, difference, reference
from tests.support.workers import Workers

UNUSED = ("unused", "sometimes", "turns")


@dataclass(frozen=True)
class Drawn:
    """A fit, and after which of all its steps it is resumed from, if it is."""

    case: Fit
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
    case = Fit(
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
        # A checkpoint has no gradients.
        clear=one_of(("before", "before", "before, zeros")) if not (resumes and model in UNUSED) else "before",
        rebalance=True,
        ddp={"find_unused_parameters": model in UNUSED, "gradient_as_bucket_view": one_of((False, True))},
    )
    if case.weighting == "count":
        case = Fit(**{**vars(case), "accumulate": 1})
    if one_of((False, False, True)) and scheduler in (None, "step"):  # the reference ends in the midst of an epoch
        case = Fit(**{**vars(case), "max_steps": chance.randint(1, case.total_steps())})
    steps = sum(case.length(epoch) for epoch in range(epochs))
    return Drawn(case, chance.randrange(steps) if resumes else None)


class Placed(Module):
    """Its loaders have a state."""

    def train_dataloader(self) -> DataLoader[Batch]:
        rank = self.trainer.global_rank
        if self.case.iterable:
            return StatefulDataLoader(
                Stream(Batches(self.case, rank), lambda: self.trainer.current_epoch), batch_size=None
            )
        sampler = EpochSampler(self.case, rank)
        return StatefulDataLoader(Batches(self.case, rank), batch_size=None, sampler=sampler)


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
            assert difference(again.parameters, expected.parameters) < TOLERANCE
            assert (again.lr, again.global_step) == (expected.lr, expected.steps)
            assert again.trained == [each for each in whole.trained if each > place]
    except AssertionError as error:
        raise AssertionError(f"{drawn}: {error}") from error


@seeds(range(2), 200)
def test_a_few(workers: Workers, seed: int, tmp_path: Path) -> None:
    check(workers, draw(seed), tmp_path)
