"""Learning rates: the same on all ranks, also where they follow from what was logged."""

from collections.abc import Sequence
from typing import Any

from torch_join import UnsupportedError
from torch_join.integration import Channel

Rates = list[list[float]]  # by optimizer and group


def learning_rates(trainer: Any) -> Rates:
    """Return this rank's."""
    return [[float(group["lr"]) for group in each.param_groups if "lr" in group] for each in trainer.optimizers]


def check_plateaus(trainer: Any, channel: Channel, interval: str, index: int) -> None:
    """Compare the learning rates if a scheduler has made a step that goes by a monitored value; all ranks meet.

    Args:
        trainer: The trainer.
        channel: The channel between all ranks.
        interval: "step" or "epoch", after which the schedulers have made theirs.
        index: The number of the step in its epoch, or of the epoch, from 0.

    Raises:
        UnsupportedError: On all ranks, if these differ.
    """
    monitored = [
        config.monitor
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau and config.interval == interval and (index + 1) % config.frequency == 0
    ]
    if not monitored or not trainer.lightning_module.automatic_optimization:
        return
    everyone = channel.gather(learning_rates(trainer), of=Rates)
    names = " or ".join(repr(name) for name in dict.fromkeys(monitored))
    _check_rates(
        everyone,
        f"after the step of a scheduler that monitors {names}. Each rank has gone by its own value: log it with"
        f" `self.log({monitored[0]!r}, ..., sync_dist=True)`, so that all decide alike",
    )


def _check_rates(everyone: Sequence[Rates], where: str) -> None:
    """Raise if the ranks' learning rates differ.

    Args:
        everyone: By rank.
        where: Since when, and what to do.

    Raises:
        UnsupportedError: They do.
    """
    if any(rates != everyone[0] for rates in everyone):
        flat = [", ".join(str(rate) for rates in each for rate in rates) or "none" for each in everyone]
        by_rank = "; ".join(f"rank {rank}: {rates}" for rank, rates in enumerate(flat))
        raise UnsupportedError(f"The learning rates differ ({by_rank}) {where}.")
