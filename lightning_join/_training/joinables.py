"""The user's joinables: the strategy's argument and those of the module."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch.distributed.algorithms.join import Joinable, JoinHook

from torch_join import JoinValueError
from torch_join.integration import Channel, check_monitored


def all_joinables(given: Sequence[Joinable], module: Any, channel: Channel, monitored: bool = False) -> list[Joinable]:
    """Return the joinables of the strategy (`given`) and of the module's `configure_joinables()`; all ranks call this.

    Raises:
        JoinValueError: The joinables differ between ranks, one occurs twice, or only some ranks are monitored.
    """
    configure = getattr(module, "configure_joinables", None)
    joinables = [*given, *((configure() or ()) if configure is not None else ())]
    message = [type(joinable).__name__ for joinable in joinables], monitored
    all_names, all_monitored = zip(*channel.gather(message, of=tuple[list[str], bool]), strict=True)
    check_monitored(all_monitored)
    if any(names != all_names[0] for names in all_names):
        by_rank = "; ".join(f"rank {rank}: {', '.join(names) or 'none'}" for rank, names in enumerate(all_names))
        raise JoinValueError(
            f"The ranks passed different joinables: {by_rank}. Pass the same joinables"
            " (DDPJoinStrategy(joinables=...) and configure_joinables()) in the same order on all ranks."
        )
    for place, joinable in enumerate(joinables):
        if any(joinable is other for other in joinables[:place]):
            raise JoinValueError(
                f"A {type(joinable).__name__} was passed as a joinable twice. Pass it in"
                " DDPJoinStrategy(joinables=...) or return it from configure_joinables(), but not both."
            )
    return joinables


def run_post_hooks_in_one_process(callbacks: list[pl.Callback], joinables: list[Joinable]) -> None:
    """Run the joinables' post-hooks at the end of each epoch in a single process, which uses Lightning's own loops."""
    callbacks[:] = [each for each in callbacks if not isinstance(each, _PostHooks)]  # remove those of an earlier fit
    if joinables:
        callbacks.insert(0, _PostHooks(joinables))


class _PostHooks(pl.Callback):
    """Runs the joinables' hooks in a single process, which cannot join, as several processes do in each epoch.

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
