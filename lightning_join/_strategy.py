"""The strategy: `Trainer(strategy="ddp_join")`."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_join import _compat
from lightning_join._collectives import StepCollectives
from lightning_join._joinables import all_joinables, run_post_hooks_alone
from lightning_join._manual import ManualPart
from lightning_join._packages import check_packages
from lightning_join._resume import load_alone
from lightning_join._samplers import mark_injected, without_padding
from lightning_join._step_values import StepValues
from lightning_join._supported import check_module, check_optimizers, check_strategy, check_timeout
from lightning_join._takeover import take_over
from torch_join import PeerFailedError, UnsupportedError, Weighting
from torch_join.integration import (
    Channel,
    LockstepJoin,
    ModelShadow,
    ModuleMetrics,
    StepServer,
    open_channel,
    resolve_weighting,
    telling_failures,
)

_DEFAULT_TIMEOUT = timedelta(minutes=30)

# What there is during a run only. Pickles and copies of a strategy, and of all that leads to it, are without.
_OF_A_RUN = ("channel", "server", "join", "step_values", "metrics", "manual")


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
    # Until a run of several processes begins there is nobody else.
    channel = Channel()
    step_values: StepValues | None = None
    metrics: ModuleMetrics | None = None
    manual: ManualPart | None = None

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

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of batches while others have not: it makes a shadow step."""
        return self.join is not None and self.join.in_tail and self.join.joined

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
        self.server = StepServer(self.channel, weighting=self.weighting)
        self.step_values = self.server.add(partial(StepValues, strategy=self))

    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.server is not None and fitting and self._layer_sync is not None:
            raise UnsupportedError(
                "sync_batchnorm=True cannot train on uneven inputs: SyncBatchNorm issues collectives in forward"
                " and backward that a rank without a batch cannot take part in. Leave it False: the buffers of"
                " plain BatchNorm are kept in step."
            )
        super().setup(trainer)
        if self.server is not None:
            if fitting:
                check_optimizers(self.optimizers)
            assert self.lightning_module is not None
            self.metrics = self.server.add(partial(ModuleMetrics, module=self.lightning_module))

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        ddp = super()._setup_model(model)
        if self.join is not None:
            shadow = ModelShadow(ddp)
            self.join.use(shadow)
            if self.manual is not None:
                self.manual.use(shadow)
        elif self.server is not None:
            shadow = ModelShadow(ddp)
            self.join = LockstepJoin(
                self.server,
                shadow,
                throw_on_early_termination=self.throw_on_early_termination,
                joinables=all_joinables(self),
            )
            self.manual = self.server.add(partial(ManualPart, strategy=self, shadow=shadow))
        elif self.enable_join:
            run_post_hooks_alone(self)
        return ddp

    def wrap_again(self) -> None:
        """Build DDP anew, on all ranks, for the parameters that train now."""
        assert isinstance(self.model, DistributedDataParallel)
        self.model = self.model.module
        self.configure_ddp()
        gc.collect()  # the old one's hooks go with it

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.join is None or self.manual is None:
            return super().training_step(*args, **kwargs)
        with self.join.active_step(), self.manual.training_step():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.manual is None or not self.manual.is_used:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        return self.manual.backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self.manual is None or not self.manual.is_used:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with self.manual.optimizer_step(optimizer, closure, kwargs) as announcing:
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
            load_alone(checkpoint, module.trainer.state.fn == TrainerFn.FITTING)
        return checkpoint

    @contextmanager
    def together(self, last: bool = True) -> Iterator[None]:
        """Put around a run of a loop: failures reach the other ranks, and all ranks leave together.

        Args:
            last: Whether no other loop runs after it before the teardown.
        """
        with telling_failures(self.channel):
            yield
        # Whoever hosts the channel's store must not exit while others still read from it.
        self.barrier("join")
        if last:
            self.channel.close()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        for plain, ours in self._remedies.items():
            exception.args = tuple(arg.replace(plain, ours) if isinstance(arg, str) else arg for arg in exception.args)
        if not isinstance(exception, PeerFailedError):
            self.channel.fail(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.end_joining()

    def end_joining(self) -> None:
        """Remove all that was installed for joining; doing it again does nothing."""
        if self.server is not None:
            self.server.close()
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
