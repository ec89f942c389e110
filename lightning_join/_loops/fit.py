"""The fit loop: it exchanges all ranks' lengths before each epoch, and stops on all ranks together."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_join import _compat
from lightning_join._compat import FitLoop
from lightning_join._logging.results import JoinResultCollection, check_monitored
from lightning_join._loops.resuming import (
    KEY,
    as_state,
    check_limit,
    is_dealt_anew,
    of_lightning,
    record_in,
    warn_of_other_ranks,
    why_unknown,
)
from lightning_join._loops.user_code import NoStopIteration, after_hook
from lightning_join._reading import loaders as _loaders
from lightning_join._reading.combined import states_in
from lightning_join._reading.fetcher import ReadAheadFetcher
from lightning_join._strategy_protocol import join_of, metrics_of, rebalancing_of, strategy_of
from lightning_join._training.alike import take_unfrozen_parameters
from lightning_join._training.tuning import is_finding_learning_rate
from torch_join import JoinDataWarning, JoinError, JoinValueError, JoinWarning, UnsupportedError
from torch_join.integration import VERSION, LoaderPlace, Resuming, name_ranks, setting, steps_of

REQUESTS = ("stop", "sigterm", "requeue", "validate")


class JoinFitLoop(FitLoop):
    """Lightning's fit loop for ranks that may have different numbers of batches."""

    # `trainer.should_stop` as all ranks know it. A flag set on one rank alone must not end that rank's
    # loop while the other ranks continue.
    agreed_stop = False
    requeues = False  # all ranks know that SLURM will start the job again
    is_planned = False  # whether some rank may have another number of batches than announced
    _lengths: Sequence[int | float] = ()
    _has_warned = False
    _steps: int | float = -1  # derived from the lengths, or from a plan
    _record: dict[str, Any] | None = None  # of the checkpoint, until its epoch starts
    _resumed: dict[str, Any] | None = None  # the record of a resumed epoch, until it is rebalanced
    _last_place: LoaderPlace | None = None  # this rank's position when the fit ended

    def run(self) -> None:
        strategy, epoch_loop = cast(Any, self.trainer.strategy), cast(Any, self.epoch_loop)
        # Set on the object, outside of any change that a strategy derived from ours makes to a batch.
        transfer = setting(strategy, batch_to_device=partial(epoch_loop.transfer, strategy.batch_to_device))
        with strategy.around_run(last=not is_finding_learning_rate(self.trainer)), transfer:
            self.agreed_stop = self.requeues = False
            cast(Any, self.trainer)._signal_connector.begin_fit()
            epoch_loop.begin_fit()
            self.agree_on_stop()  # `on_fit_start` may have set `should_stop`
            super().run()
            if self._record is None:  # else no epoch has started
                self._last_place = self._place()  # for checkpoints that are saved after the fit
            if (rebalancing := rebalancing_of(self.trainer)) is not None:
                rebalancing.close()

    @property
    def done(self) -> bool:
        with self.stopping_together():
            return bool(FitLoop.done.fget(self))  # type: ignore[attr-defined]

    def setup_data(self) -> None:
        before, trainer = self._data_fetcher, self.trainer
        # Each rank's state goes to its own dataloaders, when the epoch starts.
        with _loaders.evened(self, self._check_interval), setting(self, _combined_loader_states_to_load=[]):
            super().setup_data()
        loader = self._combined_loader
        if loader is None or self._data_fetcher is before:
            return
        self._last_train_dl_reload_epoch = trainer.current_epoch  # also if all are empty
        self._data_fetcher = fetcher = ReadAheadFetcher(Resuming(trainer.global_rank, trainer.world_size))
        fetcher.rebalances = rebalancing_of(trainer) is not None
        fetcher.setup(loader)
        self._lengths = ()
        all_loaders = self._exchange_lengths()
        _loaders.check(all_loaders)
        _loaders.warn(all_loaders)
        iter(fetcher)

    @property
    def fetcher(self) -> ReadAheadFetcher:
        """The fetcher that reads this rank's dataloaders."""
        assert isinstance(self._data_fetcher, ReadAheadFetcher)
        return self._data_fetcher

    def measure(self, loaders: Sequence[Any]) -> _loaders.Loaders:
        """Measure this rank's dataloaders."""
        return _loaders.measure(RunningStage.TRAINING, loaders, self.trainer.limit_train_batches)

    def _exchange_lengths(self) -> Sequence[_loaders.Loaders]:
        """Exchange the ranks' numbers of batches, and use those of the longest rank; all ranks meet.

        They hold until the dataloaders are iterated: a loader that plans its batches anew knows its number only then.
        """
        self.fetcher.limit = self.trainer.limit_train_batches
        all_loaders = strategy_of(self.trainer).channel.gather(self.fetcher.measure(), of=_loaders.Loaders)
        self.is_planned = any(any(each.planned) for each in all_loaders)
        self.set_lengths(all_loaders)
        return all_loaders

    def set_lengths(self, all_loaders: Sequence[_loaders.Loaders]) -> None:
        """Set the number of steps, and numbers derived from it, by the longest rank, or by all ranks if rebalanced."""
        assert self._combined_loader is not None
        lengths = [_loaders.total_length(self._combined_loader, each.limits) for each in all_loaders]
        steps = max(lengths)
        if rebalancing_of(self.trainer) is not None and steps != float("inf"):
            steps = steps_of([int(length) for length in lengths])
        if self._lengths != lengths:
            self._lengths, self._steps = lengths, -1
        self.set_steps(steps)

    def check_estimate(self, steps: int | None) -> None:
        """Warn, once, if a plan needs more steps than the trainer has announced."""
        if steps is None or steps <= self.max_batches or self._has_warned:
            return
        self._has_warned = True
        rank_zero_only(JoinWarning.warn)(
            f"With rebalance=True the epoch has {steps} steps, not trainer.estimated_stepping_batches"
            f" ({self.max_batches}), because a rank's batches are too large to send, or cannot be sent. A schedule"
            f" for the smaller number would end too early, so create it for {steps} steps."
        )

    def set_steps(self, steps: int | float | None) -> None:
        """Set the number of steps by a plan, which knows how many batches ranks may send and where they resume."""
        steps = float("inf") if steps is None else steps
        if self._steps == steps:
            return  # StochasticWeightAveraging may have changed `max_batches` since
        self._steps = self.max_batches = steps
        self._set_interval(self._lengths)

    def _set_interval(self, lengths: Sequence[int | float]) -> None:
        trainer: Any = self.trainer
        if _compat.validation_interval(trainer) is not None:
            trainer.val_check_batch = None
            return
        interval = trainer.val_check_interval
        if isinstance(interval, int):
            trainer.val_check_batch = interval
        elif self.max_batches != float("inf"):
            trainer.val_check_batch = max(1, int(self.max_batches * interval))
        elif interval == 1.0:
            trainer.val_check_batch = float("inf")
        else:
            unsized = [rank for rank, length in enumerate(lengths) if length == float("inf")]
            raise _loaders.DataloaderError(
                f"The train dataloaders of {name_ranks(unsized)} have no length, so `Trainer(val_check_interval)` must"
                " be time based, `1.0` or an int. An int k specifies checking validation every k training batches."
            )

    def _check_interval(self, all_loaders: Sequence[_loaders.Loaders]) -> None:
        # Checked as in later epochs, and before Lightning does: it does not report which rank's dataloaders have no
        # length, and ignores rebalancing, and that a combined loader may be shorter than its longest parts.
        self.set_lengths(all_loaders)
        trainer: Any = self.trainer
        interval = trainer.val_check_batch or 0  # none if it is in seconds
        validates = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0
        if validates and 0 < self.max_batches < interval:
            raise JoinValueError(
                f"`val_check_interval` ({interval}) must be less than or equal to the number of the training batches"
                f" ({self.max_batches}). Set `limit_val_batches` to 0.0 to disable validation, or"
                " `check_val_every_n_epoch=None` to validate based on the total training batches."
            )

    def on_run_start(self) -> None:
        super().on_run_start()
        self.agree_on_stop()

    @NoStopIteration()
    def on_advance_start(self) -> None:
        self.setup_data()
        assert self._combined_loader is not None
        for part in self._combined_loader.flattened:
            _compat.set_sampler_epoch(part, self.epoch_progress.current.processed)  # type: ignore[attr-defined]
        self._exchange_lengths()  # they may change with the epoch
        super().on_advance_start()
        take_unfrozen_parameters(strategy_of(self.trainer))
        metrics_of(self.trainer).renew()  # hooks may have made metrics

    @NoStopIteration()
    def advance(self) -> None:
        super().advance()

    @NoStopIteration()
    def on_advance_end(self) -> None:
        trainer: Any = self.trainer
        join = join_of(trainer)
        join.check_unfrozen("at an epoch's start (on_train_epoch_start, as BackboneFinetuning does) or end")
        strategy_of(trainer).gathers_alike = False
        join.finish()
        if not trainer.strategy.monitored:  # by a callback, which logs a line itself
            join.note_end()
        join.catch_up()
        metrics_of(trainer).renew()
        results = cast(JoinResultCollection, self.epoch_loop._results)
        results.reduce_all()

        def compare(_: Any) -> None:
            results.reduce_all()  # hooks may have logged on some ranks only
            check_monitored(trainer, join.channel)

        with after_hook(trainer.lightning_module, "on_train_epoch_end", compare):  # before the callbacks that monitor
            super().on_advance_end()
        self.fetcher.is_over = True
        self.agree_on_stop()
        if self.max_batches == 0:
            # One epoch without batches does not end the fit; the next may have some.
            self.max_batches, self._lengths = float("inf"), ()
        if trainer.received_sigterm:
            raise SIGTERMException

    @property
    def requests(self) -> dict[str, bool]:
        """This rank's requests to all ranks: to stop, or to terminate."""
        trainer: Any = self.trainer
        signals = trainer._signal_connector
        requests = {"stop": trainer.should_stop, "sigterm": signals.signalled}
        requests["requeue"] = signals.requeue_asked and not signals.requeued
        return {name: True for name, wanted in requests.items() if wanted}

    def agree_on_stop(self) -> None:
        """Stop, terminate, or requeue the job on all ranks if one of them requests it; all ranks meet."""
        self.apply_requests(strategy_of(self.trainer).channel.barrier(notice=self.requests or None).notices)

    def requeue(self, response: Any = None) -> Any:
        """Save a checkpoint and let SLURM start the job again; all ranks call this. Return the `response`."""
        self.requeues = False
        cast(Any, self.trainer)._signal_connector.requeue()
        return response

    def apply_requests(self, notices: Mapping[int, Mapping[str, object]], at_once: bool = True) -> set[str]:
        """Fulfil the requests in the `notices`, which are equal on all ranks.

        Args:
            notices: The requests, by rank.
            at_once: Whether all ranks read them at the same place. If not, only requests of all ranks are fulfilled,
                since all have waited for these. Ranks that read any other request repeat it after the next step.

        Returns:
            The requests that are fulfilled.
        """
        if not notices:
            self.agreed_stop = False
            return set()
        trainer: Any = self.trainer
        asking = {name: [rank for rank, notice in notices.items() if name in notice] for name in REQUESTS}
        enough = 1 if at_once else trainer.world_size
        agreed = {name for name, ranks in asking.items() if len(ranks) >= enough}
        if asking["sigterm"]:
            trainer._signal_connector.signalled = True
            trainer._signal_connector.agreed = "sigterm" in agreed
        if asking["requeue"]:
            trainer._signal_connector.requeue_asked = True
            self.requeues = self.requeues or "requeue" in agreed
        ranks = asking["stop"]
        agreed_before, self.agreed_stop = self.agreed_stop, "stop" in agreed
        if ranks:
            trainer.should_stop = True
        if ranks and not agreed_before and len(ranks) < trainer.world_size:
            rank_zero_only(JoinWarning.warn)(
                f"`trainer.should_stop` was set on only {len(ranks)} of {trainer.world_size} ranks"
                f" ({name_ranks(ranks)}), at or just before global step {trainer.global_step}. All ranks stop"
                " together, after the next step at the latest. Set it on all ranks, based on a shared value."
            )
        return agreed

    def stopping_together(self) -> AbstractContextManager[None]:
        """Show Lightning the flag on which all ranks agree instead of this rank's flag."""
        is_own = self.trainer.should_stop == self.agreed_stop
        return nullcontext() if is_own else setting(self.trainer, should_stop=self.agreed_stop)

    # ------------------------------------------------------------ every rank's position, in checkpoints
    #
    # Lightning saves the state of rank 0's dataloaders, after the batches read ahead, and loads it on every rank.
    # Here the file holds each rank's state, after the batches that were trained on, as in a plain loop.

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Collect every rank's position on rank 0; all ranks meet.

        Raises:
            UnsupportedError: It is called inside a step in the tail, in which some ranks cannot take part.
        """
        trainer: Any = self.trainer
        if (ranks := strategy_of(self.trainer).find_step_ranks()) is not None:
            raise UnsupportedError(
                f"A checkpoint was saved inside a step for which only {name_ranks(ranks)} of {trainer.world_size}"
                " ranks have a batch, but saving needs every rank. Save it from a module or callback hook, such as"
                " `on_train_batch_end`."
            )
        if (join := strategy_of(trainer).join) is not None:
            join.catch_up()  # in place: Lightning has taken references to the module's state for saving
        if self.epoch_loop._should_accumulate():
            rank_zero_only(JoinDataWarning.warn)(
                f"A checkpoint was saved at step {self.epoch_loop.batch_progress.current.ready - 1} of an epoch,"
                " within an accumulation window. Lightning's checkpoints hold no gradients, so a resumed run loses"
                " the window's batches. Save after the optimizer's step."
            )
        state: dict[str, Any] = super(FitLoop, self).on_save_checkpoint()  # this replaces Lightning's own
        progress: Any = self.epoch_loop.batch_progress
        record = self._record or {
            "step": progress.current.processed,
            "over": progress.current.ready == progress.current.processed and progress.is_last_batch,
            **self._plan_now(progress.current.processed),
        }
        places = self._gather(self._place()) if self._record is None else self._record["places"]
        if any(place is not None for place in places):
            state[KEY] = {**record, "version": VERSION, "places": places}
        fetcher, states = self._data_fetcher, states_in(places[0] or {})
        if states and isinstance(fetcher, ReadAheadFetcher):
            stateful = [part for part in fetcher.combined_loader.flattened if hasattr(part, "load_state_dict")]
            if len(states) == len(stateful):
                state["combined_loader"] = states  # which Lightning's own strategies read
        return state

    def _plan_now(self, step: int) -> dict[str, Any]:
        join = strategy_of(self.trainer).join
        plan = join.plan if join is not None else None
        if plan is None:
            return {"even": rebalancing_of(self.trainer) is not None}
        return {"max_sent_per_step": plan.max_sent_per_step, "unknown": plan.unknown_at(step)}

    def take_plan(self) -> tuple[int | None, bool, bool]:
        """Return this rank's report on the resumed epoch, and forget it.

        Returns:
            The number of batches that it may send in a step, if reported; whether it could not report how many it had
            left; whether all ranks had the same number. If so, the epoch is not rebalanced, even if that proves wrong.
        """
        record, self._resumed = self._resumed or {}, None
        most, rank = record.get("max_sent_per_step"), self.trainer.global_rank
        was_even = not record.get("over", True) and record.get("even", False)
        return None if most is None else most[rank], rank in record.get("unknown", ()), was_even

    def _place(self) -> LoaderPlace | None:
        fetcher = self._data_fetcher
        if not isinstance(fetcher, ReadAheadFetcher):
            return self._last_place
        progress: Any = self.epoch_loop.batch_progress.current
        in_step = progress.ready > progress.processed and not strategy_of(self.trainer).joined
        return fetcher.place(repeats=in_step)

    def _gather(self, place: LoaderPlace | None) -> list[LoaderPlace | None]:
        trainer = self.trainer
        # Not over the channel, which is closed after the fit. Each state is sent only to the rank that writes it.
        places: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
        dist.gather_object(place, places)
        return places or [place if rank == trainer.global_rank else None for rank in range(trainer.world_size)]

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._record = record_in(state_dict)

    @property
    def is_resized(self) -> bool:
        """Whether a different number of ranks has run some steps of the epoch that is about to be resumed."""
        return self._record is not None and is_dealt_anew(self._record, self.trainer.world_size)

    def start_reading(self, fetcher: ReadAheadFetcher) -> None:
        """Make the epoch's iterator, which starts at a checkpoint's position in the first epoch after it.

        Raises:
            JoinValueError: On all ranks, if other ranks have written the checkpoint, and the epoch's rest is unknown.
            UnsupportedError: The epoch was started in another way than it is resumed.
            JoinError: The epoch has become shorter than its trained part.
        """
        trainer, record, self._record = self.trainer, self._record, None
        states, self._combined_loader_states_to_load = self._combined_loader_states_to_load, []
        ready = self.epoch_loop.batch_progress.current.ready
        is_resized = record is not None and len(record["places"]) != trainer.world_size
        if record is not None:
            self._go_on(record, fetcher.keeper, resumes=ready > 0)
        elif states and ready > 0:
            fetcher.resuming.load(of_lightning(states, fetcher.keeper, ready, trainer.world_size))
        restarted = fetcher.combined_loader.flattened
        if fetcher.resuming.place is not None:
            restarted = getattr(fetcher.keeper, "stateless", [])
        if ready > 0 and restarted:
            names = ", ".join(sorted({type(part).__name__ for part in restarted}))
            rank_zero_only(JoinDataWarning.warn)(
                "You're resuming from a checkpoint written in the middle of an epoch, but the position of train"
                f" dataloaders is unknown ({names}: {why_unknown(record)}). These dataloaders restart, so some"
                " samples are trained on twice in that epoch. Resume from a checkpoint written at the end of an"
                " epoch, or use dataloaders with `state_dict` and `load_state_dict`."
            )
        try:
            fetcher.start()
        except StopIteration as error:  # it would end the fit on this rank alone
            raise JoinError(
                "A train dataloader ended before the position at which the checkpoint was written. Make it yield the"
                " same batches again in the resumed epoch."
            ) from error
        if is_resized and record is not None and record["over"] and ready > 0:
            fetcher.end_here()

    def _go_on(self, record: dict[str, Any], keeper: Any, resumes: bool) -> None:
        """Resume the starting epoch at the position in a record."""
        trainer: Any = self.trainer
        is_over, is_other = record["over"] or not resumes, len(record["places"]) != trainer.world_size
        most = record.get("max_sent_per_step") if resumes else None
        if most is not None and not record["over"] and rebalancing_of(trainer) is None:
            raise UnsupportedError(
                "The checkpoint was written in the middle of an epoch with rebalanced batches, so the number of steps"
                " does not show which batches each rank has used. Resume with rebalance=True, or from a checkpoint"
                " written at the end of an epoch."
            )
        if is_other and (is_over or not record["step"]):
            warn_of_other_ranks(record, trainer.world_size)
        elif is_other:
            check_limit(trainer.limit_train_batches)
        elif resumes:
            self._resumed = record
            if is_dealt_anew(record, trainer.world_size):
                check_limit(trainer.limit_train_batches)
        if record["step"] or not is_other:
            self.fetcher.resuming.load(
                as_state(record, keeper, over=record["step"] > 0 and (is_over if is_other else not resumes))
            )
