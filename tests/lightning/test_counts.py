"""Weighting by what a function counts, in Lightning."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy
from tests import counted
from tests.counted import Case, count, mean_loss, total_loss
from tests.emulator.frameworks import lightning_accelerator
from tests.support.inside import planned_rows
from tests.support.workers import Workers
from torch_join import JoinError, windows


class Module(pl.LightningModule):
    def __init__(self, case: Case, manual: bool) -> None:
        super().__init__()
        self.case, self.automatic_optimization = case, not manual
        self.net = counted.make_model()

    def train_dataloader(self) -> Any:
        loader = DataLoader(self.case.batches(self.trainer.global_rank), batch_size=None)  # type: ignore[arg-type]
        return windows(loader, self.case.window) if self.case.window > 1 else loader

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return mean_loss(self.net, batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        window = batch if isinstance(batch, list) else [batch]
        n_window = count(window)
        ddp: Any = self.trainer.strategy.model
        for one in window:
            ddp.require_backward_grad_sync = one is window[-1]
            self.manual_backward(total_loss(self.net, one) / n_window)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return counted.make_optimizer(self.parameters())


def fit(rank: int, case: Case, manual: bool = False, weighting: Any = count, **options: Any) -> list[Tensor]:
    module = Module(case, manual)
    trainer = pl.Trainer(
        accelerator=lightning_accelerator(),
        devices=len(case.lengths),
        strategy=DDPJoinStrategy(weighting=weighting, rebalance=case.rebalance),
        max_epochs=case.epochs,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module)
    return [p.detach() for p in module.parameters()]


EMPTY = ((0, 0), (1, 1), (2, 1), (1, 3))  # on one rank, and on all that have a batch
CASES = {
    "automatic": (Case((1, 5, 2), fractions=True, empty=EMPTY), False),
    "automatic, rank 0 has none": (Case((0, 3)), False),
    "manual": (Case((1, 4, 2), empty=EMPTY), True),
    "manual, windows": (Case((7, 2), window=3, fractions=True, empty=((0, 1), (1, 0), (1, 1))), True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mean_is_over_all_ranks_items(workers: Workers, name: str) -> None:
    case, manual = CASES[name]
    counted.check(case, workers.run(len(case.lengths), fit, case, manual))


def test_what_is_given_away_counts_where_it_is_trained(workers: Workers) -> None:
    case = Case((1, 6, 0), fractions=True, empty=((1, 2), (1, 5)), rebalance=True)
    steps = [{r: [case.batch(*place)] for r, place in row.items()} for row in planned_rows([1, 6, 0])]
    counted.check(case, workers.run(3, fit, case), steps)


def fit_wrongly(rank: int, *args: Any, **options: Any) -> str:
    try:
        fit(rank, Case((2, 4)), *args, **options)
    except (JoinError, RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("scheduled", [False, True])
def test_windows_of_lightnings_own_are_refused(workers: Workers, scheduled: bool) -> None:
    own = {"callbacks": [GradientAccumulationScheduler({1: 2})]} if scheduled else {"accumulate_grad_batches": 2}
    for error in workers.run(2, fit_in_windows, own):
        assert error.startswith(
            "UnsupportedError: A weighting function cannot be used with accumulate_grad_batches > 1"
        )


def fit_in_windows(rank: int, options: dict[str, Any]) -> str:
    return fit_wrongly(rank, **options)


@pytest.mark.parametrize("returned", ["-1", "nan", "None", "StopIteration"])
def test_what_is_no_count_raises_on_all_ranks(workers: Workers, returned: str) -> None:
    other, own = workers.run(2, fit_miscounting, returned)
    words = "raised StopIteration" if returned == "StopIteration" else f"broken returned {returned}"
    assert words in own
    assert words in other
    assert other.startswith("PeerFailedError")


def fit_miscounting(rank: int, returned: str) -> str:
    return fit_wrongly(rank, weighting=counted.wrong_at(1, 2, returned))
