"""The evaluation loop on uneven dataloaders, empty ones among them.

Evaluation needs no shadow steps: ranks go through their batches on their own. One that has come to
the end of a dataloader serves the collectives that the others' steps issue, until they come to it too.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_join._compat import EvaluationLoop, call, no_grad_context
from lightning_join._logging.results import JoinResultCollection, check_monitored
from lightning_join._logging.step_values import drop_own_step_values
from lightning_join._loops.evaluation_rounds import Rounds
from lightning_join._loops.user_code import KnownToProfilers, NoStopIteration
from lightning_join._reading import loaders as _loaders
from lightning_join._reading.fetcher import read_as_planned
from lightning_join._strategy_protocol import channel_of, metrics_of, strategy_of
from torch_join.integration import setting


class JoinEvaluationLoop(KnownToProfilers, EvaluationLoop):
    """Lightning's evaluation loop where ranks may have different numbers of batches, or none."""

    _everyone: Sequence[_loaders.Loaders] = ()
    _rounds: Rounds

    @property
    def reads(self) -> str:  # type: ignore[override]
        return f"[_EvaluationLoop].{self._stage.dataloader_prefix}_next"

    @property
    def skip(self) -> bool:
        return sum(min(self._most, limit) for each in self._everyone for limit in each.limits) == 0

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
        fetcher = self._data_fetcher
        assert fetcher is not None
        resumed = self.batch_progress.current.ready > 0
        loader = self._combined_loader
        assert loader is not None
        rounds = Rounds(strategy_of(self.trainer), loader, self._everyone, self._measure, self._most, resumed)
        self._rounds = rounds
        while not rounds.over:
            try:
                batch, batch_idx, dataloader_idx = next(fetcher)
                self._store_outputs(dataloader_idx)
                self.batch_progress.is_last_batch = fetcher.done
                with rounds.step(), NoStopIteration():
                    self._evaluation_step(batch, batch_idx, dataloader_idx, None)
            except StopIteration:
                break
            finally:
                self.on_iteration_done()
        self._store_outputs(self.num_dataloaders if self._is_sequential else 1)
        self.batch_progress.is_last_batch = True  # of all ranks, also where this rank had none
        self._has_run = not self.trainer.sanity_checking  # also where this rank had no batch
        return self.on_run_end()

    def setup_data(self) -> None:
        # Lightning's, but for: no decision and no error from one rank's numbers alone.
        trainer: Any = self.trainer
        fitting = self._trainer_fn == TrainerFn.FITTING
        stage, limit = self._stage, self._limit
        if self._combined_loader is not None and fitting and not self._should_reload_val_dl:
            # There may be more data than in the validation before, or less.
            self._take(_loaders.measure_again(stage, self._combined_loader, limit))
            return
        hook = "test_step" if trainer.testing else "validation_step"
        if limit == 0 or not is_overridden(hook, trainer.lightning_module):
            return
        # A sanity check must not reload what the first epoch's validation loads.
        if fitting and (not trainer.sanity_checking or trainer.fit_loop.epoch_loop._should_check_val_epoch()):
            self._last_val_dl_reload_epoch = trainer.current_epoch

        self._combined_loader, mine = _loaders.load(trainer, self._data_source, stage, limit)
        self._take(mine)
        _loaders.warn(self._combined_loader.flattened, self._everyone)
        self._seen_batches_per_dataloader = defaultdict(int)

    def _take(self, mine: _loaders.Loaders) -> None:
        self._everyone = _loaders.exchange(channel_of(self.trainer), mine)
        self._max_batches = list(mine.limits)

    def _measure(self, places: Sequence[int]) -> _loaders.Loaders:
        assert self._combined_loader is not None
        mine = _loaders.measure(self._stage, [self._combined_loader.flattened[i] for i in places], self._limit)
        for place, limit in zip(places, mine.limits, strict=True):
            self._max_batches[place] = limit
        return mine

    @property
    def _limit(self) -> int | float:
        limit: int | float = getattr(self.trainer, f"limit_{self._stage.dataloader_prefix}_batches")
        return limit

    def reset(self) -> None:
        mine = self._everyone[self.trainer.global_rank]
        with setting(self, _max_batches=_loaders.limits_before(mine, self._limit)):
            super().reset()
        if any(mine.planned):
            read_as_planned(self._data_fetcher)

    def on_run_start(self) -> None:
        super().on_run_start()
        strategy = strategy_of(self.trainer)
        if strategy.join is not None:
            # Each rank has its own since the last training step, or those that a hook has put in.
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

    def _store_outputs(self, until: int) -> None:
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

    @property
    def _most(self) -> int | float:
        return self.trainer.num_sanity_val_steps if self.trainer.sanity_checking else float("inf")
