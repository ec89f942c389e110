"""The joinables of the user's own: the strategy's argument and those of the module."""

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from torch.distributed.algorithms.join import Joinable, JoinHook

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


def run_post_hooks_alone(strategy: "DDPJoinStrategy") -> None:
    """Run the joinables' post-hooks at each epoch's end where there is one process, whose loops are Lightning's own."""
    assert strategy.lightning_module is not None
    callbacks: list[pl.Callback] = strategy.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [each for each in callbacks if not isinstance(each, _PostHooks)]  # of a fit before
    if joinables := all_joinables(strategy):
        callbacks.insert(0, _PostHooks(joinables))


class _PostHooks(pl.Callback):
    """What an epoch of several processes does with joinables, where nobody can join.

    Args:
        joinables: The joinables.
    """

    def __init__(self, joinables: list[Joinable]) -> None:
        self._joinables = joinables
        self._hooks: list[JoinHook] = []

    def on_train_epoch_start(self, *_: object) -> None:
        self._hooks = [joinable.join_hook() for joinable in self._joinables]

    def on_train_epoch_end(self, *_: object) -> None:
        for hook in self._hooks:
            hook.post_hook(is_last_joiner=True)
