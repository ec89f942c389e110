"""Gives the trainer's own loops the join classes, and later restores Lightning's classes.

This assigns `__class__`. So the loops keep their state, checkpoint keys and data sources, and callbacks keep valid
references to them. New loop objects would lose these.
"""

from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_join import _compat
from lightning_join._logging.results import JoinResultCollection
from lightning_join._loops.epoch import JoinEpochLoop
from lightning_join._loops.evaluation import JoinEvaluationLoop, JoinPredictionLoop
from lightning_join._loops.fit import JoinFitLoop
from lightning_join._loops.optimization import JoinAutomaticOptimization, JoinManualOptimization
from lightning_join._loops.progress import JoinBatchProgress
from lightning_join._loops.signals import JoinSignalConnector
from lightning_join._strategy_protocol import JoiningStrategy
from torch_join import JoinWarning, UnsupportedError

CLASSES: dict[type, type] = {
    _compat.FitLoop: JoinFitLoop,
    _compat.TrainingEpochLoop: JoinEpochLoop,
    _compat.BatchProgress: JoinBatchProgress,
    _compat.AutomaticOptimization: JoinAutomaticOptimization,
    _compat.ManualOptimization: JoinManualOptimization,
    _compat.EvaluationLoop: JoinEvaluationLoop,
    _compat.PredictionLoop: JoinPredictionLoop,
    _compat.SignalConnector: JoinSignalConnector,
}
for plain_class, own_class in CLASSES.items():
    own_class.__name__ = plain_class.__name__  # profilers and messages show a loop by this name


def take_over(trainer: "pl.Trainer", strategy: JoiningStrategy) -> None:
    """Give the loops of `trainer` the join classes; a second call does nothing.

    Raises:
        UnsupportedError: A loop is of a user-defined class.
    """
    for part in _parts(trainer):
        if type(part) in CLASSES.values():
            continue
        if type(part) not in CLASSES:
            raise UnsupportedError(
                f"The trainer has a custom {type(part).__name__}, but a join strategy must replace that loop with its"
                " own. Use Lightning's loop, or strategy='ddp'."
            )
        part.__class__ = CLASSES[type(part)]
    for results in _results(trainer):
        results.__class__ = JoinResultCollection
        cast(JoinResultCollection, results).strategy = strategy
    _skip_checkpoints_on_exception(trainer)


def give_back(trainer: "pl.Trainer") -> None:
    """Give the loops of `trainer` Lightning's classes again; a second call does nothing."""
    plain = {own_class: plain_class for plain_class, own_class in CLASSES.items()}
    for part in (*_parts(trainer), *_results(trainer)):
        own_class, plain_class = type(part), plain.get(type(part), _compat.ResultCollection)
        if own_class in (*plain, JoinResultCollection):
            part.__class__ = plain_class
            for cls in set(own_class.__mro__).difference(plain_class.__mro__):
                data = {name for name, value in vars(cls).items() if not hasattr(value, "__get__")}
                for name in data.union(vars(cls).get("__annotations__", ())).intersection(vars(part)):
                    delattr(part, name)


def _parts(trainer: Any) -> tuple[Any, ...]:
    epoch_loop = trainer.fit_loop.epoch_loop
    return (
        trainer.fit_loop,
        epoch_loop,
        epoch_loop.batch_progress,
        epoch_loop.automatic_optimization,
        epoch_loop.manual_optimization,
        epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
        trainer._signal_connector,
    )


def _results(trainer: Any) -> list[Any]:
    epoch_loop = trainer.fit_loop.epoch_loop
    return [loop._results for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)]


def _skip_checkpoints_on_exception(trainer: Any) -> None:
    # They save on the one rank that raised, and saving takes collectives that the other ranks never issue.
    reason = "saving needs every rank, and only this one would save. This save is skipped; save every few steps."
    for callback in list(trainer.callbacks):
        if isinstance(callback, OnExceptionCheckpoint):
            trainer.callbacks.remove(callback)
            name = "OnExceptionCheckpoint"
        elif _compat.saves_on_exception(callback):
            callback.save_on_exception = False
            name = "ModelCheckpoint(save_on_exception=True)"
        else:
            continue
        rank_zero_only(JoinWarning.warn)(f"{name} does not work with several ranks: {reason}")
