"""Steps that are windows of batches, weighted by what a function counts, on each front end but plain loops."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_join
from lightning_join.fabric import DDPJoinStrategy
from tests import counted
from tests.counted import Case, count, total_loss
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.front_ends.lightning import Fit, build_trainer
from tests.support.workers import Workers
from torch_join import windows

CASE = Case((0, 7, 4), window=3, fractions=True, empty=((1, 3), (2, 3), (1, 6)))
# Manual optimization asks for as many backwards of all ranks that still have batches.
IN_LIGHTNING = Case((7, 2), window=3, fractions=True, empty=((0, 1), (1, 0), (1, 1)))


class Module(pl.LightningModule):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.net, self.automatic_optimization = rank, counted.make_model(), False

    def train_dataloader(self) -> Any:
        return windows(DataLoader(IN_LIGHTNING.batches(self.rank), batch_size=None), IN_LIGHTNING.window)  # type: ignore[arg-type]

    def training_step(self, window: Any, batch_idx: int) -> None:
        optimizer, ddp = self.optimizers(), self.trainer.strategy.model
        optimizer.zero_grad()  # type: ignore[union-attr]
        for batch in window:
            ddp.require_backward_grad_sync = batch is window[-1]  # type: ignore[union-attr]
            self.manual_backward(total_loss(self.net, batch) / count(window))
        optimizer.step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return counted.make_optimizer(self.parameters())


def by_lightning(rank: int) -> list[Tensor]:
    module = Module(rank)
    strategy = lightning_join.DDPJoinStrategy(weighting=count)
    build_trainer(Fit(IN_LIGHTNING.lengths, IN_LIGHTNING.epochs), strategy=strategy).fit(module)
    return [p.detach() for p in module.parameters()]


def by_fabric(rank: int) -> list[Tensor]:
    fabric, net = fabric_of(len(CASE.lengths), DDPJoinStrategy(weighting=count)), counted.make_model()
    model, optimizer = fabric.setup(net, counted.make_optimizer(net.parameters()))
    data: Any = DataLoader(CASE.batches(rank), batch_size=None)  # type: ignore[arg-type]
    loader: Any = fabric.setup_dataloaders(data, use_distributed_sampler=False)
    for _ in range(CASE.epochs):
        for window in fabric.strategy.batches(windows(loader, CASE.window)):  # type: ignore[attr-defined]
            optimizer.zero_grad()
            for batch in window:
                with fabric.no_backward_sync(model, enabled=batch is not window[-1]):
                    fabric.backward(total_loss(model, batch) / count(window))
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def by_accelerate(rank: int) -> list[Tensor]:
    with accelerator_of(rank) as accelerator:
        net = counted.make_model()
        model, optimizer = accelerator.prepare(net, counted.make_optimizer(net.parameters()))
        loader = DataLoaderShard(CASE.batches(rank), batch_size=None)  # type: ignore[arg-type]
        with accelerator.join_uneven_inputs(weighting=count) as join:
            for _ in range(CASE.epochs):
                for window in join.batches(windows(loader, CASE.window)):
                    optimizer.zero_grad()
                    for batch in window[:-1]:
                        with accelerator.no_sync(model):
                            accelerator.backward(total_loss(model, batch) / count(window))
                    accelerator.backward(total_loss(model, window[-1]) / count(window))
                    optimizer.step()
        return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize(("train", "case"), [(by_lightning, IN_LIGHTNING), (by_fabric, CASE), (by_accelerate, CASE)])
def test_the_mean_is_over_all_ranks_items(workers: Workers, train: Callable[[int], list[Tensor]], case: Case) -> None:
    counted.check(case, workers.run(len(case.lengths), to_the_end, train))
