"""The fit loop: lengths of all ranks before each epoch, one decision on when to stop."""

import time
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_join import _compat
from lightning_join._compat import FitLoop
from lightning_join._fetcher import ReadAheadFetcher
from lightning_join._logging import share_schema
from lightning_join.loops import _loaders
from lightning_join.loops._access import channel_of, strategy_of


class JoinFitLoop(FitLoop):
    """Lightning's fit loop where ranks may have different numbers of batches."""

    # What all ranks know of `trainer.should_stop`. A flag set on one rank alone must not end that
    # rank's loop while the others go on.
    agreed_stop = False
    _lengths: Sequence[int | float] = ()

    def run(self) -> None:
        with strategy_of(self.trainer).together():
            self.agreed_stop = False
            self.agree_on_stop()  # `on_fit_start` may have set it
            super().run()

    @property
    def done(self) -> bool:
        with self.stopping_together():
            return bool(FitLoop.done.fget(self))  # type: ignore[attr-defined]

    def setup_data(self) -> None:
        # Lightning's, but for: no decision and no error from one rank's numbers alone.
        if self._combined_loader is not None and not self._should_reload_train_dl:
            return
        trainer: Any = self.trainer
        if trainer.limit_train_batches == 0 or not is_overridden("training_step", trainer.lightning_module):
            return
        source = self._data_source
        requested = _compat.request_dataloader(source)
        loader = requested if isinstance(requested, CombinedLoader) else CombinedLoader(requested, "max_size_cycle")
        if trainer.overfit_batches > 0:
            _compat.resolve_overfit_batches(loader, mode=RunningStage.TRAINING)
        flattened = []
        for part in loader.flattened:
            _compat.check_dataloader_iterable(part, source, TrainerFn.FITTING)
            flattened.append(_compat.process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, part))
        loader.flattened = flattened
        self._combined_loader = loader
        self._last_train_dl_reload_epoch = trainer.current_epoch
        self._data_fetcher = fetcher = ReadAheadFetcher()
        fetcher.setup(loader)
        self._lengths = ()
        self.measure()
        self._load_combined_loader_states()
        iter(fetcher)

        if self.max_batches == 0:
            rank_zero_warn(f"The train dataloaders of all {trainer.world_size} ranks are empty.")
        if trainer._val_check_time_interval is not None:
            trainer._train_start_time = trainer._last_val_time = time.monotonic()
        if trainer.loggers and self.max_batches < trainer.log_every_n_steps and not trainer.fast_dev_run:
            rank_zero_warn(
                f"The number of training batches ({self.max_batches}) is smaller than the logging interval"
                f" Trainer(log_every_n_steps={trainer.log_every_n_steps}). Set a lower value for"
                " log_every_n_steps if you want to see logs for the training epoch.",
                category=PossibleUserWarning,
            )

    def measure(self) -> None:
        """Exchange how many batches each rank has, and take all numbers from the longest; all ranks meet."""
        loader = self._combined_loader
        assert loader is not None
        trainer: Any = self.trainer
        mine = _loaders.measure(RunningStage.TRAINING, loader.flattened, trainer.limit_train_batches)
        everyone = _loaders.exchange(channel_of(trainer), mine)
        loader.limits = mine.limits
        self.set_lengths([_length(loader, each.limits) for each in everyone])

    def set_lengths(self, lengths: Sequence[int | float]) -> None:
        """Take the number of batches, and what follows from it, from the longest rank."""
        if self._lengths == lengths:
            return  # StochasticWeightAveraging may have changed `max_batches` since
        self._lengths = lengths
        self.max_batches = max(lengths)
        trainer: Any = self.trainer
        if trainer._val_check_time_interval is not None:
            trainer.val_check_batch = None
            return
        interval = trainer.val_check_interval
        if isinstance(interval, int):
            trainer.val_check_batch = interval
            if (
                0 < self.max_batches < interval
                and trainer.check_val_every_n_epoch is not None
                and trainer.limit_val_batches > 0
            ):
                raise ValueError(
                    f"`val_check_interval` ({interval}) must be less than or equal to the number of the training"
                    f" batches ({self.max_batches} on the longest rank). If you want to disable validation set"
                    " `limit_val_batches` to 0.0 instead. If you want to validate based on the total training"
                    " batches, set `check_val_every_n_epoch=None`."
                )
        elif self.max_batches != float("inf"):
            trainer.val_check_batch = max(1, int(self.max_batches * interval))
        elif interval == 1.0:
            trainer.val_check_batch = float("inf")
        else:
            unsized = [rank for rank, length in enumerate(lengths) if length == float("inf")]
            raise MisconfigurationException(
                f"The train dataloaders of ranks {unsized} have no length, so `Trainer(val_check_interval)` must"
                " be time based, `1.0` or an int. An int k specifies checking validation every k training batches."
            )

    def on_run_start(self) -> None:
        super().on_run_start()
        self.agree_on_stop()

    def on_advance_start(self) -> None:
        self.setup_data()
        assert self._combined_loader is not None
        for part in self._combined_loader.flattened:
            _compat.set_sampler_epoch(part, self.epoch_progress.current.processed)  # type: ignore[attr-defined]
        self.measure()  # lengths may change with the epoch
        super().on_advance_start()

    def on_advance_end(self) -> None:
        strategy = strategy_of(self.trainer)
        assert strategy.join is not None
        strategy.join.finish()
        share_schema(self.epoch_loop._results, strategy)
        super().on_advance_end()
        self.agree_on_stop()
        if self.max_batches == 0:
            # One epoch without batches does not end the fit; the next may have some.
            self.max_batches, self._lengths = float("inf"), ()

    def agree_on_stop(self) -> None:
        """Stop on all ranks if one wants to; all ranks meet."""
        wants = self.trainer.should_stop and not self.agreed_stop
        self.stop_on(channel_of(self.trainer).beat(notice={"stop": True} if wants else None).notices)

    def stop_on(self, notices: dict[int, dict[str, object]]) -> None:
        """Stop if one of `notices`, which all ranks have got, says so."""
        ranks = [rank for rank, notice in notices.items() if "stop" in notice]
        if not ranks:
            return
        self.agreed_stop = self.trainer.should_stop = True
        if len(ranks) < self.trainer.world_size:
            rank_zero_warn(
                f"`trainer.should_stop` was set on {len(ranks)} of {self.trainer.world_size} ranks only (ranks"
                f" {ranks}), at global step {self.trainer.global_step}. All ranks stop here."
            )

    def stopping_together(self) -> "_StoppingTogether":
        """Show Lightning the flag that all ranks agree on in place of this rank's own."""
        return _StoppingTogether(self)


class _StoppingTogether:
    def __init__(self, loop: JoinFitLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        trainer = self._loop.trainer
        self._own, trainer.should_stop = trainer.should_stop, self._loop.agreed_stop

    def __exit__(self, *_: object) -> None:
        self._loop.trainer.should_stop = self._own


def _length(loader: CombinedLoader, limits: Sequence[int | float]) -> int | float:
    # The modes of a training loader: the shortest part decides, or the longest.
    if not limits:
        return 0
    return min(limits) if loader._mode == "min_size" else max(limits)
