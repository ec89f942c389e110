"""One run of `train`, `evaluate` or `predict`: the active ranks of each step, and the operations of all ranks."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accelerate_join import _compat_transformers as _compat
from accelerate_join import _prepared
from accelerate_join._active import ActiveOperations
from accelerate_join._compat import gather
from accelerate_join._loaders import DEALER, dealt_by_processes, shards_checked
from accelerate_join.transformers._evaluation import Evaluation
from accelerate_join.transformers._loader import EvenedLoader
from accelerate_join.transformers._monitor import JoinMonitor
from accelerate_join.transformers._position import Position
from accelerate_join.transformers._stopping import Stopping
from accelerate_join.transformers._window import Window, shown_loss
from torch_join import JoinDataWarning, JoinError, JoinWarning, UnsupportedError
from torch_join.integration import (
    Beginning,
    Dealt,
    Evened,
    Lockstep,
    LockstepJoin,
    ModelShadow,
    PlaceholderLockstep,
    ReadStep,
    StepDriver,
    broadcast,
    check_monitored,
    dealt_again,
    follow_sharded_model,
    is_closed,
    make_placeholder,
    open_channel,
    setting,
    sharded_lockstep_join,
    telling_failures,
    use_device,
)


class StepOperations(ActiveOperations):
    """Accelerate's operations in a trainer: over the active ranks inside a step, and over all ranks between steps."""

    driver: StepDriver

    in_step: Sequence[int] = ()  # the active ranks, in a step in which the others run placeholders

    @property
    def active(self) -> Sequence[int]:
        return self.in_step or self.driver.ranks or range(self.members.world_size)

    def gather(self, data: Any) -> Any:
        if isinstance(data, Tensor) and data.ndim == 0 and len(self.active) == self.members.world_size:
            return gather(data)  # each rank has one
        return super().gather(data)


