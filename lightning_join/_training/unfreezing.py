"""Parameters that are unfrozen between epochs."""

from lightning_join._strategy_protocol import JoiningStrategy
from torch_join import UnsupportedError


def take_unfrozen_parameters(strategy: JoiningStrategy) -> None:
    """Wrap the model again if DDP does not know a parameter that is trained; all ranks call this.

    DDP averages the gradients of the parameters that required gradients when it was built. Lightning builds it once, so
    under plain `ddp` each rank trains parameters that are unfrozen later without averaging.

    Raises:
        UnsupportedError: On all ranks, if they have unfrozen different parameters.
    """
    assert strategy.join is not None
    everyone = strategy.channel.gather(strategy.join.unfrozen(strategy.optimizers), of=list[str])
    if any(names != everyone[0] for names in everyone):
        counts = [len(names) for names in everyone]
        raise UnsupportedError(
            f"The ranks unfroze different parameters before this epoch ({counts} by rank). Unfreeze the same"
            " parameters on every rank."
        )
    if everyone[0]:
        strategy.wrap_again()
