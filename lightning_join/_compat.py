"""Every private name of Lightning and torchmetrics that this package uses.

Seen in lightning 2.5.1 to 2.6.6, and in torchmetrics 1.0.3 to 1.9.0. `tests/lightning/test_compat.py` fails when one
disappears.
"""

# The imports here are for the other modules, by names without an underscore.
# ruff: noqa: F401
# mypy: implicit-reexport

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops import _FitLoop as FitLoop
from lightning.pytorch.loops import _PredictionLoop as PredictionLoop
from lightning.pytorch.loops import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.loops.fetchers import _DataFetcher as DataFetcher
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
from lightning.pytorch.loops.optimization import _AutomaticOptimization as AutomaticOptimization
from lightning.pytorch.loops.optimization import _ManualOptimization as ManualOptimization
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.progress import _BatchProgress as BatchProgress
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSampler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.trainer.call import _call_strategy_hook as call_strategy_hook
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches as parse_num_batches
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype as default_dtype
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as Metadata
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as Sync
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector as SignalConnector
from lightning.pytorch.tuner.lr_finder import _LRCallback as LRCallback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torchmetrics import Metric

from torch_join.integration import check_names


def ddp_arguments(strategy: DDPStrategy) -> dict[str, Any]:
    """Return the arguments with which Lightning wraps a model in DDP; it does so in a separate CUDA stream.

    This package does not: no other stream waits for the parameters that DDP sends in that stream. If a model is wrapped
    again, some gradients would be accumulated in the previous stream, and the new one does not wait for it.
    """
    return {"device_ids": strategy.determine_ddp_device_ids(), **strategy._ddp_kwargs}


# With `static_graph`, DDP's first average waits for a forward's output, and manual optimization has none. Lightning
# requests that average since 2.6.
AVERAGES_FIRST_OF_STATIC_GRAPH = "post_backward" in vars(DDPStrategy)


def trainer_of(module: "pl.LightningModule | None") -> "pl.Trainer | None":
    """Return the trainer to which a module is attached, or `None`; `module.trainer` raises without one."""
    return None if module is None else module._trainer


def validation_interval(trainer: "pl.Trainer") -> float | None:
    """Return after how many seconds of training a validation is due (`val_check_interval` as a time, from 2.6 on)."""
    return getattr(trainer, "_val_check_time_interval", None)


def saves_on_exception(callback: Any) -> bool:
    """Whether `callback` is a `ModelCheckpoint` that saves when a run raises; only newer versions can do this."""
    return isinstance(callback, ModelCheckpoint) and getattr(callback, "save_on_exception", False)


def wrapped_sampler(sampler: Any) -> Any:
    """Return the user's sampler inside Lightning's sampler for `predict`."""
    return sampler.dataset._sampler


def is_rays(environment: Any) -> bool:
    """Whether a cluster environment is Ray Train's."""
    return type(environment).__module__.startswith("ray.train.lightning")


def connector(trainer: "pl.Trainer") -> Any:
    """Return the object that has what `Trainer(use_distributed_sampler=...)` has set, by the same name."""
    return trainer._accelerator_connector


def has_dataloaders(trainer: "pl.Trainer") -> bool:
    """Whether one of the loops already has dataloaders."""
    loops: tuple[Any, ...] = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    loops += (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return any(loop._combined_loader is not None for loop in loops)


def epoch_end_step(trainer: "pl.Trainer") -> int:
    """Return the step at which Lightning logs values at the end of an epoch: the step of its last batch."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped - 1


def mark_updated(metric: Metric) -> None:
    """Keep torchmetrics from warning that a metric is computed before its first update."""
    metric._update_count = max(metric._update_count, 1)


def get_cycled(loader: CombinedLoader) -> list[bool]:
    """Return which parts of a loader have ended and restarted."""
    return list(getattr(loader._iterator, "_consumed", []))


def set_cycled(loader: CombinedLoader, cycled: list[bool]) -> None:
    """Set the value that `get_cycled` returned on a new iterator."""
    if cycled:
        iterator: Any = loader._iterator
        iterator._consumed = list(cycled)


def set_limits(loader: CombinedLoader, limits: list[int | float]) -> None:
    """Set the number of batches of each part, also for an existing iterator."""
    loader.limits = limits
    if loader._iterator is not None:
        loader._iterator.limits = limits


class Watched:
    """An iterator that records whether it has ended, and calls `act` at its end; pickles of it are empty."""

    def __init__(self, iterator: Iterator[Any], act: Callable[[], None] = lambda: None) -> None:
        self.iterator, self._act = iterator, act
        self.ended = False

    def __iter__(self) -> "Watched":
        return self

    def __next__(self) -> Any:
        try:
            return next(self.iterator)
        except StopIteration:
            if not self.ended:
                self.ended = True
                self._act()
            raise

    def __reduce__(self) -> Any:
        return iter, ((),)


def watch_ends(loader: CombinedLoader, act: Callable[[list[Any]], None]) -> list[Any]:
    """Return an object for each part of a new iterator: its `ended` tells whether the part has ended.

    `act` is called when a part ends. A cycled part then restarts.
    """
    iterator: Any = loader._iterator
    parts = zip(iterator.iterators, loader.flattened, strict=True)
    iterator.iterators = [Watched(inner, partial(act, [part])) for inner, part in parts]
    return [*iterator.iterators]


check_names(
    "lightning.pytorch",
    "2.5.1 to 2.6.6",
    {
        pl.LightningModule: "_trainer",
        pl.Trainer: "_logger_connector _signal_connector",
        AutomaticOptimization: "_make_closure _skip_backward",
        CombinedLoader: "_iterator _mode",
        DDPStrategy: "determine_ddp_device_ids _ddp_comm_state _ddp_kwargs _model_averaging_period",
        EvaluationLoop: "_evaluation_step _on_evaluation_epoch_end _store_dataloader_outputs",
        FitLoop: "_can_stop_early _combined_loader",
        PredictionLoop: "_combined_loader _predict_step",
        TrainingEpochLoop: "_batches_that_stepped _is_training_done _should_check_val_epoch _should_check_val_fx",
    },
)
