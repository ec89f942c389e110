"""The learning rate finder: its losses are those of all ranks."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_join._compat import LRCallback
from lightning_join._strategy_protocol import join_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class JoinLRCallback(LRCallback):
    """What `Tuner.lr_find` records: the mean loss over the ranks that have a batch.

    Lightning records rank 0's, which is outdated, or missing, after that rank has run out.
    """

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        join = join_of(trainer)
        loss = outputs if isinstance(outputs, Tensor) else (outputs or {}).get("loss")
        weighted = torch.zeros(2, dtype=torch.float64)
        if loss is not None and not join.joined:
            weighted = torch.tensor([float(loss), 1.0], dtype=torch.float64) * join.loss_factor
        total, weight = trainer.strategy.reduce(weighted.to(trainer.strategy.root_device), reduce_op="sum").tolist()
        outputs = {"loss": torch.tensor(total / weight, dtype=torch.float64)} if weight else {}
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def is_finding_learning_rate(trainer: "Trainer") -> bool:
    """Whether this run of the fit loop is the learning rate finder's, whose callback is then made ours."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LRCallback):
            callback.__class__ = JoinLRCallback
            return True
    return False
