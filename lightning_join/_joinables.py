"""The joinables of the user's own: the strategy's argument and those of the module."""

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import Joinable

from torch_join import JoinValueError

if TYPE_CHECKING:
    from lightning_join._strategy import DDPJoinStrategy


def all_joinables(strategy: "DDPJoinStrategy") -> list[Joinable]:
    """Return the strategy's joinables and those that the module's `configure_joinables()` gives; all ranks meet.

    Raises:
        JoinValueError: The ranks have different ones, or an object is there twice.
    """
    configure = getattr(strategy.lightning_module, "configure_joinables", None)
    joinables = [*strategy.joinables, *((configure() or ()) if configure is not None else ())]
    everyone = strategy.channel.gather([type(joinable).__name__ for joinable in joinables], of=list[str])
    if any(names != everyone[0] for names in everyone):
        given = "; ".join(f"rank {rank}: {', '.join(names) or 'none'}" for rank, names in enumerate(everyone))
        raise JoinValueError(
            "All ranks must have the same joinables, in DDPJoinStrategy(joinables=...) and from configure_joinables(),"
            f" in the same order, but they have ({given})."
        )
    for place, joinable in enumerate(joinables):
        if any(joinable is other for other in joinables[:place]):
            raise JoinValueError(
                f"The {type(joinable).__name__} was given as a joinable twice. Give it in"
                " DDPJoinStrategy(joinables=...), or return it from configure_joinables(), but not both."
            )
    return joinables
