"""The evaluation loop on uneven dataloaders, empty ones among them.

Evaluation needs no shadow steps: ranks go through their batches on their own and meet where a
dataloader's values are reduced.
"""

from collections import defaultdict
from typing import Any, cast

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_join import _compat
from lightning_join._compat import EvaluationLoop, call, no_grad_context
from lightning_join._logging import JoinResultCollection, check_monitored
from lightning_join.loops import _loaders
from lightning_join.loops._access import channel_of, strategy_of


class JoinEvaluationLoop(EvaluationLoop):
    """Lightning's evaluation loop where ranks may have different numbers of batches, or none."""

    # Per rank, the number of batches of each dataloader.
    _all_limits: tuple[tuple[int | float, ...], ...] = ()
    _stored = 0

    @property
    def skip(self) -> bool:
        most = self.trainer.num_sanity_val_steps if self.trainer.sanity_checking else float("inf")
        return sum(min(most, limit) for limits in self._all_limits for limit in limits) == 0

    def run(self) -> Any:
        if self._trainer_fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            return self._run()  # the fit loop's run is around it
        with strategy_of(self.trainer).together():
            return self._run()

    @no_grad_context
    def _run(self) -> Any:
        # Lightning's, but for: what is stored per dataloader is stored on every rank, in order.
        self.setup_data()
        if self.skip:
            return []
        self.reset()
        self.on_run_start()
        fetcher = self._data_fetcher
        assert fetcher is not None
        self._stored = 0
        while True:
            try:
                batch, batch_idx, dataloader_idx = next(fetcher)
                self._store_outputs(dataloader_idx)
                self.batch_progress.is_last_batch = fetcher.done
                self._evaluation_step(batch, batch_idx, dataloader_idx, None)
            except StopIteration:
                break
            finally:
                self.on_iteration_done()
        self._store_outputs(self.num_dataloaders if self._is_sequential else 1)
        self._has_run = not self.trainer.sanity_checking  # also where this rank had no batch
        return self.on_run_end()

    def setup_data(self) -> None:
        # Lightning's, but for: no decision and no error from one rank's numbers alone.
        trainer: Any = self.trainer
        fitting = self._trainer_fn == TrainerFn.FITTING
        if self._combined_loader is not None and fitting and not self._should_reload_val_dl:
            return
        stage = self._stage
        limit = getattr(trainer, f"limit_{stage.dataloader_prefix}_batches")
        hook = "test_step" if trainer.testing else "validation_step"
        if limit == 0 or not is_overridden(hook, trainer.lightning_module):
            return
        # A sanity check must not reload what the first epoch's validation loads.
        if fitting and (not trainer.sanity_checking or trainer.fit_loop.epoch_loop._should_check_val_epoch()):
            self._last_val_dl_reload_epoch = trainer.current_epoch

        source = self._data_source
        requested = _compat.request_dataloader(source)
        loader = requested if isinstance(requested, CombinedLoader) else CombinedLoader(requested, "sequential")
        if fitting and trainer.overfit_batches > 0:
            _compat.resolve_overfit_batches(loader, stage)
        flattened = []
        for part in loader.flattened:
            _compat.check_dataloader_iterable(part, source, self._trainer_fn)
            flattened.append(_compat.process_dataloader(trainer, self._trainer_fn, stage, part))
        loader.flattened = flattened
        self._combined_loader = loader

        mine = _loaders.measure(stage, loader.flattened, limit)
        everyone = _loaders.exchange(channel_of(trainer), mine)
        self._all_limits = tuple(tuple(each.limits) for each in everyone)
        self._max_batches = list(mine.limits)
        self._seen_batches_per_dataloader = defaultdict(int)

    def on_run_start(self) -> None:
        super().on_run_start()
        strategy = strategy_of(self.trainer)
        strategy.evaluates_unevenly = len(set(self._all_limits)) > 1 or float("inf") in self._all_limits[0]
        if strategy.join is not None:
            # Each rank has its own since the last training step, or those that a hook has put in.
            strategy.join.sync_buffers()

    def _on_evaluation_epoch_end(self) -> None:
        # Lightning's, but for: ranks compare what the hooks have logged before it is reduced.
        trainer: Any = self.trainer
        hook = "on_test_epoch_end" if trainer.testing else "on_validation_epoch_end"
        call._call_callback_hooks(trainer, hook)
        call._call_lightning_module_hook(trainer, hook)
        cast(JoinResultCollection, self._results).settle()
        trainer._logger_connector.on_epoch_end()

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer_fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            check_monitored(self.trainer, channel_of(self.trainer))
        super()._on_evaluation_end(*args, **kwargs)

    def _store_outputs(self, until: int) -> None:
        """Store the values of the dataloaders before `until`; all ranks meet at each."""
        while self._stored < until:
            if self._is_sequential and self.num_dataloaders > 1:
                self._results.dataloader_idx = self._stored
            self._stored += 1
            cast(JoinResultCollection, self._results).settle()
            self._store_dataloader_outputs()
