"""The prediction loop on uneven dataloaders, empty ones among them."""

from typing import Any

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_join._compat import PredictionLoop, no_grad_context
from lightning_join._loops.evaluation_rounds import InRounds
from lightning_join._strategy_protocol import strategy_of


class JoinPredictionLoop(InRounds, PredictionLoop):
    """Lightning's prediction loop where ranks may have different numbers of batches, or none."""

    reads = "[_PredictionLoop].predict_next"
    _stage = RunningStage.PREDICTING
    _limits_name = "max_batches"

    def run(self) -> Any:
        with strategy_of(self.trainer).around_run():
            step = self.trainer.lightning_module.predict_step
            if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
                return super().run()  # it reads its own batches, so nobody can serve it
            return self._run()

    @no_grad_context
    def _run(self) -> Any:
        # Lightning's, but for: ranks that have come to the end of a dataloader wait for the others, and serve.
        self.setup_data()
        if self.skip:
            return None
        self.reset()
        self.on_run_start()
        self._run_steps(self._predict_step)
        return self.on_run_end()

    def setup_data(self) -> None:
        # Lightning's, but for: no decision and no error from one rank's numbers alone.
        if self._limit != 0:
            self._make_loaders()
