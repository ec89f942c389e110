"""Strategies for Ray Train, which `prepare_trainer` accepts."""

from lightning.pytorch.strategies import DDPStrategy, Strategy
from ray.train.lightning import RayDDPStrategy, RayDeepSpeedStrategy, RayFSDPStrategy

from lightning_join._base_strategy import Joining
from lightning_join._sharded import DeepSpeedJoinStrategy, FSDPJoinStrategy
from lightning_join._strategy import DDPJoinStrategy
from torch_join import JoinTypeError

__all__ = ["RayDDPJoinStrategy", "RayDeepSpeedJoinStrategy", "RayFSDPJoinStrategy"]

if not issubclass(RayDDPStrategy, DDPStrategy):
    raise JoinTypeError(
        f"{__name__} is for `pytorch_lightning`, but Ray Train uses `lightning.pytorch` if it is installed. Import"
        " lightning_join.ray, or uninstall the lightning package."
    )


class RayDDPJoinStrategy(DDPJoinStrategy, RayDDPStrategy):  # type: ignore[misc]
    """`DDPJoinStrategy` under Ray Train.

    ```python
    trainer = Trainer(strategy=RayDDPJoinStrategy(), devices="auto", plugins=[RayLightningEnvironment()])
    trainer = ray.train.lightning.prepare_trainer(trainer)
    ```

    Args:
        *args: The positional and keyword arguments of `DDPJoinStrategy`.
    """


class RayFSDPJoinStrategy(FSDPJoinStrategy, RayFSDPStrategy):  # type: ignore[misc]
    """`FSDPJoinStrategy` under Ray Train, with the same arguments."""


class RayDeepSpeedJoinStrategy(DeepSpeedJoinStrategy, RayDeepSpeedStrategy):  # type: ignore[misc]
    """`DeepSpeedJoinStrategy` under Ray Train, with the same arguments."""


# The joining class of each strategy class of Ray.
JOINING: dict[type[Strategy], type[Joining]] = {
    RayDDPStrategy: RayDDPJoinStrategy,
    RayFSDPStrategy: RayFSDPJoinStrategy,
    RayDeepSpeedStrategy: RayDeepSpeedJoinStrategy,
}
