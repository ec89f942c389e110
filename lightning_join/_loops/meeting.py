"""What ranks tell each other between the steps of an epoch."""

import time
from typing import Any

from lightning_join import _compat
from lightning_join._compat import TrainingEpochLoop
from lightning_join._loops.fit import JoinFitLoop
from lightning_join._loops.progress import JoinBatchProgress
from lightning_join._protocol import join_of, strategy_of
from lightning_join._reading import loaders as _loaders
from lightning_join._reading.fetcher import ReadAheadFetcher
from torch_join import UnsupportedError


class MeetingEpochLoop(TrainingEpochLoop):
    """Lightning's training epoch loop, in which all ranks meet once after each step.

    In place of the broadcast with which Lightning begins each step, they learn who comes to the end of its batches, who
    was told to stop or terminate, and what the next step's batches count. Where all have a batch, in the step that ends
    and in the next one, a rank only says its part there, and hears the others' when it has gone through the next
    forward: they have said it by then, and it waits for nobody.
    """

    _is_late = _is_unheard = False  # what ranks have said of the current step
    _asks_to_validate = False  # since another rank does
    _may_leave = False  # a batch's first hook may return -1, which all ranks meet to hear of
    _validation_due = False
    _validates = False

    @property
    def _fit_loop(self) -> JoinFitLoop:
        return self.trainer.fit_loop  # type: ignore[return-value]

    @property
    def _progress(self) -> JoinBatchProgress:
        return self.batch_progress  # type: ignore[return-value]

    def meet(self, data_fetcher: ReadAheadFetcher) -> None:
        """Say all that may end the epoch or the fit, and go on to the next step; hear it of the others now or later."""
        trainer: Any = self.trainer
        join = join_of(trainer)
        self._hear()
        waits = self._needs_all(data_fetcher)
        if not waits:
            join.channel.defer_reads()  # until the next forward
        end = data_fetcher.fill() if join.plan is None else data_fetcher.fill(join.plan.ahead)
        notice: dict[str, Any] = self._fit_loop.requests
        if self._asks_to_validate or (trainer.is_global_zero and self._time_to_validate()):
            notice["validate"] = True  # clocks differ: rank 0's counts
        if data_fetcher.claimed is not None:
            notice["claimed"], notice["end"] = data_fetcher.claimed, data_fetcher.fetched
            data_fetcher.claimed = None  # it is said once
        self._is_late = not join.say(end, self._next_count(data_fetcher), notice or None, waits)
        self._is_unheard = True
        if notice or not self._is_late:
            self._hear()

    def _needs_all(self, data_fetcher: ReadAheadFetcher) -> bool:
        """Whether all ranks do something together before the next step's batch is trained on, or there may be none."""
        may_end = self.batch_progress.is_last_batch or self._is_training_done or self._may_leave
        # Once all have agreed to stop they keep to that, or take it back, together.
        return may_end or self._fit_loop.agreed_stop or self._should_check_val_fx(data_fetcher)

    def _hear(self) -> None:
        """Take what the ranks have said when they came to this step, unless this one has."""
        self._validation_due = False
        if not self._is_unheard:
            return
        self._is_unheard = False
        notices = join_of(self.trainer).hear()
        self._validation_due = "validate" in self._fit_loop.apply_requests(notices, not self._is_late)
        self._asks_to_validate = not self._validation_due and any("validate" in each for each in notices.values())
        for rank, each in notices.items():
            if "claimed" in each:
                _loaders.warn_of_missing(rank, each["claimed"], each["end"])

    def _next_count(self, data_fetcher: ReadAheadFetcher) -> float:
        join = join_of(self.trainer)
        if (count := join.driver.members.count) is None or join.plan is not None:  # which counts what this rank gets
            return 0
        self._check_accumulation()
        return count(data_fetcher.batches[0]) if data_fetcher.batches else 0

    def _check_accumulation(self) -> None:
        """Raise for windows of which each batch would be weighted alone, so that the mean is no mean over all items."""
        if callable(strategy_of(self.trainer).weighting) and self.trainer.accumulate_grad_batches > 1:
            raise UnsupportedError(
                "A weighting by a function, with accumulate_grad_batches > 1: Lightning has the mean of the steps of a"
                " window, and each would be weighted by its own count, not by the window's. Use"
                " accumulate_grad_batches=1, and larger batches; or torch_join.windows around the dataloader, with"
                " manual optimization, where a batch is a whole window."
            )

    def _time_to_validate(self) -> bool:
        trainer: Any = self.trainer
        interval = _compat.validation_interval(trainer)
        if interval is None or not self._should_check_val_epoch():
            return False
        return bool(time.monotonic() - trainer._last_val_time >= interval)

    def _should_accumulate(self) -> bool:
        # Lightning's, in another order: whether the batch is the last one is asked for only where it matters.
        return not self._accumulated_batches_reached() and super()._should_accumulate()

    def _should_check_val_fx(self, data_fetcher: ReadAheadFetcher) -> bool:  # type: ignore[override]
        if self._is_unheard:
            return False  # else the ranks would have heard each other
        trainer: Any = self.trainer
        with self._fit_loop.stopping_together():
            if _compat.validation_interval(trainer) is not None:
                stops = trainer.should_stop and self._fit_loop._can_stop_early
                self._validates = self._should_check_val_epoch() and (stops or self._validation_due)
            else:
                # An interval of 1.0 means the epoch's end, also where that comes before the length said so.
                ends = self.batch_progress.is_last_batch and trainer.val_check_interval == 1.0
                self._validates = super()._should_check_val_fx(data_fetcher) or (
                    ends and self._should_check_val_epoch()
                )
        return self._validates
