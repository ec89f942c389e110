"""What the other modules of this package ask of the strategy, and how they get at it from a trainer."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_join._compat import ResultMetric
from torch_join.integration import Channel, Lockstep, ModuleMetrics, Options, Rebalancing, StepDriver


class JoiningStrategy(Protocol):
    """The strategy, as the loops, the logged values and the training under it see it.

    `DDPJoinStrategy` is one. It builds all of them, and none of them imports it.

    Attributes:
        options: What the user has chosen.
        channel: Small messages between the ranks, and the meetings of all of them.
        driver: Serves, on a rank without a batch, what the others do in a step; `None` outside of a run.
        join: Who has a batch at which step of a fit, and what a rank without one runs; `None` outside of a fit.
        metrics: The module's metrics of torchmetrics; `None` outside of a run.
        rebalancing: What rebalances batches, if they are; `None` outside of a run.
        around_step: What is around a training step's transfer, then around its hooks.
        gathers_alike: Whether what ranks gather now surely has the same shape on all of them.
        joined: Whether this rank has run out of batches while others have not.
        step_ranks: The ranks that have a batch, inside of a step that some rank does not have; otherwise `None`.
        lightning_module: The module that is run.
        root_device: This rank's device.
        optimizers: Those that `configure_optimizers` has returned.
    """

    options: Options
    channel: Channel
    driver: StepDriver | None
    join: Lockstep | None
    metrics: ModuleMetrics | None
    rebalancing: Rebalancing | None
    around_step: ExitStack
    gathers_alike: bool
    joined: bool
    step_ranks: tuple[int, ...] | None
    lightning_module: "pl.LightningModule | None"
    root_device: torch.device
    optimizers: list[torch.optim.Optimizer]

    def around_run(self, last: bool = True) -> AbstractContextManager[None]:
        """Put around a run of a loop, the `last` one before the teardown or not: see `Joining`."""

    def wrap_again(self) -> None:
        """Build DDP anew, on all ranks, for the parameters that train now."""

    def shadow_training_step(self) -> Tensor:
        """Do on a joined rank what `training_step` does on the active ones, and return a scalar zero as the loss."""

    def around_update(self, key: str, item: ResultMetric, value: Any) -> AbstractContextManager[None]:
        """Put around the update of a logged value: joined ranks take part in the reduction of its step value."""

    # The rest is of Lightning's own `DDPStrategy`.

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks that take part; all of these call it."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return `src`'s object on the ranks that take part; all of these call it."""


def strategy_of(trainer: "pl.Trainer") -> JoiningStrategy:
    """Return the trainer's strategy."""
    return trainer.strategy  # type: ignore[return-value]


def channel_of(trainer: "pl.Trainer") -> Channel:
    """Return the channel between the ranks."""
    return strategy_of(trainer).channel


def rebalancing_of(trainer: "pl.Trainer") -> Rebalancing | None:
    """Return what rebalances the batches of this run, if they are."""
    rebalancing = strategy_of(trainer).rebalancing
    return rebalancing if rebalancing is not None and rebalancing.enabled else None


def metrics_of(trainer: "pl.Trainer") -> ModuleMetrics:
    """Return the metrics of the module that is run."""
    metrics = strategy_of(trainer).metrics
    assert metrics is not None
    return metrics


def join_of(trainer: "pl.Trainer") -> Lockstep:
    """Return the join of the fit that is running."""
    join: Lockstep | None = trainer.strategy.join  # type: ignore[attr-defined]
    assert join is not None
    return join
