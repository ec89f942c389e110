"""Dataloaders that plan an epoch's batches when they are iterated: what they said before is no limit."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from tests.support.batches import Batches
from tests.support.front_ends.lightning import (
    Fit,
    Module,
    assert_exact,
    build_trainer,
    fit,
)
from tests.support.run import Batch
from tests.support.workers import Workers

Place = tuple[int, int]


class Planned(Sampler[Place]):
    """Plans its batches anew in each `__iter__`, or, if it is a generator, when the first one is asked for."""

    def __init__(self, plans: Sequence[int], is_generator: bool) -> None:
        self.plans, self.is_generator, self.epoch = plans, is_generator, -1

    def __len__(self) -> int:
        return self.plans[min(max(self.epoch, 0), len(self.plans) - 1)]

    def __iter__(self) -> Iterator[Place]:
        return self.generate() if self.is_generator else iter([*self.generate()])

    def generate(self) -> Iterator[Place]:
        self.epoch += 1
        yield from [(self.epoch, index) for index in range(len(self))]


TRAINED = ((5, 0, 2), (1, 4, 2), (3, 6, 0), (0, 2, 5))
VALIDATED = ((2, 0), (0, 3), (4, 1), (1, 2))  # by epoch and dataloader; what rank 1 has is the other way round


class Plans(Module):
    is_generator: bool

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.said: list[float] = []
        self.seen: list[list[int]] = []
        self.noted = self.said, self.seen

    def loader(self, plans: Sequence[int]) -> DataLoader[Batch]:
        data = Batches(self.case, self.trainer.global_rank)
        return DataLoader(data, batch_size=None, sampler=Planned(plans, self.is_generator))

    def train_dataloader(self) -> DataLoader[Batch]:
        rank = self.trainer.global_rank
        return self.loader([self.case.lengths_in(epoch)[rank] for epoch in range(self.case.epochs)])

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        plans: list[Sequence[int]] = [*zip(*VALIDATED, strict=True)]
        return [self.loader(each) for each in (plans[::-1] if self.trainer.global_rank == 1 else plans)]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.said.append(self.trainer.num_training_batches)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.seen.append([0, 0])

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int) -> None:
        self.log("sum", 1.0, reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=True)
        assert batch_idx == self.seen[-1][dataloader_idx]
        self.seen[-1][dataloader_idx] += 1

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int) -> int:
        return batch_idx


@pytest.mark.parametrize("is_generator", [False, True])
def test_what_a_loader_said_before_it_was_iterated_is_no_limit(workers: Workers, is_generator: bool) -> None:
    case = Fit(TRAINED, epochs=4)
    results = workers.run(3, fit, case, Plans, {"is_generator": is_generator}, {"num_sanity_val_steps": 0})
    assert_exact(case, results)
    for rank, result in enumerate(results):
        said, seen = result.noted
        assert "yielded only" not in result.warned
        assert said == [max(lengths) for lengths in TRAINED if lengths[rank]]
        assert seen == [[*(reversed(each) if rank == 1 else each)] for each in VALIDATED]


@pytest.mark.parametrize("options", [{"rebalance": True}, {"limit": 0.5}, {"limit": 2}])
def test_limits_and_rebalancing_go_by_the_new_length(workers: Workers, options: dict[str, Any]) -> None:
    case = Fit(((4, 2), (8, 3), (2, 6)), **options)
    results = workers.run(2, fit, case, Plans, {"is_generator": True}, {"limit_val_batches": 0})
    if case.rebalance:  # which rank trains on which batch is another test's
        assert {result.global_step for result in results} == {3 + 6 + 4}
    else:
        assert_exact(case, results)


def test_a_share_of_a_new_length_that_leaves_nothing_raises_on_all_ranks(workers: Workers) -> None:
    case = Fit(((4, 4), (4, 1)), epochs=2, limit=0.5)
    for outcome in workers.outcomes(2, fit, case, Plans, {"is_generator": False}, {"limit_val_batches": 0}):
        assert "DataloaderError: The dataloaders of rank 1 cannot be used." in outcome.error, outcome.trace
        assert "0.5 * 1 < 1" in outcome.error


def evaluate_planned(rank: int) -> tuple[list[list[int]], list[Any]]:
    module = Plans(Fit(((9, 9),)))
    module.is_generator = True
    trainer = build_trainer(module.case)
    plans: list[Sequence[int]] = [*zip(*VALIDATED, strict=True)]
    module.trainer = trainer
    loaders = [module.loader(each) for each in (plans[::-1] if rank == 1 else plans)]
    for _ in range(2):
        trainer.validate(module, loaders, verbose=False)
    predicted = [trainer.predict(module, loaders) for _ in range(2)]
    return module.seen, predicted


def test_evaluations_and_predictions_go_by_the_new_length(workers: Workers) -> None:
    for rank, (seen, predicted) in enumerate(workers.run(2, evaluate_planned)):
        plans = [[*(reversed(each) if rank == 1 else each)] for each in VALIDATED]
        assert seen == plans[:2]
        assert predicted == [[[*range(n)] for n in plan] for plan in plans[2:]]
