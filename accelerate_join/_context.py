"""`join_uneven_inputs`: `torch_join.Join` around what an accelerator has prepared."""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar, overload

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accelerate_join import _accelerator, _compat
from accelerate_join._gather import Operations
from accelerate_join._loaders import PreparedReader, even_batches_set, is_prepared, loops_joined
from torch_join import Join, JoinError, JoinTypeError, UnsupportedError, Weighting
from torch_join.integration import listed

T = TypeVar("T")

_INSTEAD = (
    "Use DistributedDataParallel (MULTI_GPU or MULTI_CPU), with a ZeroRedundancyOptimizer to shard the optimizer's"
    " state, or give all processes equally many batches (even_batches=True) and leave the context out"
)
_REASONS = {
    DistributedType.FSDP: "each forward and backward of FSDP needs the shards of the ranks that have joined",
    DistributedType.DEEPSPEED: "DeepSpeed's engine runs collectives of its own in forward, backward and step",
    DistributedType.MEGATRON_LM: "Megatron-LM's pipeline and tensor parallelism need every rank in every step",
    DistributedType.XLA: "XLA compiles each step with its collectives, and no joined rank can issue them alone",
}


@contextmanager
def join_uneven_inputs(
    accelerator: accelerate.Accelerator,
    joinables: Sequence[Any] | None = None,
    even_batches: bool | None = False,
    *,
    weighting: Weighting = "world",
    throw_on_early_termination: bool = False,
    **kwargs: Any,
) -> Iterator[Join]:
    """Train on uneven inputs with Accelerate, exactly.

    ```python
    with join_uneven_inputs(accelerator):
        for batch in loader:
            ...
    ```

    All that `accelerator` has prepared takes part. A process that has run out of batches serves the others inside
    the end of its loader; then all leave the loop together, in the state of the one that was last.

    Args:
        accelerator: What has prepared the models, optimizers, schedulers and loaders.
        joinables: Whatever takes part besides: models and optimizers that were prepared may be among them, as may
            torch `Joinable`s and anything with `state_dict` and `load_state_dict`.
        even_batches: Overrides the setting of prepared loaders within; `None` leaves it as it is.
        weighting: How the gradients of the active ranks are combined, see `torch_join.Join`.
        throw_on_early_termination: Whether to raise on all ranks when the first one runs out of inputs.
        **kwargs: What else `torch_join.Join` takes: `heartbeat`, `timeout`, `audit`, `hand_over_ignored`, and options
            for hooks.

    Yields:
        The `torch_join.Join`, whose `batches` takes loaders that Accelerate has not prepared.

    Raises:
        UnsupportedError: Accelerate runs on something else than DistributedDataParallel.
        JoinError: A prepared model has several wrappers, so that nobody knows which the loop calls.
        JoinTypeError: There is no such argument, and no hook that could take it.
    """
    distributed = check_supported(accelerator)
    given = [] if joinables is None else listed(joinables)
    if weighting == "world" and "divide_by_initial_world_size" in kwargs:
        weighting = None  # type: ignore[assignment]  # torch's name for the same thing decides
    join = AcceleratorJoin(
        accelerator,
        given,
        enable=distributed,
        weighting=weighting,
        throw_on_early_termination=throw_on_early_termination,
        **kwargs,
    )
    with ExitStack() as stack:
        if distributed:
            stack.enter_context(even_batches_set(accelerator, even_batches))
        stack.enter_context(join)
        if distributed:
            stack.enter_context(loops_joined(join))
            stack.enter_context(join.operations.installed())
            stack.enter_context(_accelerator.joining(accelerator, join))
        yield join


