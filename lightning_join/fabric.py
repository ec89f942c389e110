"""Lightning Fabric on uneven dataloaders, exactly: `Fabric(strategy="ddp_join")`.

Each loop over a dataloader from `fabric.setup_dataloaders` is a `torch_join.Join` context around everything that Fabric
has set up. At its end, the loop serves the ranks that have more batches. Nothing else changes in the script.
"""

from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.optim import Optimizer

from torch_join import UnsupportedError
from torch_join.integration import is_sharded_model
from torch_join.integration import naming_missing as _naming_missing

with _naming_missing("2.5.1 to 2.6.6", "lightning.fabric"):
    from lightning_join._collectives import ActiveCollectives
    from lightning_join._fabric.joins import Joins
    from lightning_join._fabric.methods import ask_strategies as _ask_strategies
    from lightning_join._fabric.methods import pass_on_zero_grad as _pass_on_zero_grad

__all__ = ["DDPJoinStrategy", "DeepSpeedJoinStrategy", "FSDPJoinStrategy", "ModelParallelJoinStrategy"]


class DDPJoinStrategy(Joins, ActiveCollectives, DDPStrategy):
    """DDP for Fabric that trains exactly on uneven dataloaders.

    ```python
    fabric = Fabric(strategy="ddp_join", devices=8)  # or strategy=DDPJoinStrategy(weighting="samples")
    ```

    Args:
        *args: The positional arguments of `DDPStrategy`.
        **kwargs: The options of `Join` (`weighting`, `rebalance`, `monitor`, ...), `joinables`, and the keyword
            arguments of `DDPStrategy`. Its `timeout` also limits how long a rank waits for another rank in a loop.

    Raises:
        JoinValueError: The weighting is unknown, or contradicts `divide_by_initial_world_size`.

    Limits:
        `docs/fabric.md` lists the unsupported cases, which raise.
    """


class FSDPJoinStrategy(Joins, ActiveCollectives, FSDPStrategy):
    """FSDP for Fabric that trains exactly on uneven dataloaders.

    Args:
        *args: The positional arguments of `FSDPStrategy`.
        **kwargs: The options of `DDPJoinStrategy`, and the keyword arguments of `FSDPStrategy`.

    Raises:
        JoinValueError: See `DDPJoinStrategy`.
    """


def _as_it_is(model: nn.Module, _: Any) -> nn.Module:
    return model


class ModelParallelJoinStrategy(Joins, ActiveCollectives, ModelParallelStrategy):
    """Model parallelism for Fabric (`fully_shard`, also with tensor parallelism), exact on uneven dataloaders.

    All ranks of a tensor-parallel group must have the same batches.

    Args:
        parallelize_fn: As in `ModelParallelStrategy`. Without it, shard models before you set them up.
        *args: The other positional arguments of `ModelParallelStrategy`.
        **kwargs: The options of `DDPJoinStrategy`, and the keyword arguments of `ModelParallelStrategy`.

    Raises:
        JoinValueError: See `DDPJoinStrategy`.
    """

    def __init__(self, parallelize_fn: Callable[..., Any] = _as_it_is, *args: Any, **kwargs: Any) -> None:
        super().__init__(parallelize_fn, *args, **kwargs)

    def setup_module(self, module: nn.Module) -> Any:
        """Set up a model.

        Raises:
            UnsupportedError: No part of the model is sharded.
        """
        found = super().setup_module(module)
        if not is_sharded_model(found):
            raise UnsupportedError(
                f"{type(module).__name__} has no sharded module, so {type(self).__name__} would never average its"
                " gradients. Call `fully_shard` in parallelize_fn, or before the setup (over the data-parallel"
                " dimension of fabric.strategy.device_mesh), or use strategy='ddp_join'."
            )
        return found


class DeepSpeedJoinStrategy(Joins, ActiveCollectives, DeepSpeedStrategy):
    """DeepSpeed for Fabric (ZeRO stages 0 to 3) that trains exactly on uneven dataloaders.

    Args:
        *args: The positional arguments of `DeepSpeedStrategy`.
        **kwargs: The options of `DDPJoinStrategy`, and the keyword arguments of `DeepSpeedStrategy`.

    Raises:
        JoinValueError: See `DDPJoinStrategy`.

    Limits:
        `docs/deepspeed.md` lists the unsupported cases, which raise.
    """

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any) -> Any:
        """Set up a model and its optimizer."""
        _pass_on_zero_grad()
        found = super().setup_module_and_optimizers(module, optimizers, *scheduler)
        for one in (found[0], *found[1]):
            self.note_set_up(one)
        return found


_ask_strategies()
