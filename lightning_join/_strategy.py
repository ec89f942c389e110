"""The DDP strategy: `Trainer(strategy="ddp_join")`."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_join import _compat
from lightning_join._base_strategy import Joining
from lightning_join._checks import check_manual, check_strategy
from lightning_join._collectives import ActiveCollectives
from lightning_join._loops.optimization import NOTHING
from lightning_join._training.manual import ManualParticipant
from torch_join.integration import LockstepJoin, ModelShadow, PlaceholderLockstep


class DDPJoinStrategy(Joining, ActiveCollectives, DDPStrategy):
    """DDP that trains exactly on uneven dataloaders.

    A rank that runs out of batches stays in the fit loop and contributes zero gradients to every all-reduce until the
    last rank has finished. Optimizers, schedulers, callbacks, validation and checkpoints work as on even inputs.

    Args:
        *args: The positional arguments of `DDPStrategy`.
        weighting: How to combine the gradients of the active ranks. `"world"` (the default) divides their sum by the
            world size; `"active"` takes their mean; `"samples"` weights them by batch size, like one process that
            trains on the union of the batches. A function takes a batch from the dataloader and returns its weight,
            such as its number of tokens.
        divide_by_initial_world_size: torch's name for the weighting: `True` means `"world"`, `False` means `"active"`.
        throw_on_early_termination: Whether to raise an `EarlyTerminationError` on all ranks as soon as one rank runs
            out of batches before the others.
        enable: `False` makes this a plain `DDPStrategy`.
        joinables: Custom `torch.distributed.algorithms.Joinable`s whose collectives run in a step, in addition to the
            return value of the module's `configure_joinables()`.
        backward_collectives: Whether a backward may run collectives although no autograd function ran one in the
            forward. Collectives of such functions (SyncBatchNorm, `torch.distributed.nn.functional`) are detected.
        rebalance: Whether finished ranks receive batches from other ranks, so that an epoch takes (number of batches /
            number of ranks) steps. This changes the training trajectory: there are fewer steps, each with more batches.
        placeholder: The batch on which a finished rank runs `training_step`, for models that span several ranks:
            `"last"`, the rank's last batch; `"rows"`, that batch without samples; or a function that takes that batch
            and returns the placeholder. The loss has zero weight, and the step logs nothing.
        hand_over_buffers: Whether a finished rank receives, after each step, the buffers that are not broadcast
            (`broadcast_buffers=False`, ignored buffers, FSDP buffers). `None`: only in modules whose buffers were equal
            on all ranks that had trained when the first rank finished.
        own_shards: Whether each rank's dataloaders read only that rank's data, which Lightning must then not shard
            again. Same as `Trainer(use_distributed_sampler=False)`.
        **kwargs: The keyword arguments of `DDPStrategy`, including those of `DistributedDataParallel`.

    Raises:
        JoinValueError: The weighting is unknown, or contradicts `divide_by_initial_world_size`.
        UnsupportedError: The arguments request a feature that does not support uneven inputs.

    Limits:
        `docs/lightning.md` lists the unsupported cases, which raise.
    """

    strategy_name = "ddp_join"

    # Names in Lightning's advice on unused parameters, and the names to use instead.
    _remedies: ClassVar[dict[str, str]] = {
        "strategy='ddp_find": "strategy='ddp_join_find",
        "strategy=DDPStrategy(": "strategy=DDPJoinStrategy(",
    }
    join: LockstepJoin | PlaceholderLockstep | None = None
    _manual: ManualParticipant | None = None

    def check_arguments(self) -> None:
        check_strategy(self)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self.join is None and self.driver is None:
            if self.options.enable:
                self.take_joinables()
            return super()._setup_model(model)
        ddp = DistributedDataParallel(model, **_compat.ddp_arguments(self))
        if self.options.placeholder is not None:
            assert self.driver is not None
            if isinstance(self.join, PlaceholderLockstep):
                self.join.use(ddp)
            else:
                self.join = PlaceholderLockstep(self.driver, ddp, self.take_joinables())
            return ddp
        shadow = ModelShadow(ddp)
        if isinstance(self.join, LockstepJoin):
            self.join.use(shadow)
            if self._manual is not None:
                self._manual.use(shadow)
            return ddp
        assert self.driver is not None
        assert self.lightning_module is not None
        check_manual(self.lightning_module, ddp)
        self.join = LockstepJoin(self.driver, shadow, self.take_joinables())
        self._manual = self.driver.add(partial(ManualParticipant, strategy=self, shadow=shadow))
        return ddp

    def wrap_again(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model = self.model.module
        self.configure_ddp()
        gc.collect()  # frees the old wrapper and its hooks

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if isinstance(self.join, PlaceholderLockstep):
            return self.run_step(super().training_step, *args, **kwargs)  # type: ignore[no-any-return]
        if self.join is None or self._manual is None:
            return super().training_step(*args, **kwargs)
        with self.join.active_step(), self._manual.training_step():
            output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        return NOTHING if output is None and self.lightning_module.automatic_optimization else output  # type: ignore[return-value]

    def shadow_training_step(self) -> Tensor:
        if self._manual is None or not self._manual.is_used:
            return super().shadow_training_step()
        with self.precision_plugin.train_step_context():
            return self._manual.shadow_step()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._manual is not None and self._manual.is_used:
            return self._manual.backward(closure_loss, *args, **kwargs)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._manual is None or not self._manual.is_used:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with self._manual.optimizer_step(optimizer, closure, kwargs) as announcing:
            return super().optimizer_step(optimizer, announcing, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.join is None:
            return super().validation_step(*args, **kwargs)
        # Does not call the DDP wrapper, which broadcasts buffers in each batch, because ranks have different numbers of
        # batches. The buffers were made equal at the start of the validation.
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            output: STEP_OUTPUT = self.lightning_module.validation_step(*args, **kwargs)
            return output
