"""A random search over Lightning's trainings: uneven ones end as one process does, even ones also as under `ddp`."""

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.utils.data import DataLoader

from tests.support.batches import Batches
from tests.support.front_ends.lightning import EpochSampler, Fit, Module, Result, assert_exact, fit
from tests.support.many import seeds
from tests.support.run import Batch
from tests.support.workers import Workers


class PlannedSampler(EpochSampler):
    """Plans an epoch's batches when it is iterated; until then it says how many there were in the one before."""

    next_epoch = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.epoch = self.next_epoch
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        self.next_epoch = epoch


class PlannedModule(Module):
    def train_dataloader(self) -> DataLoader[Batch]:
        rank = self.trainer.global_rank
        return DataLoader(Batches(self.case, rank), batch_size=None, sampler=PlannedSampler(self.case, rank))


def draw(seed: int) -> tuple[Fit, bool]:
    """Return a run, and whether its loaders plan their epochs late."""
    r = random.Random(seed)
    size, epochs = r.choice((2, 2, 3)), r.choice((2, 3))
    is_even, changes = r.random() < 0.3, r.random() < 0.4

    def lengths() -> tuple[int, ...]:
        if is_even:
            return (r.randint(1, 5),) * size
        drawn = tuple(r.randint(0, 5) for _ in range(size))
        return drawn if any(drawn) else lengths()  # Lightning passes over an epoch without any batch: no schedulers

    case = Fit(
        tuple(lengths() for _ in range(epochs)) if changes else lengths(),
        epochs=epochs,
        model=r.choice(("mlp", "mlp", "unused", "turns", "sparse")),
        optimizer=r.choice(("sgd", "adam", "adamw", "plain")),
        weighting=(weighting := "world" if is_even else r.choice(("world", "active", "samples", "count"))),
        accumulate=1 if weighting == "count" else r.choice((1, 1, 2, 3)),
        clip=r.choice((None, 0.3)),
        scheduler=r.choice((None, "step", "epoch")),
        iterable=r.random() < 0.4,
        ragged=not is_even and r.random() < 0.5,
        clear="before, zeros" if r.random() < 0.2 else "before",
        ddp={},
    )
    options = {"find_unused_parameters": True} if case.model in ("unused", "turns") else {}
    if case.model == "sparse":
        options, case = {}, replace(case, optimizer="plain", clip=None, clear="before")
    return replace(case, ddp=options), not case.iterable and r.random() < 0.4


@seeds(range(3))
def test_a_few(workers: Workers, seed: int) -> None:
    case, is_planned = draw(seed)

    def fitted(**options: str) -> list[Result]:
        return workers.run(case.world_size, fit, case, PlannedModule if is_planned else Module, {}, options)

    found = fitted()
    assert_exact(case, found)
    is_even = all(len(set(case.lengths_in(epoch))) == 1 for epoch in range(case.epochs)) and not case.ragged
    if is_even and case.weighting != "count":  # by which even batches, too, count as ddp does not let them
        plain = fitted(strategy="ddp_find_unused_parameters_true" if case.ddp else "ddp")
        if [result.trained for result in plain] == [result.trained for result in found]:  # ddp keeps the first length
            for mine, its in zip(found[0].parameters, plain[0].parameters, strict=True):
                assert torch.equal(mine, its)
