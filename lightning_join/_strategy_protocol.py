"""The strategy's interface for the other modules of this package, and functions that get it from a trainer."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from torch_join.integration import (
    Channel,
    Lockstep,
    ModuleMetrics,
    Options,
    Rebalancing,
    StepDriver,
    telling_failures,
)


class JoiningStrategy(ParallelStrategy):
    """The strategy's interface for the loops, logging and training modules, none of which imports a concrete strategy.

    Attributes:
        options: The user's options.
        channel: Sends small messages between the ranks, and lets all ranks meet. It has a single rank until a run of
            several processes starts.
        driver: Runs the active ranks' operations on a joined rank in a step; `None` outside of a run.
        join: Knows the active ranks of each step of a fit, and runs the steps of joined ranks; `None` outside of a fit.
        metrics: The module's torchmetrics metrics; `None` outside of a run.
        step_values: Reduces logged values in a step, a `StepValues`; `None` outside of a run.
        around_step: The contexts around a training step's transfer, then around its hooks.
        gathers_alike: Whether gathered tensors are certain to have the same shape on all ranks.
        sets_up: True during set-up, before any loop runs: the cause of a rank's failure is not reported to other ranks
            yet.
        evaluated_by: The active ranks, in a step of an evaluation or a prediction in which the others run placeholders;
            otherwise `None`.
    """

    options: Options
    channel = Channel()
    driver: StepDriver | None = None
    join: Lockstep | None = None
    metrics: ModuleMetrics | None = None
    step_values: Any = None
    around_step: ExitStack
    gathers_alike = False
    sets_up = False
    evaluated_by: tuple[int, ...] | None = None

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of batches while others have not, so it runs a shadow step or a placeholder."""
        if self.evaluated_by is not None:
            return self.global_rank not in self.evaluated_by
        return self.join is not None and self.join.in_tail and self.join.joined

    def find_step_ranks(self) -> tuple[int, ...] | None:
        """Return the active ranks, in a step in which some rank has no batch; otherwise `None`."""
        return self.driver.ranks if self.driver is not None else None

    @contextmanager
    def around_run(self, last: bool = True) -> Iterator[None]:
        """Wrap a run of a loop: failures reach the other ranks, and all ranks leave at the same time.

        Args:
            last: Whether this is the last loop before the teardown.
        """
        self.sets_up = False
        with telling_failures(self.channel):
            yield
        if last:
            self.channel.close(meets=True)
        else:
            self.channel.gather(None)

    def wrap_again(self) -> None:
        """Rebuild DDP on all ranks for the parameters that are trained now."""

    def shadow_training_step(self) -> Tensor:
        """Follow the active ranks' `training_step` on a joined rank, and return a scalar zero as the loss."""
        assert self.join is not None
        with self.precision_plugin.train_step_context():
            return self.join.shadow_forward()


def strategy_of(trainer: "pl.Trainer") -> JoiningStrategy:
    """Return the trainer's strategy."""
    return trainer.strategy  # type: ignore[return-value]


def rebalancing_of(trainer: "pl.Trainer") -> Rebalancing | None:
    """Return the object that rebalances the batches of this run, if they are rebalanced."""
    driver: StepDriver | None = getattr(trainer.strategy, "driver", None)  # Lightning's single-device strategy has none
    return driver.rebalancing if driver is not None and driver.rebalancing.enabled else None


def metrics_of(trainer: "pl.Trainer") -> ModuleMetrics:
    """Return the metrics of the running module."""
    metrics = strategy_of(trainer).metrics
    assert metrics is not None
    return metrics


def join_of(trainer: "pl.Trainer") -> Lockstep:
    """Return the join of the current fit."""
    join: Lockstep | None = trainer.strategy.join  # type: ignore[attr-defined]
    assert join is not None
    return join
