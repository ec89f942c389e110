"""The evaluation and prediction loops on uneven dataloaders, including empty ones.

Evaluation needs no shadow steps: ranks process their batches independently. A rank at the end of a dataloader
serves the collectives of the other ranks' steps, until they reach it too.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_join._compat import EvaluationLoop, PredictionLoop
from lightning_join._logging.results import JoinResultCollection, check_monitored
from lightning_join._logging.step_values import drop_own_step_values
from lightning_join._loops.evaluation_rounds import InRounds
from lightning_join._loops.user_code import NoStopIteration, after_hook
from lightning_join._strategy_protocol import metrics_of, strategy_of


class JoinEvaluationLoop(InRounds, EvaluationLoop):
    """Lightning's evaluation loop for ranks that may have different numbers of batches, or none."""

    @property
    def _step_name(self) -> str:
        return "test_step" if self.trainer.testing else "validation_step"

    @property
    def _is_mid_fit(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking

    def run(self) -> Any:
        around_run = strategy_of(self.trainer).around_run
        # During a fit the fit loop's run is around it.
        with nullcontext() if self._is_mid_fit else around_run(last=not self.trainer.sanity_checking):
            if self.trainer.received_sigterm:
                raise SIGTERMException
            return super().run()

    def _measure_again(self) -> None:
        if self._combined_loader is not None and self.trainer.state.fn == TrainerFn.FITTING:
            # There may be more data than before, or less; whether a planned loader is too short is not known yet.
            own = self.measure(self._combined_loader.flattened)
            self._take_lengths(replace(own, error=None) if any(own.planned) else own)

    def on_run_start(self) -> None:
        super().on_run_start()
        strategy = strategy_of(self.trainer)
        if strategy.join is not None:
            # Since the last training step, each rank may have its own buffers, or ones that a hook has set.
            strategy.join.catch_up()
            strategy.join.sync_buffers()
        metrics_of(self.trainer).renew()

    def _evaluation_step(self, *args: Any) -> None:
        with NoStopIteration():
            self._finish_rounds(args[2])
            with self._rounds.step(args[0]):
                super()._evaluation_step(*args)

    def _store_dataloader_outputs(self) -> None:
        pass  # on every rank, and for each dataloader: `_finish_rounds` stores them

    def on_run_end(self) -> Any:
        self._finish_rounds()
        self.batch_progress.is_last_batch = True  # the last of all ranks, even if this rank had none
        self._has_run = not self.trainer.sanity_checking  # also if this rank had no batch
        return super().on_run_end()

    def _on_evaluation_epoch_end(self) -> None:
        def compare(_: Any) -> None:
            cast(JoinResultCollection, self._results).reduce_all()  # hooks may have logged on some ranks only

        hook = "on_test_epoch_end" if self.trainer.testing else "on_validation_epoch_end"
        with after_hook(self.trainer.lightning_module, hook, compare):
            super()._on_evaluation_epoch_end()
        if self._is_mid_fit:
            check_monitored(self.trainer, strategy_of(self.trainer).channel)

    def _finish_round(self) -> None:
        """Store the values of a dataloader."""
        if len(self._rounds.places) > 1:
            self._results.dataloader_idx = self._rounds.index
        self._rounds.finish(self._serve_step)
        metrics_of(self.trainer).renew()
        cast(JoinResultCollection, self._results).reduce_all()
        super()._store_dataloader_outputs()

    def _serve_step(self, active: tuple[int, ...]) -> None:
        """Take part in a step of the active ranks, and log the values that are equal on all ranks."""
        trainer: Any = self.trainer
        rounds, index = self._rounds, self._rounds.index
        connector = trainer._logger_connector
        connector.on_batch_start(None, index if len(rounds.places) > 1 else None)
        drop_own_step_values(self._results)
        rounds.serve(active)
        connector.on_batch_end()
        if not trainer.sanity_checking:
            connector.update_eval_step_metrics(self._seen_batches_per_dataloader[index])
            self._seen_batches_per_dataloader[index] += 1


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
