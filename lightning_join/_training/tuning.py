"""The learning rate finder: it uses the losses of all ranks."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_join._compat import LRCallback
from lightning_join._strategy_protocol import join_of


class JoinLRCallback(LRCallback):
    """Makes `Tuner.lr_find` record the mean loss over the active ranks.

    Lightning records rank 0's loss, which is outdated or missing after rank 0 has run out of batches.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        join = join_of(trainer)
        loss = outputs if isinstance(outputs, Tensor) else (outputs or {}).get("loss")
        weighted = torch.zeros(2, dtype=torch.float64)
        if loss is not None and not join.joined:
            weighted = torch.tensor([float(loss), 1.0], dtype=torch.float64) * join.loss_factor
        total, weight = trainer.strategy.reduce(weighted.to(trainer.strategy.root_device), reduce_op="sum").tolist()
        outputs = {"loss": torch.tensor(total / weight, dtype=torch.float64)} if weight else {}
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def is_finding_learning_rate(trainer: Trainer) -> bool:
    """Whether this fit is a run of the learning rate finder; if so, make its callback a `JoinLRCallback`."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LRCallback):
            callback.__class__ = JoinLRCallback
            return True
    return False
