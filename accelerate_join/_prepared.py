"""The objects of an accelerator that take part: all prepared objects, and its progress."""

import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import accelerate
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel

from accelerate_join import _compat
from torch_join import JoinDriftWarning, JoinError, UnsupportedError
from torch_join.integration import is_engine, is_sharded_model

PreparedLoader: TypeAlias = DataLoaderShard | DataLoaderDispatcher | SkipDataLoader
_INSTEAD = (
    "Use DistributedDataParallel (MULTI_GPU or MULTI_CPU), with a ZeroRedundancyOptimizer to shard the optimizer state;"
    " FSDP or DeepSpeed to shard the model too; or the same number of batches on all processes (even_batches=True),"
    " without the context"
)
_REASONS = {
    DistributedType.MEGATRON_LM: "Megatron-LM's pipeline and tensor parallelism need every rank in every step",
    DistributedType.XLA: "XLA compiles each step with its collectives, which a finished rank cannot issue alone",
}


def check_supported(accelerator: accelerate.Accelerator, name: str = "join_uneven_inputs") -> bool:
    """Return whether the training has several processes.

    Args:
        accelerator: The accelerator that prepares the models.
        name: The name of the training API, for errors.

    Raises:
        UnsupportedError: Joined ranks cannot take part in this kind of training.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        return False
    config = getattr(accelerator, "parallelism_config", None)  # Accelerate has it from 1.10 on
    if config is not None and accelerator.torch_device_mesh is not None:
        if config.non_data_parallel_size > 1:
            raise UnsupportedError(
                f"{name} does not support this parallelism_config"
                f" ({', '.join(f'{name}_size > 1' for name in config.non_dp_dim_names)}), with which several ranks"
                f" compute each batch together, with their own collectives. {_INSTEAD}."
            )
        if kind != DistributedType.FSDP:
            raise UnsupportedError(
                f"{name} does not support a parallelism_config without FSDP: Accelerate does not average gradients"
                f" over all replicas on the mesh. {_INSTEAD}."
            )
    # `MULTI_...` means DDP, on any device.
    if not (kind.value.startswith("MULTI_") or kind in (DistributedType.FSDP, DistributedType.DEEPSPEED)):
        reason = _REASONS.get(kind, "it uses neither DistributedDataParallel nor FSDP or DeepSpeed")
        raise UnsupportedError(f"{name} does not support {kind.value}: {reason}. {_INSTEAD}.")
    return True


def prepared_by(accelerator: accelerate.Accelerator, given: Sequence[Any]) -> list[Any]:
    """Return the prepared objects that take part, without Accelerate's own wrappers.

    Args:
        accelerator: The accelerator that prepared them.
        given: The user's further joinables, which may include the wrapper of a model.

    Raises:
        JoinError: A model has several wrappers.
    """
    known = [thing.module for thing in given if isinstance(thing, DistributedDataParallel)]
    trained = {id(p) for one in _compat.optimizers(accelerator) for group in one.param_groups for p in group["params"]}

    def is_wrapped(model: Any) -> bool:
        """Whether a model must have a wrapper: a model prepared only for evaluation is in no optimizer."""
        is_trained = any(p.requires_grad and id(p) in trained for p in model.parameters())
        return is_trained and not is_called_itself(model) and not any(model is one for one in known)

    wrappers = _compat.wrappers(accelerator, is_wrapped)
    if any(len(found) > 1 for _, found in wrappers):
        gc.collect()  # a failed attempt may have left a wrapper
        wrappers = _compat.wrappers(accelerator, is_wrapped)
    models = list(filter(is_called_itself, _compat.models(accelerator)))
    for model, found in wrappers:
        if is_called_itself(model) or any(model is one for one in known):
            continue
        if not found and is_wrapped(model):
            JoinDriftWarning.warn(
                f"No DistributedDataParallel wraps the prepared {type(model).__name__}, so this model takes no part"
                " in join_uneven_inputs. If it is trained, pass its DistributedDataParallel in `joinables`."
            )
        if len(found) > 1:
            raise JoinError(
                f"A prepared {type(found[0].module).__name__} is wrapped by {len(found)} DistributedDataParallel"
                " models, so it is unclear which one the loop calls. Delete the others, call accelerator.free_memory()"
                " before you prepare the model again, or prepare the model instead of its wrapper."
            )
        models += found  # a model that needs no gradient is not wrapped, and issues no collectives
    inner = [*_compat.optimizers(accelerator), *_compat.schedulers(accelerator)]
    scaler = [] if accelerator.scaler is None else [accelerator.scaler]
    return [*models, *map(unwrap, inner), *scaler, *_compat.registered(accelerator)]


def is_called_itself(model: Any) -> bool:
    """Whether the loop calls the model itself, with no wrapper that Accelerate does not keep."""
    return is_sharded_model(model) or is_engine(model)


def unwrap(thing: Any) -> Any:
    """Return the object inside Accelerate's own wrapper, or inside `torch.compile`'s wrapper of a DDP model."""
    if isinstance(thing, AcceleratedOptimizer):
        return thing.optimizer
    if isinstance(thing, AcceleratedScheduler):
        return thing.scheduler
    original = getattr(thing, "_orig_mod", None)  # torch.compile's
    return original if isinstance(original, DistributedDataParallel) else thing  # a sharded one is unchanged


class Progress:
    """This process's progress, which must be equal on all processes, or their next epochs would differ.

    Args:
        accelerator: The accelerator of this process.
        find_loader: Returns the prepared loader of this rank's current or last loop; `None` for another kind of loader.
    """

    def __init__(self, accelerator: accelerate.Accelerator, find_loader: Callable[[], PreparedLoader | None]) -> None:
        self._accelerator = accelerator
        self.find_loader = find_loader

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._accelerator.step,
            "sync_gradients": self._accelerator.sync_gradients,
            "overflows": _compat.overflows(self._accelerator),
            # The epoch: a rank without batches does not increment it.
            "iterations": [getattr(loader, "iteration", None) for loader in self._loaders],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.sync_gradients = state["sync_gradients"]
        _compat.set_overflows(self._accelerator, state["overflows"])
        for loader, iteration in zip(self._loaders, state["iterations"], strict=True):
            if iteration is not None:
                loader.iteration = iteration

    @property
    def _loaders(self) -> list[PreparedLoader]:
        current = self.find_loader()
        return [*_compat.loaders(self._accelerator), *([] if current is None else [current])]
