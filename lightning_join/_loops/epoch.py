"""The epoch loop: every rank runs every step, a joined rank as a shadow."""

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, cast

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_join import _compat
from lightning_join._compat import TrainingEpochLoop
from lightning_join._logging.results import check_monitored
from lightning_join._logging.step_values import HookLogging, drop_own_step_values
from lightning_join._loops.fit import JoinFitLoop
from lightning_join._loops.progress import JoinBatchProgress
from lightning_join._loops.user_code import (
    STOPPED,
    NoStopIteration,
    after_hook,
    has_optimization_hooks,
    has_transfer_hooks,
)
from lightning_join._reading import loaders as _loaders
from lightning_join._reading.fetcher import ReadAheadFetcher
from lightning_join._strategy_protocol import join_of, metrics_of, rebalancing_of, strategy_of
from lightning_join._training.alike import check_plateaus
from torch_join import JoinDataWarning, JoinError, UnsupportedError
from torch_join.integration import PlaceholderLockstep, setting


def _unchanged(batch: Any, **_: Any) -> Any:
    return batch


class JoinEpochLoop(TrainingEpochLoop):
    """Lightning's training epoch loop for ranks that may have different numbers of batches.

    All ranks meet once after each step, in place of Lightning's broadcast at the start of each step. There they learn
    which ranks reach the end of their batches, which were asked to stop or terminate, and the counts of the next
    step's batches. If all ranks have a batch in the step that ends and in the next one, a rank only sends its message.
    It reads the other messages after the next forward. They have been sent by then, so it does not wait.
    """

    # This rank's last batch in the fit and its `training_step`'s output: hooks get these in a step without a batch.
    _kept: tuple[Any, dict[str, Any] | None] = None, None
    _had_batch = False  # in this fit; or it has received another rank's
    _has_joined = False  # in this epoch
    _lacks_values = False  # some rank runs hooks before it has logged anything, as it has had no batch
    _has_transfer_hooks = False  # user code runs for each batch before its step
    _has_optimization_hooks = False  # user code runs between a step's forward and its end
    _made_step = True
    _transfers = False  # the step's batch is transferred next
    _steps_alike = 0  # the number of steps in which all ranks' batches have the same size
    _is_late = _is_unread = False  # whether the ranks' messages about the current step are late, and unread
    _asks_to_validate = False  # because another rank does
    _may_leave = False  # `on_train_batch_start` may return -1, for which all ranks meet
    _validation_due = False
    _validates = False

    @property
    def _fit_loop(self) -> JoinFitLoop:
        return self.trainer.fit_loop  # type: ignore[return-value]

    def begin_fit(self) -> None:
        """Start a fit in which this rank has not had a batch yet."""
        self._kept, self._had_batch, self._transfers = (None, None), False, False

    @property
    def done(self) -> bool:
        with self._fit_loop.stopping_together():
            return bool(TrainingEpochLoop.done.fget(self))  # type: ignore[attr-defined]

    def reset(self) -> None:
        if self._fit_loop.restarted_on_epoch_start and self.restarting:
            # A checkpoint of `on_train_epoch_start`: Lightning mistakes the previous, ended epoch for this one.
            self._begin_progress()
        ended = self.restarted_on_train_batch_end and self.batch_progress.is_last_batch
        fit_loop, steps = self._fit_loop, self._fit_loop.max_batches
        if rebalancing_of(self.trainer) is not None or fit_loop.is_planned or fit_loop.is_resized:
            # Only the plan, which is yet to be made, knows whether steps are left.
            fit_loop.max_batches = max(steps, self.batch_progress.current.ready + 1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*your dataloader is not resumable")  # our warning says which, and why
            super().reset()
        fit_loop.max_batches = steps
        if ended and self.batch_progress.current.ready > 0:
            # A checkpoint of an epoch's last step; Lightning sees that only where the length is known.
            self._begin_progress()

    def _begin_progress(self) -> None:
        self.batch_progress.reset_on_run()
        self.scheduler_progress.reset_on_run()
        self.automatic_optimization.optim_progress.reset_on_run()
        self.val_loop.batch_progress.total.reset()

    def on_run_start(self, data_fetcher: ReadAheadFetcher) -> None:  # type: ignore[override]
        super().on_run_start(data_fetcher)
        trainer: Any = self.trainer
        self._fit_loop.start_reading(data_fetcher)
        end = data_fetcher.fill()
        requests = self._fit_loop.requests
        self._has_joined = False
        message = (data_fetcher.reported, self._had_batch, data_fetcher.claimed, end, requests)
        data_fetcher.claimed = None
        self._has_transfer_hooks = has_transfer_hooks(trainer)
        self._has_optimization_hooks = has_optimization_hooks(trainer)
        self._may_leave = is_overridden("on_train_batch_start", trainer.lightning_module)
        join = join_of(trainer)
        # Each batch is counted once, on the rank that trains on it.
        count = self._next_count(data_fetcher) if rebalancing_of(trainer) is None else 0
        others = [each.scheduler for each in trainer.lr_scheduler_configs]
        answers = join.begin(self.batch_progress.current.ready, end, count, message, trainer.optimizers, others)
        self._validation_due = self._asks_to_validate = self._is_unread = False
        loaders = [each for each, *_ in answers]
        _loaders.check(loaders)
        self._steps_alike = _loaders.steps_alike(loaders, range(len(loaders[0].limits)))
        self._fit_loop.set_lengths(loaders)
        self._fit_loop.apply_requests({rank: its_requests for rank, (*_, its_requests) in enumerate(answers)})
        for rank, (_, _, claimed, its_end, *_) in enumerate(answers):
            if claimed is not None:
                _loaders.warn_of_missing(rank, claimed, its_end)
        self._rebalance(data_fetcher)
        lack_batch = {rank for rank, (_, had_batch, *_) in enumerate(answers) if not had_batch}
        self._lacks_values = bool(lack_batch.difference(join.active_ranks))

    def _rebalance(self, data_fetcher: ReadAheadFetcher) -> None:
        """Start to rebalance the epoch, if batches are rebalanced; all ranks meet."""
        join, (most, was_unknown, was_even) = join_of(self.trainer), self._fit_loop.take_plan()
        if rebalancing_of(self.trainer) is None:
            return
        count = join.driver.members.count
        if not was_even:
            # Batches read ahead show more than the checkpoint knew, but the steps must be those that were planned.
            length, options = None if was_unknown else data_fetcher.remaining, {"max_sent_per_step": most}
            options |= {"leaves": data_fetcher.left, "is_certain": data_fetcher.is_certain}
            join.rebalance(data_fetcher, length, **options)
        if join.plan is None:
            if count is not None:
                join.count_first(self._next_count(data_fetcher))
            return
        self._check_accumulation()
        data_fetcher.give()
        if join.plan.step == 0:
            self._fit_loop.check_estimate(join.plan.steps)
        self._fit_loop.set_steps(join.plan.steps)

    # ------------------------------------------------------------ the parts of a step, in the order of their calls

    def advance(self, data_fetcher: ReadAheadFetcher) -> None:  # type: ignore[override]
        self._made_step = False
        data_fetcher.next_step = self._begin_step
        with ExitStack() as strategy_of(self.trainer).around_step:  # not an attribute of this object, which is pickled
            try:
                super().advance(data_fetcher)
            except StopIteration as error:
                if join_of(self.trainer).active_ranks:  # else it ends the epoch on all ranks
                    raise JoinError(STOPPED) from error
                raise

    def _broadcast_sigterm_tensor(self) -> None:
        pass  # signals are exchanged at the meetings

    def _begin_step(self, data_fetcher: ReadAheadFetcher) -> Any:
        """Return the step's batch as it was read, or a substitute on a joined rank."""
        trainer: Any = self.trainer
        join, strategy = join_of(trainer), strategy_of(trainer)
        if not join.active_ranks:
            raise StopIteration
        self._made_step = True
        strategy.gathers_alike = join.plan is None and self.batch_idx + 1 < self._steps_alike
        self._transfers = True
        data_fetcher.begin_step()
        if join.joined:
            if not self._has_joined:
                self._has_joined = True
                drop_own_step_values(self._results)
            if self._has_transfer_hooks:
                if not join.runs_placeholders:
                    join.driver.follow(join.active_ranks)
                skip = setting(trainer.lightning_module, _on_before_batch_transfer=_unchanged)
                strategy.around_step.enter_context(skip)
                strategy.around_step.enter_context(setting(trainer.precision_plugin, convert_input=_unchanged))
            return self._kept[0]
        self._kept, self._had_batch, self._has_joined = (None, None), True, False  # only one batch is in memory
        if self._has_transfer_hooks and not join.runs_placeholders:
            # A separate step: these hooks run only on ranks with a batch, and may issue collectives.
            strategy.around_step.enter_context(join.driver.step(join.active_ranks))
            strategy.around_step.enter_context(join.before_forward())
        return data_fetcher.take() if join.plan is None else join.plan.take()

    def transfer(self, move: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a batch on the device, in place of the strategy's own method; prepare for a step's first hooks."""
        if not self._transfers:  # in an evaluation
            return move(*args, **kwargs)
        self._transfers = False
        join, strategy = join_of(self.trainer), strategy_of(self.trainer)
        batch = self._kept[0] if join.joined else move(*args, **kwargs)
        if batch is None and not join.joined:
            raise UnsupportedError(
                f"Moving batch {self.batch_idx + 1} to the device returned None, usually because a hook such as"
                " on_after_batch_transfer returns nothing. Lightning would skip this step on this rank alone. Return"
                " the batch."
            )
        if self._has_transfer_hooks:
            strategy.around_step.close()
        if self._lacks_values:
            batch = self._share_first_batch(batch)
        if isinstance(join, PlaceholderLockstep):
            batch = join.begin_step(batch)
        cast(JoinBatchProgress, self.batch_progress).ask(join)
        if join.in_tail or self._may_leave:
            self._enter_hooks("on_train_batch_start", partial(self._leave_on_skip, batch) if self._may_leave else None)
        return batch

    def around_optimization(self) -> AbstractContextManager[object]:
        """Wrap the step's optimization, whose hooks may log."""
        logging = self._has_optimization_hooks and join_of(self.trainer).in_tail
        return HookLogging(self._results, strategy_of(self.trainer)) if logging else nullcontext()

    def end_step(self, output: Any, kwargs: OrderedDict[str, Any]) -> Any:
        """Return the output that the last hooks of the step get, and prepare for them."""
        trainer: Any = self.trainer
        join, fetcher = join_of(trainer), self._fit_loop.fetcher
        if join.joined:
            output = output if join.runs_placeholders else self._kept[1] or output
        elif not (fetcher.has_more if join.plan is None else join.plan.has_batch(1)):
            self._kept = next(iter(kwargs.values())), output
        self.batch_progress.is_last_batch = join.is_last_step  # for checkpoints from here on
        if self._lacks_values:
            self._lacks_values = False
            check_monitored(trainer, join.channel)
        requeues = self._requeues and not self._validates_next()  # else the next job would leave out the validation
        if join.in_tail or requeues:
            self._enter_hooks("on_train_batch_end", self._fit_loop.requeue if requeues else None)
        return output

    @property
    def _requeues(self) -> bool:
        """Whether all ranks will save for the next job, and no accumulation, which would be lost, has started."""
        return self._fit_loop.requeues and not self._should_accumulate()

    def _validates_next(self) -> bool:
        """Whether a validation follows right after this step, as far as is known; intervals in seconds are ignored."""
        if _compat.validation_interval(cast(Any, self.trainer)) is not None:
            return False
        with self._fit_loop.stopping_together():
            return bool(super()._should_check_val_fx(self._fit_loop.fetcher))

    def _enter_hooks(self, last: str, act: Callable[[Any], Any] | None = None) -> None:
        """Enter contexts around the batch hooks, which end with the module's `last` hook; then call `act`.

        The hooks of a step without a batch change neither logged values nor metrics.
        """
        join, metrics, strategy = join_of(self.trainer), metrics_of(self.trainer), strategy_of(self.trainer)

        def leave(response: Any) -> Any:
            strategy.around_step.close()
            return response if act is None else act(response)

        if join.in_tail:
            metrics.renew()
            strategy.around_step.enter_context(HookLogging(self._results, strategy))
            if join.joined:
                strategy.around_step.enter_context(metrics.aside())
        strategy.around_step.enter_context(after_hook(self.trainer.lightning_module, last, leave))

    def _leave_on_skip(self, batch: Any, response: Any) -> int | None:
        """Make ranks whose `on_train_batch_start` returned -1 join here; all ranks meet. Return -1 if all ranks did."""
        join, fetcher = join_of(self.trainer), self._fit_loop.fetcher
        leaves = response == -1 and not join.joined
        ranks = join.skip(leaves)
        if ranks and join.plan is not None:
            self._fit_loop.set_steps(join.plan.steps)  # fewer ranks may need more steps
        if leaves:
            fetcher.drop()
            self._kept = batch, None
        if ranks and join.active_ranks:
            lost = join.plan.lost if join.plan is not None else 0
            rank_zero_only(JoinDataWarning.warn)(
                f"`on_train_batch_start` returned -1 at batch {self.batch_idx} only on ranks {ranks}, which skip the"
                f" rest of the epoch; ranks {list(join.active_ranks)} continue."
                + (f" {lost} batches that other ranks had sent to them are dropped in this epoch." if lost else "")
                + " Return -1 on all ranks, unless this is intended."
            )
        cast(JoinBatchProgress, self.batch_progress).ask(join)
        return None if join.active_ranks else -1

    @NoStopIteration()
    def on_advance_end(self, data_fetcher: ReadAheadFetcher) -> None:  # type: ignore[override]
        strategy_of(self.trainer).gathers_alike = False
        if self._made_step:  # and not resumed from a checkpoint just to validate
            self.meet(data_fetcher)
        self._validates = False
        module, act = self.trainer.lightning_module, self._fit_loop.requeue
        with after_hook(module, "on_validation_end", act) if self._requeues else nullcontext():
            super().on_advance_end(data_fetcher)
        trainer: Any = self.trainer
        if self._validates:
            self._fit_loop.agree_on_stop()  # EarlyStopping may have decided in the validation
            if trainer.received_sigterm and not self._is_training_done:
                raise SIGTERMException

    # ------------------------------------------------------------ meetings

    def meet(self, data_fetcher: ReadAheadFetcher) -> None:
        """Send everything that may end the epoch or the fit, go to the next step. Read messages now or later."""
        trainer: Any = self.trainer
        join = join_of(trainer)
        self._read_notices()
        waits = self._needs_all(data_fetcher)
        if not waits:
            join.channel.defer_reads()  # until the next forward
        end = data_fetcher.fill() if join.plan is None else data_fetcher.fill(join.plan.ahead)
        notice: dict[str, Any] = self._fit_loop.requests
        if self._asks_to_validate or (trainer.is_global_zero and self._time_to_validate()):
            notice["validate"] = True  # clocks differ, so rank 0's decides
        if data_fetcher.claimed is not None:
            notice["claimed"], notice["end"] = data_fetcher.claimed, data_fetcher.fetched
            data_fetcher.claimed = None  # it is sent once
        self._is_late = not join.arrive(end, self._next_count(data_fetcher), notice or None, waits)
        self._is_unread = True
        if notice or not self._is_late:
            self._read_notices()

    def _needs_all(self, data_fetcher: ReadAheadFetcher) -> bool:
        """Whether all ranks must communicate before they train on the next batch, or there may be no next step."""
        may_end = self.batch_progress.is_last_batch or self._is_training_done or self._may_leave
        # Once all ranks have agreed to stop, they keep or revoke that decision together.
        return may_end or self._fit_loop.agreed_stop or self._should_check_val_fx(data_fetcher)

    def _read_notices(self) -> None:
        """Read the messages that the ranks sent when they came to this step, unless that was done."""
        self._validation_due = False
        if not self._is_unread:
            return
        self._is_unread = False
        notices = join_of(self.trainer).meet()
        self._validation_due = "validate" in self._fit_loop.apply_requests(notices, not self._is_late)
        self._asks_to_validate = not self._validation_due and any("validate" in each for each in notices.values())
        for rank, each in notices.items():
            if "claimed" in each:
                _loaders.warn_of_missing(rank, each["claimed"], each["end"])

    def _next_count(self, data_fetcher: ReadAheadFetcher) -> float:
        join = join_of(self.trainer)
        if (count := join.driver.members.count) is None or join.plan is not None:  # the plan counts this rank's batches
            return 0
        self._check_accumulation()
        return data_fetcher.count(count) if data_fetcher.read(0) else 0

    def _check_accumulation(self) -> None:
        """Raise for windows in which each batch would be weighted alone, so that the mean is not over all items."""
        if callable(strategy_of(self.trainer).options.weighting) and self.trainer.accumulate_grad_batches > 1:
            raise UnsupportedError(
                "A weighting function cannot be used with accumulate_grad_batches > 1: it would weight each batch by"
                " its own count, not by the window's count. Use accumulate_grad_batches=1 and larger batches, or"
                " torch_join.windows around the dataloader and manual optimization, with a whole window as one batch."
            )

    def _time_to_validate(self) -> bool:
        trainer: Any = self.trainer
        interval = _compat.validation_interval(trainer)
        if interval is None or not self._should_check_val_epoch():
            return False
        return bool(time.monotonic() - trainer._last_val_time >= interval)

    def _should_accumulate(self) -> bool:
        # Whether the batch is the last one is determined only where it matters.
        window_ends = self.batch_progress.current.ready % self.trainer.accumulate_grad_batches == 0
        return not window_ends and super()._should_accumulate()

    def _should_check_val_fx(self, data_fetcher: ReadAheadFetcher) -> bool:  # type: ignore[override]
        if self._is_unread:
            return False  # else the ranks would have read each other's messages
        trainer: Any = self.trainer
        with self._fit_loop.stopping_together():
            if _compat.validation_interval(trainer) is not None:
                stops = trainer.should_stop and self._fit_loop._can_stop_early
                self._validates = self._should_check_val_epoch() and (stops or self._validation_due)
            else:
                # An interval of 1.0 means the epoch's end, also if the epoch is shorter than its length said.
                at_end = self.batch_progress.is_last_batch and trainer.val_check_interval == 1.0
                self._validates = super()._should_check_val_fx(data_fetcher) or (
                    at_end and self._should_check_val_epoch()
                )
        return self._validates

    # ------------------------------------------------------------ batches

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        trainer: Any = self.trainer
        if not trainer.lr_scheduler_configs:
            return
        join = join_of(trainer)
        if interval == "step" and not (update_plateau_schedulers or join.active_ranks):
            return  # all ranks left at this batch: nothing was trained, so only the epoch advances
        super().update_lr_schedulers(interval, update_plateau_schedulers)
        if update_plateau_schedulers and not (interval == "step" and self._should_accumulate()):
            index = self.batch_idx if interval == "step" else trainer.current_epoch
            check_plateaus(trainer, interval, index)

    def _share_first_batch(self, batch: Any) -> Any:
        """Send a batch to each rank that has never had one, for the hooks of its shadow steps; all ranks meet.

        The batch is sent as it is after its transfer, whose hooks run only on the rank that read it.
        """
        strategy = strategy_of(self.trainer)
        source = join_of(self.trainer).active_ranks[0]
        own_batch = move_data_to_device(batch, "cpu") if self.trainer.global_rank == source else None
        shared = strategy.broadcast(own_batch, source)
        if not self._had_batch:
            self._kept, self._had_batch = (batch := move_data_to_device(shared, strategy.root_device), None), True
        return batch
