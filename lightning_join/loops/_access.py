"""What the loops need of the strategy they run under."""

from typing import TYPE_CHECKING, cast

from torch_join import Channel, LockstepJoin

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_join._strategy import DDPJoinStrategy


def strategy_of(trainer: "Trainer") -> "DDPJoinStrategy":
    """Return the trainer's strategy."""
    return cast("DDPJoinStrategy", trainer.strategy)


def channel_of(trainer: "Trainer") -> Channel:
    """Return the channel between the ranks."""
    return strategy_of(trainer).channel


def join_of(trainer: "Trainer") -> LockstepJoin:
    """Return the join of the fit that is running."""
    join = strategy_of(trainer).join
    assert join is not None
    return join
