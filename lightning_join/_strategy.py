"""The strategy: `Trainer(strategy="ddp_join")`."""

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

    A rank that runs out of batches stays in the fit loop, in step with the others, and takes part in
    every gradient all-reduce with zero gradients until the last rank is done. So optimizers,
    schedulers, callbacks, validation and checkpoints work as they do on even inputs.

    Args:
        *args: `DDPStrategy`'s positional arguments.
        weighting: How the gradients of the ranks that have a batch are combined. `"world"` (the
            default): their sum over the world size; `"active"`: their mean; `"samples"`: weighted by
            batch size, as one process training on the union of the batches; a function: by what it returns
            for each batch, as the dataloader yields it, such as its number of tokens.
        divide_by_initial_world_size: torch's name for the same: `True` is `"world"`, `False` is
            `"active"`.
        throw_on_early_termination: Whether to end the fit on all ranks, with an
            `EarlyTerminationError`, when the first rank runs out while others have batches.
        enable: `False` makes this a plain `DDPStrategy`.
        joinables: `torch.distributed.algorithms.Joinable`s whose collectives a step issues, besides
            those that the module's `configure_joinables()` returns.
        backward_collectives: Whether backwards may have collectives of their own though no autograd function has one
            in forward; where one has (SyncBatchNorm, `torch.distributed.nn.functional`), this is found out.
        rebalance: Whether ranks that have run out of batches get some of others', so that an epoch has as many steps as
            batches divided by ranks. It is another trajectory than without: fewer steps, of more batches each.
        placeholder: What a rank that has run out of batches runs its `training_step` on, for models that live on
            several ranks: `"last"`, its last batch; `"rows"`, that without samples; or a function that gets it and
            returns what takes its place. The loss counts zero, and nothing of it is logged.
        hand_over_buffers: Whether a rank without a batch takes, after each step, the buffers that nobody broadcasts
            (`broadcast_buffers=False`, ignored ones, FSDP's); `None`: of modules of which all ranks that have trained
            hold the same where the first one runs out.
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
        self._manual = self.driver.add(partial(ManualParticipant, strategy=self, lockstep=self.join, shadow=shadow))
        return ddp

    def wrap_again(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model = self.model.module
        self.configure_ddp()
        gc.collect()  # the old one's hooks go with it

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
        assert isinstance(self.join, LockstepJoin)
        assert self._manual is not None
        with self.precision_plugin.train_step_context():
            return self._manual.shadow_step() if self._manual.is_used else self.join.shadow_forward()

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
        # Not through the DDP wrapper, which broadcasts buffers per batch: ranks differ in those. The
        # buffers have been made the same when the validation began.
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            output: STEP_OUTPUT = self.lightning_module.validation_step(*args, **kwargs)
            return output
