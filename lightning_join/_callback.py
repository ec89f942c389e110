"""`JoinCallback`: makes a trainer's plain `ddp`, `fsdp` or model-parallel strategy a joining one."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch.distributed.algorithms.join import Joinable

from lightning_join import _compat
from lightning_join._base_strategy import Joining
from lightning_join._checks import check_trainer
from lightning_join._loops.takeover import give_back
from lightning_join._sharded import DeepSpeedJoinStrategy, FSDPJoinStrategy, ModelParallelJoinStrategy
from lightning_join._strategy import DDPJoinStrategy
from torch_join import JoinTypeError, JoinValueError, Weighting
from torch_join.integration import Options, Placeholder

# The joining class of each plain strategy class.
JOINING: dict[type[Strategy], type[Joining]] = {
    DDPStrategy: DDPJoinStrategy,
    FSDPStrategy: FSDPJoinStrategy,
    ModelParallelStrategy: ModelParallelJoinStrategy,
    DeepSpeedStrategy: DeepSpeedJoinStrategy,
}


class JoinCallback(Callback):
    """Callback that makes a trainer's plain strategy train exactly on uneven dataloaders.

    `Trainer(strategy="ddp", callbacks=[JoinCallback()])` is equivalent to `Trainer(strategy="ddp_join")`.
    It supports `ddp`, `ddp_spawn`, `ddp_fork` and `ddp_notebook`, each also with `_find_unused_parameters_true` or
    `_false`, `DDPStrategy(...)`, `fsdp`, `fsdp_cpu_offload`, `FSDPStrategy(...)`, `ModelParallelStrategy(...)`, and Ray
    Train's three strategies. When a run ends, even by an exception, the callback restores the strategy and the loops.

    Args:
        weighting: As in `DDPJoinStrategy`, like all other arguments.

    Raises:
        JoinValueError: The weighting is unknown, or contradicts `divide_by_initial_world_size`. At the start of a run:
            the trainer has two `JoinCallback`s, or the dataloaders are already set up.
        JoinTypeError: At the start of a run: the strategy is unsupported, or the trainer is of the other package.
        UnsupportedError: At the start of a run: the strategy's arguments request a feature that does not support uneven
            inputs.

    Limits:
        With one device and Lightning's single-device strategy, the callback does nothing:
        `trainer.strategy.joined` is always `False`.
    """

    def __init__(
        self,
        *,
        weighting: Weighting | None = Options.weighting,
        divide_by_initial_world_size: bool | None = None,
        throw_on_early_termination: bool = False,
        joinables: Sequence[Joinable] = (),
        backward_collectives: bool = False,
        rebalance: bool = False,
        placeholder: Placeholder | None = None,
        hand_over_buffers: bool | None = None,
        own_shards: bool = False,
    ) -> None:
        given = {"joinables": tuple(joinables), "own_shards": own_shards}
        self._given = {**given, "options": Options.of(locals())}

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        check_trainer(trainer, self)
        strategy = trainer.strategy
        if isinstance(strategy, SingleDeviceStrategy):
            cast(Any, strategy).joined = False
            return
        _check_upgradable(trainer)
        _upgrade(trainer, strategy, self._given)

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if isinstance(trainer.strategy, Joining) and trainer.strategy.undo is not None:
            trainer.strategy.undo()


def _joining_of(strategy: Strategy) -> type[Joining] | None:
    if type(strategy).__module__.startswith("ray.train.lightning"):
        from lightning_join import ray  # Ray may not be installed

        return ray.JOINING.get(type(strategy))
    return JOINING.get(type(strategy))


def _check_upgradable(trainer: "pl.Trainer") -> None:
    strategy = trainer.strategy
    name = type(strategy).__name__
    if isinstance(strategy, Joining) and strategy.undo is not None:
        raise JoinValueError("The trainer has two JoinCallbacks, whose options may differ. Remove one.")
    if isinstance(strategy, Joining):
        raise JoinTypeError(
            f"JoinCallback is for a plain strategy, but the trainer's strategy is already a {name}. Remove the"
            f" callback and pass its arguments to {name}."
        )
    if _joining_of(strategy) is None:
        plain = ", ".join(each.__name__ for each in JOINING)
        raise JoinTypeError(
            f"JoinCallback is for a plain strategy ({plain}), but the trainer's strategy is a {name}, which"
            " synchronizes in its own way. Use Trainer(strategy='ddp') with the callback, or 'ddp_join' without it."
            " For a custom strategy, subclass lightning_join.DDPJoinStrategy."
        )
    if _compat.has_dataloaders(trainer):
        raise JoinValueError(
            "The dataloaders were set up before JoinCallback, usually because LightningDataModule.setup or an earlier"
            " callback reads trainer.estimated_stepping_batches. Put JoinCallback first in the list of callbacks, read"
            " that value in LightningModule.setup or later, or use Trainer(strategy='ddp_join')."
        )


def _upgrade(trainer: Any, strategy: Any, given: dict[str, Any]) -> None:
    """Make a plain strategy a joining one with these attributes, until its `undo` is called."""
    callbacks, shards = list(trainer.callbacks), _compat.connector(trainer).use_distributed_sampler
    on_exception = [each for each in callbacks if _compat.saves_on_exception(each)]
    undo = partial(_undo, trainer, type(strategy), on_exception, callbacks, shards)
    vars(strategy).update(given, undo=undo)
    strategy.__class__ = _joining_of(strategy)
    strategy.check_arguments()
    strategy.keep_own_shards()
    strategy.begin_joining()


# A function of the module, because the trainer may be pickled before it is called.
def _undo(trainer: Any, plain: type[Strategy], on_exception: list[Any], callbacks: list[Any], shards: bool) -> None:
    strategy = trainer.strategy
    strategy.end_joining()
    _compat.connector(trainer).use_distributed_sampler = shards
    give_back(trainer)
    strategy.__class__ = plain
    for name in ("joinables", "own_shards", "options", "undo"):
        vars(strategy).pop(name, None)
    for callback in on_exception:
        callback.save_on_exception = True
    trainer.callbacks = callbacks + [each for each in trainer.callbacks if each not in callbacks]
