"""Every private name of Lightning and torchmetrics that this package touches.

Seen in lightning 2.6.6 and torchmetrics 1.9.0. `tests/test_compat.py` notices when one goes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.strategies.registry import _StrategyRegistry as StrategyRegistryType
from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.types import _Stateful as Stateful
from lightning.pytorch.core.module import LightningModule
from lightning.pytorch.loops import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops import _FitLoop as FitLoop
from lightning.pytorch.loops import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.loops.fetchers import _DataFetcher as DataFetcher
from lightning.pytorch.loops.optimization import _AutomaticOptimization as AutomaticOptimization
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.utilities import _no_grad_context as no_grad_context
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import (
    _check_dataloader_iterable as check_dataloader_iterable,
)
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches as parse_num_batches
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader as process_dataloader
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader as request_dataloader
from lightning.pytorch.trainer.connectors.data_connector import (
    _resolve_overfit_batches as resolve_overfit_batches,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as Metadata
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection as ResultCollection,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as Sync
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector as SignalConnector
from torchmetrics import Metric

__all__ = [
    "AutomaticOptimization",
    "ClosureResult",
    "DataFetcher",
    "DistributedSamplerWrapper",
    "EvaluationLoop",
    "FitLoop",
    "Metadata",
    "ResultCollection",
    "ResultMetric",
    "SignalConnector",
    "Stateful",
    "StrategyRegistryType",
    "Sync",
    "TrainingEpochLoop",
    "call",
    "check_dataloader_iterable",
    "mark_updated",
    "no_grad_context",
    "parse_num_batches",
    "process_dataloader",
    "request_dataloader",
    "resolve_overfit_batches",
    "set_sampler_epoch",
    "sized_len",
    "unchanged_metrics",
]


@contextmanager
def unchanged_metrics(module: LightningModule) -> Iterator[None]:
    """Give every torchmetrics metric in `module` back the state it had."""
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    bookkeeping = ("_update_count", "_computed", "_forward_cache")
    states = [(m._copy_state_dict(), {k: getattr(m, k) for k in bookkeeping}) for m in metrics]
    try:
        yield
    finally:
        for metric, (state, counters) in zip(metrics, states, strict=True):
            for name, value in {**state, **counters}.items():
                setattr(metric, name, value)


def mark_updated(metric: Metric) -> None:
    """Keep torchmetrics from warning that a metric is computed before its first update."""
    metric._update_count = max(metric._update_count, 1)
