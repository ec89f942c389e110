"""The prediction loop on uneven dataloaders, including empty ones."""

from typing import Any

from lightning.pytorch.trainer.states import RunningStage

from lightning_join._compat import PredictionLoop
from lightning_join._loops.evaluation_rounds import InRounds
from lightning_join._loops.user_code import NoStopIteration
from lightning_join._strategy_protocol import strategy_of


class JoinPredictionLoop(InRounds, PredictionLoop):
    """Lightning's prediction loop for ranks that may have different numbers of batches, or none."""

    _stage = RunningStage.PREDICTING
    _limits_name = "max_batches"

    @property
    def _step_name(self) -> str:
        return "predict_step"

    def run(self) -> Any:
        with strategy_of(self.trainer).around_run():
            return super().run()

    def _predict_step(self, *args: Any) -> None:
        if not self._rounds.places:
            super()._predict_step(*args)
            return
        with NoStopIteration():
            self._finish_rounds(args[2])
            with self._rounds.step(args[0]):
                super()._predict_step(*args)

    def on_run_end(self) -> Any:
        self._finish_rounds()
        return super().on_run_end()
