"""The evaluation loop on uneven dataloaders, empty ones among them.

Evaluation needs no shadow steps: ranks go through their batches on their own. One that has come to
the end of a dataloader serves the collectives that the others' steps issue, until they come to it too.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any, cast

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_join._compat import EvaluationLoop, call, no_grad_context
from lightning_join._logging.results import JoinResultCollection, check_monitored
from lightning_join._logging.step_values import drop_own_step_values
from lightning_join._loops.evaluation_rounds import InRounds
from lightning_join._reading import loaders as _loaders
from lightning_join._strategy_protocol import channel_of, metrics_of, strategy_of


class JoinEvaluationLoop(InRounds, EvaluationLoop):
    """Lightning's evaluation loop where ranks may have different numbers of batches, or none."""

    @property
    def reads(self) -> str:  # type: ignore[override]
        return f"[_EvaluationLoop].{self._stage.dataloader_prefix}_next"

    def run(self) -> Any:
        if self._trainer_fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            return self._run()  # the fit loop's run is around it
        with strategy_of(self.trainer).around_run(last=not self.trainer.sanity_checking):
            return self._run()

    @no_grad_context
    def _run(self) -> Any:
        # Lightning's, but for: what is stored per dataloader is stored on every rank, in order; and all ranks end here,
        # and not each in its first step that is not its last.
        if self.trainer.received_sigterm:
            raise SIGTERMException
        self.setup_data()
        if self.skip:
            return []
        self.reset()
        self.on_run_start()
        self._run_steps(self._evaluation_step)
        self.batch_progress.is_last_batch = True  # of all ranks, also where this rank had none
        self._has_run = not self.trainer.sanity_checking  # also where this rank had no batch
        return self.on_run_end()

    def setup_data(self) -> None:
        # Lightning's, but for: no decision and no error from one rank's numbers alone.
        trainer: Any = self.trainer
        fitting = self._trainer_fn == TrainerFn.FITTING
        if self._combined_loader is not None and fitting and not self._should_reload_val_dl:
            # There may be more data than before, or less; what a planned one is too short for is not known yet.
            mine = _loaders.measure(self._stage, self._combined_loader.flattened, self._limit)
            self._take_lengths(replace(mine, error=None) if any(mine.planned) else mine)
            return
        hook = "test_step" if trainer.testing else "validation_step"
        if self._limit == 0 or not is_overridden(hook, trainer.lightning_module):
            return
        # A sanity check must not reload what the first epoch's validation loads.
        if fitting and (not trainer.sanity_checking or trainer.fit_loop.epoch_loop._should_check_val_epoch()):
            self._last_val_dl_reload_epoch = trainer.current_epoch

        self._make_loaders()
        self._seen_batches_per_dataloader = defaultdict(int)

    def on_run_start(self) -> None:
        super().on_run_start()
        strategy = strategy_of(self.trainer)
        if strategy.join is not None:
            # Each rank has its own since the last training step, or those that a hook has put in.
            strategy.join.catch_up()
            strategy.join.sync_buffers()
        metrics_of(self.trainer).renew()

    def _on_evaluation_epoch_end(self) -> None:
        # Lightning's, but for: ranks compare what the hooks have logged before it is reduced.
        trainer: Any = self.trainer
        hook = "on_test_epoch_end" if trainer.testing else "on_validation_epoch_end"
        call._call_callback_hooks(trainer, hook)
        call._call_lightning_module_hook(trainer, hook)
        cast(JoinResultCollection, self._results).reduce_all()
        trainer._logger_connector.on_epoch_end()

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer_fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            check_monitored(self.trainer, channel_of(self.trainer))
        super()._on_evaluation_end(*args, **kwargs)

    def _finish_rounds(self, until: int) -> None:
        """Store the values of the dataloaders before `until`; all ranks meet at each."""
        rounds = self._rounds
        while rounds.index < until:
            if self._is_sequential and self.num_dataloaders > 1:
                self._results.dataloader_idx = rounds.index
            rounds.finish(self._serve_step)
            metrics_of(self.trainer).renew()
            cast(JoinResultCollection, self._results).reduce_all()
            self._store_dataloader_outputs()

    def _serve_step(self, active: tuple[int, ...]) -> None:
        """Take part in a step of the ranks that have a batch, and log the values that all have in common."""
        trainer: Any = self.trainer
        index = self._rounds.index if self._is_sequential else 0
        connector = trainer._logger_connector
        connector.on_batch_start(None, index if self._is_sequential and self.num_dataloaders > 1 else None)
        drop_own_step_values(self._results)
        self._rounds.driver.follow(active)
        connector.on_batch_end()
        if not trainer.sanity_checking:
            connector.update_eval_step_metrics(self._seen_batches_per_dataloader[index])
            self._seen_batches_per_dataloader[index] += 1
