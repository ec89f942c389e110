"""The strategy: `Trainer(strategy="ddp_join")`."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_join import _compat
from lightning_join._collectives import StepCollectives
from lightning_join._logging.step_values import StepValues
from lightning_join._loops.resuming import load_in_one_process
from lightning_join._loops.takeover import take_over
from lightning_join._packages import check_packages
from lightning_join._reading.samplers import mark_injected, without_padding
from lightning_join._supported import check_module, check_optimizers, check_strategy, check_timeout
from lightning_join._training.joinables import all_joinables, run_post_hooks_in_one_process
from lightning_join._training.manual import ManualPart
from torch_join import PeerFailedError, UnsupportedError, Weighting
from torch_join.integration import LockstepJoin, ModelShadow, ModuleMetrics, StepDriver, open_channel, resolve_weighting

_DEFAULT_TIMEOUT = timedelta(minutes=30)

# What there is during a run only. Pickles and copies of a strategy, and of all that leads to it, are without.
_OF_A_RUN = ("channel", "driver", "join", "metrics", "_step_values", "_manual")


class DDPJoinStrategy(StepCollectives):
    """DDP that trains exactly on uneven dataloaders.

    A rank that runs out of batches stays in the fit loop, in step with the others, and takes part in
    every gradient all-reduce with zero gradients until the last rank is done. So optimizers,
    schedulers, callbacks, validation and checkpoints work as they do on even inputs.

    Args:
        *args: `DDPStrategy`'s positional arguments.
        weighting: How the gradients of the ranks that have a batch are combined. `"world"` (the
            default): their sum over the world size; `"active"`: their mean; `"samples"`: weighted by
            batch size, as one process training on the union of the batches.
        divide_by_initial_world_size: torch's name for the same: `True` is `"world"`, `False` is
            `"active"`.
        throw_on_early_termination: Whether to end the fit on all ranks, with an
            `EarlyTerminationError`, when the first rank runs out while others have batches.
        enable_join: `False` makes this a plain `DDPStrategy`.
        joinables: `torch.distributed.algorithms.Joinable`s whose collectives a step issues, besides
            those that the module's `configure_joinables()` returns.
        **kwargs: `DDPStrategy`'s keyword arguments, which include `DistributedDataParallel`'s.

    Raises:
        JoinValueError: The weighting is unknown, or contradicts `divide_by_initial_world_size`.
        UnsupportedError: The arguments ask for something that cannot train on uneven inputs yet.

    Limits:
        `docs/lightning.md` lists what raises.

    """

    strategy_name = "ddp_join"

    # What Lightning's advice on unused parameters names, and what is to be used here.
    _remedies: ClassVar[dict[str, str]] = {
        "strategy='ddp_find": "strategy='ddp_join_find",
        "strategy=DDPStrategy(": "strategy=DDPJoinStrategy(",
    }
    # Makes it the plain strategy again that a `JoinCallback` has found.
    undo: Callable[[], None] | None = None
    metrics: ModuleMetrics | None = None
    _step_values: StepValues | None = None
    _manual: ManualPart | None = None

    def __init__(
        self,
        *args: Any,
        weighting: Weighting | None = None,
        divide_by_initial_world_size: bool | None = None,
        throw_on_early_termination: bool = False,
        enable_join: bool = True,
        joinables: Sequence[Joinable] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_timeout(self._timeout)
        self.weighting = resolve_weighting(weighting, divide_by_initial_world_size)
        self.throw_on_early_termination = throw_on_early_termination
        self.enable_join = enable_join
        self.joinables = tuple(joinables)
        if enable_join:
            check_strategy(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in _OF_A_RUN}

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.enable_join:
            self.begin_joining()

    def begin_joining(self) -> None:
        """Take over the trainer's loops and open the channel, once the process group is there.

        With one process nothing is taken over: it runs as under plain `ddp`. So it does where no run sets up the
        environment but the user, before there is a model.
        """
        if self.lightning_module is None:
            return
        trainer = self.lightning_module.trainer
        check_packages(trainer)
        if self.world_size == 1:
            return
        check_module(self.lightning_module)
        take_over(trainer, self)
        self.channel = open_channel(timeout=self._timeout or _DEFAULT_TIMEOUT)
        self.driver = StepDriver(self.channel, weighting=self.weighting)
        self._step_values = self.driver.add(partial(StepValues, strategy=self))

    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.driver is not None and fitting and self._layer_sync is not None:
            raise UnsupportedError(
                "sync_batchnorm=True cannot train on uneven inputs: SyncBatchNorm issues collectives in forward"
                " and backward that a rank without a batch cannot take part in. Leave it False: the buffers of"
                " plain BatchNorm are kept in step."
            )
        super().setup(trainer)
        if self.driver is not None:
            if fitting:
                check_optimizers(self.optimizers)
            assert self.lightning_module is not None
            self.metrics = self.driver.add(partial(ModuleMetrics, module=self.lightning_module))

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        ddp = super()._setup_model(model)
        if self.join is not None:
            shadow = ModelShadow(ddp)
            self.join.use(shadow)
            if self._manual is not None:
                self._manual.use(shadow)
        elif self.driver is not None:
            shadow = ModelShadow(ddp)
            self.join = LockstepJoin(
                self.driver,
                shadow,
                throw_on_early_termination=self.throw_on_early_termination,
                joinables=all_joinables(self.joinables, self.lightning_module, self.channel),
            )
            self._manual = self.driver.add(partial(ManualPart, strategy=self, lockstep=self.join, shadow=shadow))
        elif self.enable_join:
            assert self.lightning_module is not None
            joinables = all_joinables(self.joinables, self.lightning_module, self.channel)
            run_post_hooks_in_one_process(self.lightning_module.trainer.callbacks, joinables)  # type: ignore[attr-defined]
        return ddp

    def wrap_again(self) -> None:
        """Build DDP anew, on all ranks, for the parameters that train now."""
        assert isinstance(self.model, DistributedDataParallel)
        self.model = self.model.module
        self.configure_ddp()
        gc.collect()  # the old one's hooks go with it

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.join is None or self._manual is None:
            return super().training_step(*args, **kwargs)
        with self.join.active_step(), self._manual.training_step():
            return super().training_step(*args, **kwargs)

    def shadow_training_step(self) -> Tensor:
        """Do on a joined rank what `training_step` does on the active ones, and return a scalar zero as the loss."""
        assert self.join is not None
        assert self._manual is not None
        return self._manual.shadow_step() if self._manual.is_used else self.join.shadow_forward()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._manual is None or not self._manual.is_used:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        return self._manual.backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._manual is None or not self._manual.is_used:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with self._manual.optimizer_step(optimizer, closure, kwargs) as announcing:
            return super().optimizer_step(optimizer, announcing, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.join is None:
            return super().validation_step(*args, **kwargs)
        # Not through the DDP wrapper, which broadcasts buffers per batch: ranks differ in those. The
        # buffers have been made the same when the validation began.
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            output: STEP_OUTPUT = self.lightning_module.validation_step(*args, **kwargs)
            return output

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        kwargs = super().distributed_sampler_kwargs
        if self.enable_join and (module := self.lightning_module) is not None:
            mark_injected(kwargs, module.trainer.predicting)
        return kwargs

    def process_dataloader(self, dataloader: object) -> object:
        return without_padding(super().process_dataloader(dataloader))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        if self.enable_join and self.world_size == 1 and (module := self.lightning_module) is not None:
            load_in_one_process(checkpoint, module.trainer.state.fn == TrainerFn.FITTING)
        return checkpoint

    def around_update(self, key: str, item: _compat.ResultMetric, value: Any) -> AbstractContextManager[None]:
        """Put around the update of a logged value: joined ranks take part in the reduction of its step value."""
        return nullcontext() if self._step_values is None else self._step_values.around_update(key, item, value)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        # Under a `JoinCallback` the trainer's strategy is a plain `ddp`, and stays one.
        for plain, ours in self._remedies.items() if self.undo is None else ():
            exception.args = tuple(arg.replace(plain, ours) if isinstance(arg, str) else arg for arg in exception.args)
        if not isinstance(exception, PeerFailedError):
            self.channel.fail(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.end_joining()
            # No callback is torn down after an exception. (Without one, the module may not be attached yet.)
            undo, module = self.undo, self.lightning_module
            if undo is not None and module is not None and module.trainer.state.status == TrainerStatus.INTERRUPTED:
                undo()

    def end_joining(self) -> None:
        """Remove all that was installed for joining; doing it again does nothing."""
        if self.driver is not None:
            self.driver.close()
        self.channel.leave()
        for name in _OF_A_RUN:
            vars(self).pop(name, None)

    def __repr__(self) -> str:
        # Part of the error with which the other package's trainer refuses this object.
        return f"<lightning_join.{type(self).__name__}, for the Trainer of `from lightning.pytorch import Trainer`>"

    @classmethod
    def register_strategies(cls, strategy_registry: _compat.StrategyRegistryType) -> None:
        for name, start_method in (
            ("ddp_join", "popen"),
            ("ddp_join_spawn", "spawn"),
            ("ddp_join_fork", "fork"),
            ("ddp_join_notebook", "fork"),
        ):
            description = f"DDP on uneven dataloaders, with `start_method` '{start_method}'"
            strategy_registry.register(name, cls, description=description, start_method=start_method)
            for finds in (False, True):
                strategy_registry.register(
                    f"{name}_find_unused_parameters_{str(finds).lower()}",
                    cls,
                    description=f"{description} and `find_unused_parameters` as {finds}",
                    start_method=start_method,
                    find_unused_parameters=finds,
                )
