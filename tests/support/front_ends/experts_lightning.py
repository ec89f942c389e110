"""Experts over several ranks, by Lightning's Trainer; and what is logged, which is of batches."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_join import DDPJoinStrategy, JoinCallback, ModelParallelJoinStrategy
from tests.support import experts
from tests.support.experts import Case, Part
from tests.support.front_ends.experts import batches_of


class Log(Logger):
    """Keeps what is logged."""

    name = version = "log"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []
        self.epochs: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.steps += [metrics["mean_step"]] if "mean_step" in metrics else []
        self.epochs += [metrics] if "mean_epoch" in metrics else []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Module(pl.LightningModule):
    """Experts over some ranks; logs of each batch how many rows it has."""

    part: Part

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.automatic_optimization = case, not case.manual
        self.rows, self.hooks = MeanMetric(), list[int]()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.part = Part(self.case)
            self.net = self.part.net
            if self.case.wrap == "fsdp":
                self.part.shard()
            else:
                self.part.hide(self, "net.")

    def training_step(self, batch: experts.Batch, index: int) -> Tensor | None:
        x, y = batch
        value = torch.tensor(float(len(x)))
        self.log("mean", value, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        self.log("most", value, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.rows.update(value)
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        loss = experts.loss_of(self.case, self.net(x), y, self.net)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.part.before_step()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.hooks.append(index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return experts.make_optimizer(self.net.parameters())


Found = tuple[int, list[Tensor], list[float], dict[str, float], list[int]]


def lightning(rank: int, case: Case, streams: bool) -> Found:
    log, world = Log(), len(case.lengths)
    kind: Any = DDPJoinStrategy if case.wrap == "ddp" else partial(ModelParallelJoinStrategy, world, 1)
    options: Any = {"weighting": case.weighting, "placeholder": case.placeholder}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy() if case.callback else kind(**options),
        callbacks=[JoinCallback(**options)] if case.callback else [],
        max_epochs=1,
        logger=log,
        log_every_n_steps=1,
        accumulate_grad_batches=case.window,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(case)
    trainer.fit(module, DataLoader(batches_of(case, rank, streams), batch_size=None))
    return module.part.place, module.part.parameters, log.steps, log.epochs[0] if rank == 0 else {}, module.hooks


def check(case: Case, ranks: Any) -> None:
    experts.check(case, [each[:2] for each in ranks])
    rows = case.rows()
    everything = [count for step in rows for count in step]
    _, _, steps, epoch, _ = ranks[0]
    # Lightning logs where the optimizer steps.
    ends = [step for i, step in enumerate(rows) if case.ends_window(i)]
    assert steps == pytest.approx([sum(step) / len(step) for step in ends])
    assert epoch["mean_epoch"] == pytest.approx(sum(everything) / len(everything))
    assert epoch["most"] == max(everything)
    assert epoch["rows"] == pytest.approx(sum(everything) / len(everything))
    assert all(each[4] == [*range(max(case.lengths))] for each in ranks)