class Run:
    """The joint work of the ranks from the start of a Trainer loop to its end.

    In each step all ranks know the active ranks, because the loader announces its batches several steps ahead. An
    active rank runs Trainer's own step, which computes the loss inside the wrapper's forward. Joined ranks follow the
    active ranks' collectives before, during and after that forward.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._evaluation: Evaluation | None = None
        self._join: Lockstep | None = None
        self._wrapper: Any = None
        self._model: Any = None  # the model that `compute_loss` gets
        self._follows_evaluation = False
        self._reading: dict[bool, Evened] = {}  # by whether it is training
        self._begins: dict[bool, bool] = {}  # same keys: whether Trainer is about to iterate over the loader
        self._computed = self._backwards = 0  # calls in the current training step
        self._epoch_ends = False  # whether Trainer has reached the end of an epoch
        self._factor: float | None = None  # the factor of the loss, inside a training step
        self._around_step = ExitStack()
        self._monitors = [each for each in trainer.callback_handler.callbacks if isinstance(each, JoinMonitor)]
        self.position = Position(trainer)
        self._source: int | None = None  # a rank that was active in all steps since the last hand-over

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wrap the loop: failures reach the other ranks, and all ranks leave at the same time."""
        trainer = self._trainer
        use_device(trainer.args.device, None)  # before the channel, which may depend on it
        self.channel = open_channel(timeout=timedelta(seconds=trainer.args.ddp_timeout))
        self._window = Window(trainer, self.channel.world_size)
        runs_ahead = trainer.args.device.type != "cpu" and not trainer.args.logging_nan_inf_filter
        self.stopping = Stopping(self.channel, trainer.args.device if runs_ahead else None)
        self.driver = StepDriver(self.channel, trainer.join_options, _rows_of)
        self.driver.framework = "transformers"
        self._operations = self.driver.add(partial(StepOperations, trainer.args.device))
        where = self.driver, trainer.args.device
        self._reading[True] = Evened(*where, self._begin_training, self._finish_training)
        begin_evaluation = partial(self.channel.gather, of=Beginning)
        self._reading[False] = Evened(*where, begin_evaluation, self.hand_over_kept)
        with ExitStack() as stack:
            stack.callback(self.channel.close)
            for monitor in self._monitors:
                watched = self.channel, trainer.log, self.driver.rebalancing, self.driver.options.weighting
                stack.enter_context(setting(monitor, watched=watched))
            stack.callback(self.driver.close)
            stack.enter_context(self._operations.replacing())
            stack.enter_context(shards_checked())
            stack.enter_context(_compat.skipping(_skip))
            for owner, name, method in (
                (trainer, "training_step", self._training_step),
                (trainer, "prediction_step", self._prediction_step),
                (trainer, "compute_loss", self._compute_loss),
                (trainer.accelerator, "backward", self._backward),
                (trainer.accelerator, "pad_across_processes", self._pad),
                (trainer.callback_handler, "on_epoch_begin", self._on_epoch_begin),
                (trainer.callback_handler, "on_substep_end", self._on_substep_end),
                (trainer.callback_handler, "on_epoch_end", self._on_epoch_end),
                (trainer.callback_handler, "on_log", self._on_log),
            ):
                stack.enter_context(setting(owner, **{name: partial(method, getattr(owner, name))}))
            stack.enter_context(setting(trainer, _join_run=self))
            with telling_failures(self.channel):
                yield
                for reading in self._reading.values():
                    reading.leave()
                if isinstance(self._join, (LockstepJoin, PlaceholderLockstep)) and self._join.in_tail:
                    self._join.sync_buffers()  # no later forward brings the buffers to joined ranks
                self.driver.rebalancing.close()
                self.channel.close(meets=True)

    def exchange_lengths(self, loader: EvenedLoader) -> None:
        """Exchange the lengths of all ranks' loaders; all ranks call this."""
        message = loader.length, loader.own_examples, dealt_by_processes(loader.loader), bool(self._monitors)
        answers = self.channel.gather(message, of=tuple[int | None, int | None, Dealt | None, bool])
        loader.lengths, loader.all_examples, datasets, monitored = zip(*answers, strict=True)
        check_monitored(monitored)
        if (text := dealt_again(datasets, DEALER, "Pass own_shards=True")) is not None:
            JoinDataWarning.warn(text)

    # ------------------------------------------------------------ reading

    def go_through(self, loader: EvenedLoader) -> Iterator[Any]:
        """Return this rank's batches, and then batches without rows while other ranks have more."""
        if not self._begins.pop(loader.trains, False):
            return loader.own_batches()  # for a callback, perhaps on one rank, or for Trainer's token count
        batches = self._reading[loader.trains].go_through(loader)
        return self.position.begin(loader.loader, batches) if loader.trains else batches

    def _on_epoch_begin(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        control = own(*args, **kwargs)
        self._begins[True] = True
        self.stopping.begin_epoch()
        return control

    def _on_substep_end(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        control = own(*args, **kwargs)
        self.stopping.hold(control)
        return control

    def _on_epoch_end(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._epoch_ends = True
        if self._join is not None:
            self._join.check_unfrozen("before train()")
            self._join.catch_up()
            if not self._monitors:  # monitors log a line themselves
                self._join.note_end()
        return own(*args, **kwargs)

    def _on_log(self, own: Callable[..., Any], args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> Any:
        """Log; in the tail, joined ranks repeat the log, because rank 0, which writes it, may be one of them."""
        if self._factor is not None and self._join is not None and self._join.in_tail:
            values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in logs.items()}
            if left_out := [name for name, value in values.items() if not is_closed(value)]:
                JoinWarning.warn(
                    f"{', '.join(left_out)} was dropped from the log of a step for which some ranks had no batch: rank"
                    " 0, which writes the log, may have finished, and gets only numbers, strings, lists and tensors."
                )
            self.driver.parting.append({name: value for name, value in values.items() if name not in left_out})
        return own(args, state, control, logs, **kwargs)

    def _repeat_logs(self) -> None:
        """On a joined rank, repeat the logs of the lowest active rank in this step."""
        trainer, reported = self._trainer, self.driver.parting
        self.driver.parting = []
        for logs in reported:
            trainer.state.log_history.append({**logs, "step": trainer.state.global_step})
            trainer.control = trainer.callback_handler.on_log(trainer.args, trainer.state, trainer.control, logs)

    def average_loss(self, loss: Tensor) -> None:
        """Average all ranks' losses since the last log at the end of an epoch; all ranks call this.

        Trainer computes its `train_loss` from each rank's loss in the steps that were not logged.
        """
        epoch_ends, self._epoch_ends = self._epoch_ends, False
        if epoch_ends:
            dist.all_reduce(loss)
            loss /= self.channel.world_size

    def _begin_training(self, beginning: Any) -> Any:
        trainer, join = self._trainer, self._find_join()
        return join.begin(0, None if beginning[0] else 0, 0, beginning, [trainer.optimizer], [trainer.lr_scheduler])

    def _finish_training(self) -> None:
        if self._join is not None:
            self._join.finish()
        self.hand_over_kept()

    def _take(self, trains: bool, inputs: Any) -> ReadStep | None:
        """Return the step of these inputs, which lists the active ranks; `None` if no evened loader yielded them.

        Raises:
            JoinError: The inputs come from a loader that not all ranks iterate over.
        """
        step = self._reading[trains].take(inputs)
        loader = self._trainer.callback_handler.train_dataloader
        if step is None and (isinstance(loader, EvenedLoader) if trains else self._evaluation is not None):
            raise JoinError(
                f"{type(self._trainer).__name__}'s {'training_step' if trains else 'prediction_step'} got a batch"
                " that its dataloader did not yield, or batches in a different order, so it is unclear which ranks"
                " have a batch. Change batches in the collator or in `_prepare_inputs`, not in `get_batch_samples`."
            )
        return step

    # ------------------------------------------------------------ training

    def _find_join(self) -> Lockstep:
        """Return the object that trains the wrapped model; make a new one after the model was wrapped (again)."""
        trainer = self._trainer
        wrapper = trainer.model_wrapped
        if self._join is not None and wrapper is self._wrapper:
            return self._join
        self._wrapper = wrapper
        if self.driver.options.placeholder is not None:
            self._join = PlaceholderLockstep(self.driver, _prepared.unwrap(wrapper))
            self._join.weighting = "world"  # Trainer divides by counts: see `Window.factors`
            return self._join
        if _prepared.is_called_itself(wrapper):
            self._model = None
            self._join = sharded_lockstep_join(self.driver, wrapper)
            self._follows_evaluation = True
            return self._join
        ddp = _prepared.unwrap(wrapper)
        if not isinstance(ddp, DistributedDataParallel):
            raise JoinError(
                f"{type(trainer).__name__} trains a {type(ddp).__name__} that is not wrapped in"
                " DistributedDataParallel, so gradients are never averaged. Pass a model that has trainable parameters"
                " and has not been prepared before."
            )
        self._model = ddp.module
        if wrapper is not ddp:  # it is compiled, and so is the model inside
            plugin = trainer.accelerator.state.dynamo_plugin
            self._model = torch.compile(ddp.module, **plugin.to_kwargs())
        self._join = LockstepJoin(self.driver, ModelShadow(ddp))
        return self._join

    def _training_step(
        self, own: Callable[..., Tensor], model: nn.Module, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Tensor:
        step = self._take(True, inputs)
        if step is None:
            return own(model, inputs, num_items_in_batch, **kwargs)
        self.position.note_step(step)
        join = self._join
        assert join is not None
        join.go_to(step)
        for monitor in self._monitors:
            monitor.note_step(join.joined, join.batch_count)
        averages = self._trainer.args.average_tokens_across_devices
        join.remarks.weighs_items = num_items_in_batch is not None and averages
        factor, shown = self._window.factors(step, num_items_in_batch)
        if isinstance(join, PlaceholderLockstep):
            own = partial(own, model, num_items_in_batch=num_items_in_batch, **kwargs)
            return self._run_step(join, own, inputs, factor, shown)
        with join.around_step():
            if join.joined:
                return self._follow_step(join, model)
            self._computed = self._backwards = 0
            with setting(self, _factor=factor), ExitStack() as self._around_step:
                self._serve(join)
                self._around_step.enter_context(join.before_forward())
                loss = own(model, inputs, num_items_in_batch, **kwargs)
                if join.in_tail and self._trainer.args.logging_nan_inf_filter:
                    self.driver.has_loss = bool(torch.isfinite(loss))  # Trainer makes the same check next
        if (self._computed, self._backwards) != (1, 1):
            raise UnsupportedError(
                f"{type(self._trainer).__name__}.training_step called compute_loss {self._computed} times and"
                f" accelerator.backward {self._backwards} times. Call each of them once, because a finished rank can"
                " follow only one call."
            )
        return shown_loss(loss, shown)

    def _run_step(
        self, join: PlaceholderLockstep, own: Callable[..., Tensor], inputs: Any, factor: float, shown: float
    ) -> Tensor:
        """Run a step with a batch, or on a joined rank with a placeholder; return the loss, which is 0 there."""
        trainer, logs = self._trainer, self.driver.parting
        inputs = join.begin_step(self._kept(True) if join.joined else inputs)
        join.scale = factor
        among = setting(self._operations, in_step=join.active_ranks)
        own_log = setting(trainer, log=lambda *_, **__: None) if join.joined else nullcontext()
        with setting(self, _factor=factor), join.around_step(), among, own_log:
            loss = own(inputs)
        if join.in_tail:
            self._source = leader = join.active_ranks[0]
            message = bool(torch.isfinite(loss)) if trainer.args.logging_nan_inf_filter else True, logs
            self.driver.has_loss, self.driver.parting = self.channel.gather(message, of=tuple[bool, list[Any]])[leader]
            if join.joined:
                self._repeat_logs()
                return self._loss_of_no_batch()
            self.driver.parting = []
        return shown_loss(loss, shown)

    @property
    def joined(self) -> bool:
        """Whether this rank runs a placeholder."""
        return self.channel.rank not in self._operations.active

    def _kept(self, trains: bool) -> Any:
        loader = self._reading[trains].loader
        return None if loader is None else loader.kept

    def _serve(self, join: Lockstep) -> None:
        """Let joined ranks follow this rank's collectives, until `_around_step` is closed."""
        if join.in_tail and not join.runs_placeholders:
            self._source = join.active_ranks[0]
            self._around_step.enter_context(self.driver.step(join.active_ranks))

    def _follow_step(self, join: Lockstep, model: nn.Module) -> Tensor:
        """Follow the active ranks' step on a joined rank; return a loss of 0."""
        trainer = self._trainer
        self._source = join.active_ranks[0]
        model.train()
        if callable(train := getattr(trainer.optimizer, "train", None)):
            train()
        self.driver.follow(join.active_ranks)
        zero = join.shadow_forward()
        join.backward(partial(trainer.accelerator.backward, zero))
        self.driver.follow(join.active_ranks)
        self._repeat_logs()
        return self._loss_of_no_batch()

    def _loss_of_no_batch(self) -> Tensor:
        # If a loss is not finite, Trainer adds an average instead: the mean of all ranks, if all ranks do so.
        return torch.full((), 0.0 if self.driver.has_loss else torch.nan, device=self._trainer.args.device)

    def _compute_loss(self, own: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._factor is None:
            if self._evaluation is not None:
                self._evaluation.note_division(kwargs.get("num_items_in_batch"))
            return own(model, inputs, *args, **kwargs)
        self._computed += 1
        if self._computed > 1 and not (self._join is not None and self._join.runs_placeholders):
            raise UnsupportedError(
                f"{type(self._trainer).__name__}.training_step calls compute_loss twice, but a finished rank can"
                " follow only one call. Sum the losses in a single call."
            )
        self._around_step.close()
        join = self._join
        if isinstance(join, LockstepJoin):
            try:
                return join.run_inside(partial(own, self._model, inputs, *args, **kwargs))
            except AttributeError as error:
                if error.name != "module" or error.obj not in (
                    self._model,
                    getattr(self._model, "_orig_mod", self._model),
                ):
                    raise
                raise UnsupportedError(
                    f"{type(self._trainer).__name__}.compute_loss reads `model.module`, but its model is not wrapped in"
                    " DistributedDataParallel here. Use self.accelerator.unwrap_model(model), which works for both."
                ) from error
        assert join is not None
        with join.active_step():
            return own(model, inputs, *args, **kwargs)

    def _backward(self, own: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        join, factor = self._join, self._factor
        if factor is None or join is None:
            own(loss, *args, **kwargs)
            return
        self._backwards += 1

        def backward() -> None:
            with join.in_engine():
                own(loss if factor == 1.0 or join.runs_placeholders else loss * factor, *args, **kwargs)

        join.backward(backward)
        self._serve(join)

    def begin_window(self, batches: Sequence[Any], num_items: Any) -> Any:
        """Start an optimizer step of these batches, see `Window.begin`; do nothing in an evaluation."""
        if not batches or self._evaluation is not None:  # Trainer calls this there, too
            return num_items
        return self._window.begin(self._reading[True].steps_of(batches), num_items)

    def hand_over_kept(self) -> None:
        """Bring ranks that missed steps up to date, including the attributes in `kept`; all ranks call this."""
        if self._join is not None:
            self._join.catch_up()
        source, self._source = self._source, None
        trainer = self._trainer
        names = [name for name in trainer.kept if hasattr(trainer, name)]
        if source is None or not names:
            return
        values = {name: getattr(trainer, name) for name in names} if self.channel.rank == source else None
        for name, value in broadcast(values, source, trainer.args.device).items():
            if self.channel.rank != source:
                setattr(trainer, name, value)

    # ------------------------------------------------------------ evaluation

    @contextmanager
    def evaluation(self, loader: EvenedLoader) -> Iterator[list[list[int]]]:
        """Wrap an evaluation loop on all ranks. At its end the list holds each rank's number of samples per step."""
        trainer, samples = self._trainer, list[list[int]]()
        self.exchange_lengths(loader)
        self.hand_over_kept()
        if isinstance(self._join, LockstepJoin):
            self._join.sync_buffers()  # the ranks' buffers differ since the last training step
        begin = time.monotonic()
        before, self._evaluation = self._evaluation, Evaluation(self.driver, trainer)
        own = trainer.gather_function
        if self._evaluation.gathers_objects:  # Trainer itself does so in the first evaluation only
            own = partial(trainer.accelerator.gather_for_metrics, use_gather_object=True)
        trainer.gather_function = partial(self._evaluation.gather, own)
        self._begins[False] = True
        try:
            yield samples
            samples += self.channel.gather(self._evaluation.rows, of=list[int])
        finally:
            self._evaluation = before
            for monitor in self._monitors:
                monitor.stopwatch.pause(time.monotonic() - begin)

    def _pad(self, own: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        """Pad as Accelerate does, except for lists with an entry per sample: their lengths differ between ranks."""
        evaluation = self._evaluation
        if evaluation is not None and evaluation.gathers_objects and isinstance(data, list):
            return data
        return self._operations.pad(own, data, *args, **kwargs)

    def _prediction_step(
        self, own: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        step = self._take(False, inputs)
        if step is None or self._evaluation is None:
            return own(model, inputs, *args, **kwargs)  # type: ignore[no-any-return]
        kind = self.driver.options.placeholder
        if kind is None and not self._follows_evaluation and _prepared.is_called_itself(model):
            follow_sharded_model(self.driver, model)
            self._follows_evaluation = True
        if len(step.active_ranks) < self.channel.world_size:
            self._source = step.active_ranks[0]
        if kind is not None and self.channel.rank not in step.active_ranks:
            inputs = make_placeholder(kind, self._kept(False))
        with nullcontext() if kind is None else setting(self._operations, in_step=step.active_ranks):
            return self._evaluation.step(step, own, model, inputs, *args, **kwargs)


def _rows_of(batch: Any) -> int:
    rows = _compat.rows_of(batch)
    if rows is None:
        raise UnsupportedError(
            f"weighting='samples' cannot count the samples in a {type(batch).__name__} without tensors or lists. Add"
            " a tensor with one row per sample, or use another weighting."
        )
    return rows


def _skip(loader: Any, number: int) -> Any:
    skips = loader.without_first if isinstance(loader, EvenedLoader) else partial(_compat.skip_first_batches, loader)
    return skips(number)
