"""Checks that the ranks train alike: with equal learning rates, and on the same unfrozen parameters."""

from typing import Any

from lightning_join._strategy_protocol import JoiningStrategy, strategy_of
from torch_join import UnsupportedError


def check_plateaus(trainer: Any, interval: str, index: int) -> None:
    """Compare the learning rates after a scheduler has used a monitored value; all ranks call this.

    Args:
        trainer: The trainer.
        interval: "step" or "epoch", after which the schedulers were stepped.
        index: The number of the step in its epoch, or of the epoch, from 0.

    Raises:
        UnsupportedError: On all ranks, if the learning rates differ.
    """
    monitored = [
        config.monitor
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau and config.interval == interval and (index + 1) % config.frequency == 0
    ]
    if not monitored or not trainer.lightning_module.automatic_optimization:
        return
    own_rates = [float(group["lr"]) for each in trainer.optimizers for group in each.param_groups if "lr" in group]
    all_rates = strategy_of(trainer).channel.gather(own_rates, of=list[float])
    if any(rates != all_rates[0] for rates in all_rates):
        by_rank = "; ".join(
            f"rank {rank}: {', '.join(map(str, rates)) or 'none'}" for rank, rates in enumerate(all_rates)
        )
        names = " or ".join(repr(name) for name in dict.fromkeys(monitored))
        raise UnsupportedError(
            f"The learning rates differ ({by_rank}) after the step of a scheduler that monitors {names}, because each"
            f" rank used its own value. Log it with `self.log({monitored[0]!r}, ..., sync_dist=True)`, so that all"
            " ranks use the same value."
        )


def take_unfrozen_parameters(strategy: JoiningStrategy) -> None:
    """Wrap the model again if DDP does not know a parameter that is trained; all ranks call this.

    DDP averages the gradients of the parameters that required gradients when it was built. Lightning builds it once, so
    under plain `ddp` each rank trains parameters that are unfrozen later without averaging.

    Raises:
        UnsupportedError: On all ranks, if they have unfrozen different parameters.
    """
    assert strategy.join is not None
    unfrozen = strategy.channel.gather(strategy.join.unfrozen(strategy.optimizers), of=list[str])
    if any(names != unfrozen[0] for names in unfrozen):
        counts = [len(names) for names in unfrozen]
        raise UnsupportedError(
            f"The ranks unfroze different parameters before this epoch ({counts} by rank). Unfreeze the same"
            " parameters on every rank."
        )
    if unfrozen[0]:
        strategy.wrap_again()
