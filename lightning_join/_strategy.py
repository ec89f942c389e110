"""The strategy: `Trainer(strategy="ddp_join")`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from lightning_join import _compat
from lightning_join._samplers import InjectedRank, without_padding
from lightning_join._supported import check_module, check_optimizers, check_strategy
from lightning_join._takeover import take_over
from torch_join import (
    Channel,
    LockstepJoin,
    ModelShadow,
    PeerFailedError,
    UnsupportedError,
    name_ranks,
    open_channel,
    resolve_weighting,
    telling_failures,
)

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class DDPJoinStrategy(DDPStrategy):
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
        joinables: `torch.distributed.algorithms.Joinable`s whose collectives `training_step` issues,
            each exactly once per step.
        **kwargs: `DDPStrategy`'s keyword arguments, which include `DistributedDataParallel`'s.

    Raises:
        JoinValueError: The weighting is unknown, or contradicts `divide_by_initial_world_size`.
        UnsupportedError: The arguments ask for something that cannot train on uneven inputs yet.

    Limits:
        Automatic optimization only, and no collectives of the user's own in `training_step` while
        some rank has joined (`docs/lightning.md` lists what raises).

    """

    strategy_name = "ddp_join"

    def __init__(
        self,
        *args: Any,
        weighting: str | None = None,
        divide_by_initial_world_size: bool | None = None,
        throw_on_early_termination: bool = False,
        enable_join: bool = True,
        joinables: Sequence[Joinable] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.weighting = resolve_weighting(weighting, divide_by_initial_world_size)
        self.throw_on_early_termination = throw_on_early_termination
        self.enable_join = enable_join
        self.joinables = tuple(joinables)
        if enable_join:
            check_strategy(self)
        self.channel = Channel()
        self.join: LockstepJoin | None = None
        # What runs now whose collectives not all ranks may take part in, and whether they all do.
        self._running = ""
        self.evaluates_unevenly = False
        self._warned_of_collectives = False

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of batches while others have not: it makes a shadow step."""
        return self.join is not None and self.join.in_tail and self.join.joined

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.enable_join:
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            check_module(self.lightning_module, trainer.state.fn, self.world_size)
            take_over(trainer, self)
            self.channel = open_channel(timeout=self._timeout or _DEFAULT_TIMEOUT)

    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.enable_join and fitting and self.world_size > 1 and self._layer_sync is not None:
            raise UnsupportedError(
                "sync_batchnorm=True cannot train on uneven inputs: SyncBatchNorm issues collectives in forward"
                " and backward that a rank without a batch cannot take part in. Leave it False: the buffers of"
                " plain BatchNorm are kept in step."
            )
        super().setup(trainer)
        if self.enable_join and fitting:
            check_optimizers(self.optimizers, self.world_size)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        ddp = super()._setup_model(model)
        if self.enable_join:
            self.join = LockstepJoin(
                self.channel,
                ModelShadow(ddp),
                weighting=self.weighting,
                throw_on_early_termination=self.throw_on_early_termination,
                joinables=self.joinables,
            )
        return ddp

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._inside("training_step"):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._inside("validation_step"):
            if self.join is None:
                return super().validation_step(*args, **kwargs)
            # Not through the DDP wrapper, which broadcasts buffers per batch: ranks differ in those. The
            # buffers have been made the same when the validation began.
            assert self.lightning_module is not None
            with self.precision_plugin.val_step_context():
                output: STEP_OUTPUT = self.lightning_module.validation_step(*args, **kwargs)
                return output

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._inside("test_step"):
            return super().test_step(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks, as `DDPStrategy.reduce`, but with an exact mean of integers.

        Lightning truncates it: batch sizes 10 and 25 have the mean 17 there. Here it is a float64.
        """
        self._check_collective("reduce (self.log(..., sync_dist=True) calls it)")
        averages = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        truncates = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        if self.enable_join and averages and truncates:
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._check_collective("barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._check_collective("broadcast")
        return super().broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        self._check_collective("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        kwargs = super().distributed_sampler_kwargs
        if self.enable_join:
            kwargs["rank"] = InjectedRank(kwargs["rank"])
        return kwargs

    def process_dataloader(self, dataloader: object) -> object:
        return without_padding(super().process_dataloader(dataloader))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Put around a run of a loop: failures reach the other ranks, and all ranks leave together."""
        with telling_failures(self.channel):
            yield
        # Whoever hosts the channel's store must not exit while others still read from it.
        self.barrier("join")
        self.channel.close()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if not isinstance(exception, PeerFailedError):
            self.channel.fail(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        super().teardown()
        self.join = None

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
            strategy_registry.register(
                f"{name}_find_unused_parameters_true",
                cls,
                description=f"{description} and `find_unused_parameters` as True",
                start_method=start_method,
                find_unused_parameters=True,
            )

    @contextmanager
    def _inside(self, step: str) -> Iterator[None]:
        self._running = step
        try:
            yield
        finally:
            self._running = ""

    def _check_collective(self, operation: str) -> None:
        if not self._running or not self.enable_join or self.world_size == 1:
            return
        if self._running != "training_step":
            if self.evaluates_unevenly:
                raise UnsupportedError(
                    f"`{self._running}` called {operation}, and the ranks have different numbers of batches, or do not"
                    " know theirs: those that are done cannot take part. Log with on_step=False, or do it in a hook of"
                    " the epoch's end."
                )
            return
        if self.join is not None and self.join.in_tail:
            raise UnsupportedError(
                f"`training_step` called {operation} at step {self.join.step}, where only"
                f" {name_ranks(self.join.active_ranks)} have a batch. The ranks that have joined cannot take part in"
                " collectives of the step yet. Log with on_step=False, on_epoch=True."
            )
        if not self._warned_of_collectives:
            self._warned_of_collectives = True
            rank_zero_warn(
                f"`training_step` calls {operation}. That works as long as every rank has a batch, and raises when the"
                " first one runs out. Log with on_step=False, on_epoch=True."
            )
