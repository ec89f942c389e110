"""Contexts that the loops put around user code, and functions that find out which hooks it has."""

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_join._strategy_protocol import strategy_of
from torch_join import JoinError
from torch_join.integration import Hook, setting


def has_transfer_hooks(trainer: Any) -> bool:
    """Whether user code takes part in the transfer of a batch to the device; equal on all ranks."""
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    converter = type(trainer.precision_plugin).convert_input.__module__
    converts = not converter.startswith(("lightning.pytorch.", "lightning.fabric."))
    return converts or any(is_overridden(hook, owner) for hook in hooks for owner in owners)


def has_optimization_hooks(trainer: Any) -> bool:
    """Whether user hooks run between a step's forward and its end: all ranks run them, and they may log."""
    hooks = ("on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step")
    # `LambdaCallback` sets its hooks on the object.
    in_callbacks = any(
        getattr(getattr(each, hook), "__func__", None) is not getattr(Callback, hook)
        for each in trainer.callbacks
        for hook in hooks
    )
    around = ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "backward")
    return in_callbacks or any(is_overridden(hook, trainer.lightning_module) for hook in (*hooks, *around))


def shadow_step(trainer: Any) -> Tensor:
    """Run a joined rank's counterpart of `training_step`, in the profiler that Lightning puts around that."""
    # PyTorchProfiler counts the steps by this name.
    with trainer.profiler.profile(f"[Strategy]{type(trainer.strategy).__name__}.shadow_training_step"):
        return strategy_of(trainer).shadow_training_step()


@contextmanager
def after_hook(module: Any, hook: str, act: Callable[[Any], Any]) -> Iterator[None]:
    """Run `act` right after a hook of the module, with the hook's return value; return the return value of `act`."""
    own = getattr(module, hook)

    def followed(*args: Any, **kwargs: Any) -> Any:
        inside.close()  # restores the module's hook before its own code runs
        return act(own(*args, **kwargs))

    with ExitStack() as inside:
        inside.enter_context(setting(module, **{hook: Hook(followed, copied=own)}))
        yield


STOPPED = "A step or a hook raised StopIteration, usually from next() on an exhausted iterator."


# Not a generator: contextlib would mistake our RuntimeError, caused by a StopIteration, for one that Python raised.
class NoStopIteration(ContextDecorator):
    """Wrap user code whose `StopIteration` would end the loop on this rank alone."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, StopIteration):
            raise JoinError(STOPPED) from error
