"""The prediction loop on uneven dataloaders, empty ones among them."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_join._compat import PredictionLoop, no_grad_context
from lightning_join._loops.evaluation_rounds import Rounds
from lightning_join._loops.user_code import KnownToProfilers, NoStopIteration
from lightning_join._reading import loaders as _loaders
from lightning_join._reading.fetcher import read_as_planned
from lightning_join._strategy_protocol import channel_of, strategy_of
from torch_join.integration import setting


class JoinPredictionLoop(KnownToProfilers, PredictionLoop):
    """Lightning's prediction loop where ranks may have different numbers of batches, or none."""

    reads = "[_PredictionLoop].predict_next"
    _everyone: Sequence[_loaders.Loaders] = ()

    @property
    def skip(self) -> bool:
        return sum(limit for each in self._everyone for limit in each.limits) == 0

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
        fetcher, loader = self._data_fetcher, self._combined_loader
        assert fetcher is not None
        assert loader is not None
        rounds = Rounds(strategy_of(self.trainer), loader, self._everyone, self._measure)
        while True:
            try:
                batch, batch_idx, dataloader_idx = next(fetcher)
                while rounds.index < dataloader_idx:
                    rounds.finish()
                self.batch_progress.is_last_batch = fetcher.done  # type: ignore[attr-defined]
                with rounds.step(), NoStopIteration():
                    self._predict_step(batch, batch_idx, dataloader_idx, None)
            except StopIteration:
                break
            finally:
                self._restarting = False
        while rounds.index < self.num_dataloaders:
            rounds.finish()
        return self.on_run_end()

    def setup_data(self) -> None:
        # Lightning's, but for: no decision and no error from one rank's numbers alone.
        trainer: Any = self.trainer
        limit = trainer.limit_predict_batches
        if limit == 0:
            return
        self._combined_loader, mine = _loaders.load(trainer, self._data_source, RunningStage.PREDICTING, limit)
        self._everyone = _loaders.exchange(channel_of(trainer), mine)
        _loaders.warn(self._combined_loader.flattened, self._everyone)
        self.max_batches = list(mine.limits)

    def _measure(self, places: Sequence[int]) -> _loaders.Loaders:
        assert self._combined_loader is not None
        parts = [self._combined_loader.flattened[i] for i in places]
        mine = _loaders.measure(RunningStage.PREDICTING, parts, self.trainer.limit_predict_batches)
        for place, limit in zip(places, mine.limits, strict=True):
            self.max_batches[place] = limit
        return mine

    def reset(self) -> None:
        mine = self._everyone[self.trainer.global_rank]
        with setting(self, max_batches=_loaders.limits_before(mine, self.trainer.limit_predict_batches)):
            super().reset()
        if any(mine.planned):
            read_as_planned(self._data_fetcher)