class AcceleratorJoin(Join):
    """`Join` around what `accelerator` has prepared, and `joinables`.

    Attributes:
        operations: What goes through Accelerate's own functions.
        progress: How far this process has come.
    """

    def __init__(
        self, accelerator: accelerate.Accelerator, joinables: Sequence[Any], enable: bool, **options: Any
    ) -> None:
        self._accelerator = accelerator
        self.operations: Operations
        given = [_unwrap(thing) for thing in joinables]
        if any(map(is_prepared, given)):
            raise JoinTypeError(
                "A loader is among the joinables, which are models, optimizers and whatever else is the same on all"
                " processes. Leave it out, and loop over it in the context: `for batch in loader`."
            )
        prepared = prepared_by(accelerator, given) if enable else []
        self.progress = Progress(accelerator, self)
        things = [*given, *prepared, self.progress]
        super().__init__(list({id(thing): thing for thing in things}.values()), enable, **options)

    def _make_parts(self) -> None:
        super()._make_parts()
        self.operations = Operations(self, len(self._parts), self._accelerator)
        self._parts.append(self.operations)

    @overload
    def batches(self, loader: DataLoader[T]) -> Iterable[T]: ...
    @overload
    def batches(self, loader: Iterable[T]) -> Iterable[T]: ...
    def batches(self, loader: Iterable[T]) -> Iterable[T]:
        """Go through the batches of `loader`, as in `torch_join.Join`; a prepared loader is passed on as it is."""
        return loader if is_prepared(loader) else super().batches(loader)

    def go_through(self, loader: Any, iterate: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """Go through the batches of a prepared loader; all ranks leave the loop together, in one common state.

        Args:
            loader: The loader.
            iterate: Its own `__iter__`.
        """
        if self._reader is not None and self._reader.pulling:  # a loop over something that holds it, such as a zip
            yield from iterate(loader)
        else:
            yield from self._batches(loader, partial(PreparedReader, iterate))

    @property
    def _replicated(self) -> list[Any]:
        return [thing for thing in super()._replicated if thing is not self.progress]  # which counts on by itself

    @property
    def loader(self) -> Any:
        """The prepared loader that this rank goes through, or went through last; `None` if that is something else."""
        return self._reader.prepared if isinstance(self._reader, PreparedReader) else None


class Progress:
    """How far this process has come: what all must agree on, or the next epoch would be another one."""

    def __init__(self, accelerator: accelerate.Accelerator, join: AcceleratorJoin) -> None:
        self._accelerator = accelerator
        self._join = join

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._accelerator.step,
            "sync_gradients": self._accelerator.sync_gradients,
            "overflows": _compat.overflows(self._accelerator),
            "loaders": [[getattr(loader, name, None) for name in _OF_LOADERS] for loader in self._loaders],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.sync_gradients = state["sync_gradients"]
        _compat.set_overflows(self._accelerator, state["overflows"])
        for loader, values in zip(self._loaders, state["loaders"], strict=True):
            for name, value in zip(_OF_LOADERS, values, strict=True):
                if value is not None:
                    setattr(loader, name, value)

    @property
    def _loaders(self) -> list[Any]:
        current = [] if self._join.loader is None else [self._join.loader]
        return [*_compat.loaders(self._accelerator), *current]


# The epoch, which a rank without a batch does not count up; and where a stateful loader is, which all ranks write
# to one file.
_OF_LOADERS = ("iteration", "dl_state_dict")


def prepared_by(accelerator: accelerate.Accelerator, given: Sequence[Any]) -> list[Any]:
    """Return all that takes part of what `accelerator` has prepared, without Accelerate's own wrappers.

    Args:
        accelerator: What has prepared it.
        given: What the user has given besides, which may be the wrapper of a model.

    Raises:
        JoinError: A model has several wrappers.
    """
    known = [thing.module for thing in given if isinstance(thing, DistributedDataParallel)]
    wrappers = _compat.wrappers(accelerator)
    if any(len(found) > 1 for _, found in wrappers):
        gc.collect()  # from an attempt that has failed, perhaps
        wrappers = _compat.wrappers(accelerator)
    models = []
    for model, found in wrappers:
        if any(model is one for one in known):
            continue
        if not found and any(parameter.requires_grad for parameter in model.parameters()):
            warnings.warn(
                f"No DistributedDataParallel was found that wraps the prepared {type(model).__name__}, so it takes no"
                " part in join_uneven_inputs. If it is trained, give its DistributedDataParallel among `joinables`.",
                stacklevel=4,
            )
        if len(found) > 1:
            raise JoinError(
                f"A prepared {type(found[0].module).__name__} is wrapped by {len(found)} DistributedDataParallel"
                " models, so that nobody knows which of them the loop calls. Delete the others, or call"
                " accelerator.free_memory() before you prepare it anew."
            )
        models += found  # what needs no gradient is not wrapped, and nothing is done with others in it
    inner = [*_compat.optimizers(accelerator), *_compat.schedulers(accelerator)]
    scaler = [] if accelerator.scaler is None else [accelerator.scaler]
    return [*models, *map(_unwrap, inner), *scaler, *_compat.registered(accelerator)]


def check_supported(accelerator: accelerate.Accelerator) -> bool:
    """Return whether there are several processes.

    Raises:
        UnsupportedError: Joined ranks cannot take part in how they train.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        return False
    if accelerator.parallelism_config is not None and accelerator.torch_device_mesh is not None:
        raise UnsupportedError(
            "join_uneven_inputs: with a parallelism_config the ranks hold shards of one model, which every step needs."
            f" {_INSTEAD}."
        )
    if not (accelerator.multi_device or kind == DistributedType.MULTI_CPU):
        reason = _REASONS.get(kind, "it does not train by DistributedDataParallel")
        raise UnsupportedError(f"join_uneven_inputs does not support {kind.value}: {reason}. {_INSTEAD}.")
    return True


def _unwrap(thing: Any) -> Any:
    if isinstance(thing, AcceleratedOptimizer):
        return thing.optimizer
    if isinstance(thing, AcceleratedScheduler):
        return thing.scheduler
    original = getattr(thing, "_orig_mod", None)  # torch.compile's
    return original if isinstance(original, DistributedDataParallel) else thing
