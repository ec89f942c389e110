"""Lightning's loops, with Join around each step."""

from lightning_join.loops.epoch import JoinEpochLoop
from lightning_join.loops.evaluation import JoinEvaluationLoop
from lightning_join.loops.fit import JoinFitLoop
from lightning_join.loops.manual import JoinManualOptimization
from lightning_join.loops.optimization import JoinAutomaticOptimization
from lightning_join.loops.prediction import JoinPredictionLoop

__all__ = [
    "JoinAutomaticOptimization",
    "JoinEpochLoop",
    "JoinEvaluationLoop",
    "JoinFitLoop",
    "JoinManualOptimization",
    "JoinPredictionLoop",
]
