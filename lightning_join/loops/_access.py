"""What the loops need of the strategy they run under."""

from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.utilities.model_helpers import is_overridden

from torch_join.integration import Channel, LockstepJoin, ModuleMetrics

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_join._strategy import DDPJoinStrategy


def strategy_of(trainer: "Trainer") -> "DDPJoinStrategy":
    """Return the trainer's strategy."""
    return cast("DDPJoinStrategy", trainer.strategy)


def channel_of(trainer: "Trainer") -> Channel:
    """Return the channel between the ranks."""
    return strategy_of(trainer).channel


def metrics_of(trainer: "Trainer") -> ModuleMetrics:
    """Return the metrics of the module that is run."""
    metrics = strategy_of(trainer).metrics
    assert metrics is not None
    return metrics


def join_of(trainer: "Trainer") -> LockstepJoin:
    """Return the join of the fit that is running."""
    join = strategy_of(trainer).join
    assert join is not None
    return join


def has_transfer_hooks(trainer: Any) -> bool:
    """Whether code of the user's own takes part in the transfer of a batch to the device; the same on all ranks."""
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    converts = not type(trainer.precision_plugin).convert_input.__module__.startswith("lightning.")
    return converts or any(is_overridden(hook, owner) for hook in hooks for owner in owners)


class NoStopIteration:
    """Put around user code that a `StopIteration` would take out of the loop of this rank alone."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError(
                "A step or a hook raised StopIteration, as a rule from next() on an iterator that has come to its end."
            ) from error


class KnownToProfilers:
    """A loop whose reads profilers find under the name of Lightning's own loop."""

    reads = ""

    def _on_before_fetch(self: Any) -> None:
        self.trainer.profiler.start(self.reads)

    def _on_after_fetch(self: Any) -> None:
        self.trainer.profiler.stop(self.reads)
