"""Checks before training starts: for features that do not support uneven inputs, and objects of `pytorch_lightning`.

The classes of that package differ from those of `lightning.pytorch`. Nothing here imports it: the names of their
modules show which objects belong to it.
"""

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_join import _compat
from torch_join import JoinTypeError, UnsupportedError

_OTHER = "pytorch_lightning"
_REMEDY = (
    "Import Trainer, LightningModule, callbacks and the rest from `lightning.pytorch`; or all of them from"
    " `pytorch_lightning`, with `import pytorch_lightning_join` instead of `import lightning_join`."
)


def check_strategy(strategy: DDPStrategy) -> None:
    """Raise if the strategy's arguments request something unsupported."""
    # Imported here, because it imports all of torch.distributed.optim.
    import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as post_local_sgd

    local_sgd = isinstance(strategy._ddp_comm_state, post_local_sgd.PostLocalSGDState)
    if local_sgd or strategy._model_averaging_period is not None:
        raise UnsupportedError(
            "Post-local SGD averages parameters after a number of steps, which each rank counts itself, so the counts"
            " diverge with uneven inputs. Remove `model_averaging_period` and the post-local SGD hook."
        )


def check_module(module: LightningModule) -> None:
    """Raise if the module trains or evaluates in an unsupported way."""
    for hook in ("training_step", "validation_step", "test_step"):
        if not is_overridden(hook, module):  # a hook may be None, so that Lightning skips the validation
            continue
        if is_param_in_hook_signature(getattr(module, hook), "dataloader_iter", explicit=True):
            raise UnsupportedError(
                f"{type(module).__name__}.{hook} takes a `dataloader_iter` and reads its own batches, so the other"
                " ranks cannot tell when this rank finishes. Take `batch` instead."
            )


def check_manual(module: LightningModule, ddp: DistributedDataParallel) -> None:
    """Raise if the first gradients of a module with manual optimization would never be averaged."""
    if ddp.static_graph and not module.automatic_optimization and not _compat.AVERAGES_FIRST_OF_STATIC_GRAPH:
        raise UnsupportedError(
            f"{type(module).__name__} uses manual optimization, where this version of Lightning never averages the"
            " gradients of the first backward under static_graph=True. Use Lightning 2.6, or static_graph=False."
        )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise if an optimizer cannot be stepped by a rank without a batch."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                "LBFGS evaluates its closure a number of times that depends on each rank's own loss, so the ranks would"
                " get out of step. Use an optimizer that evaluates the closure once."
            )
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise UnsupportedError(
                "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps inside DDP's backward. Set"
                " overlap_with_ddp=False."
            )


def check_packages(trainer: "pl.Trainer") -> None:
    """Raise if a callback or the datamodule of `trainer` comes from `pytorch_lightning`.

    Lightning's trainer rejects a module from that package itself, before it has a strategy. But it accepts callbacks by
    the names of their hooks, so Lightning's own `isinstance` checks would miss them.

    Raises:
        JoinTypeError: With the import to use.
    """
    for part in (*trainer.callbacks, trainer.datamodule):  # type: ignore[attr-defined]
        if isinstance(part, (pl.Callback, pl.LightningDataModule)):
            continue
        for base in type(part).__mro__:
            if base.__module__.startswith(f"{_OTHER}."):
                raise JoinTypeError(
                    f"{type(part).__name__} is a {base.__name__} of `{_OTHER}`, but the Trainer and lightning_join"
                    f" are of `lightning.pytorch`, which does not accept classes of the other package. {_REMEDY}"
                )


def check_trainer(trainer: object, callback: pl.Callback) -> None:
    """Raise if one of this package's callbacks runs in a trainer that is not from `lightning.pytorch`.

    Raises:
        JoinTypeError: With the import to use.
    """
    if not isinstance(trainer, pl.Trainer):
        raise JoinTypeError(
            f"lightning_join.{type(callback).__name__}, which is for `lightning.pytorch`, was passed to a Trainer of"
            f" `{type(trainer).__module__.partition('.trainer')[0]}`. {_REMEDY}"
        )
