"""Every private name of Accelerate that this package uses (seen in accelerate 1.15.0).

`tests/accelerate/test_compat.py` fails when one of them disappears.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet, ref

import accelerate
import torch
from accelerate.state import GradientState, PartialState
from accelerate.utils import operations
from torch.nn.parallel import DistributedDataParallel

from torch_join.integration import check_names, setting

SEEN = "1.5 to 1.15"


_Prepared: TypeAlias = Callable[[accelerate.Accelerator], list[Any]]
# The objects that were prepared by an accelerator or registered for its checkpoints.
loaders: _Prepared = attrgetter("_dataloaders")
models: _Prepared = attrgetter("_models")  # sharded models as the loop calls them, others mostly unwrapped
optimizers: _Prepared = attrgetter("_optimizers")  # each as an `AcceleratedOptimizer`
schedulers: _Prepared = attrgetter("_schedulers")  # each as an `AcceleratedScheduler`
registered: _Prepared = attrgetter("_custom_objects")


# By accelerator: the objects that were prepared before the last search, and the wrappers that it found.
_searched: WeakKeyDictionary[Any, tuple[list[ref[Any]], WeakSet[DistributedDataParallel]]] = WeakKeyDictionary()


def wrappers(
    accelerator: accelerate.Accelerator, is_trained: Callable[[Any], bool]
) -> list[tuple[Any, list[DistributedDataParallel]]]:
    """Return each prepared model with its DDP wrappers.

    `accelerator` keeps only the inner modules, except for models that were prepared twice. So this function searches
    all objects of the process. It repeats the search only if another object was prepared, or if the wrapper of a
    trained model is gone. Older versions wrap a model again when it is prepared a second time.
    """
    unwrapped = [getattr(model, "_orig_mod", model) for model in models(accelerator)]
    prepared = [*models(accelerator), *optimizers(accelerator)]
    before, ddps = _searched.get(accelerator, ([], WeakSet()))

    def found() -> list[tuple[Any, list[DistributedDataParallel]]]:
        return [(model, [ddp for ddp in ddps if ddp is model or ddp.module is model]) for model in unwrapped]

    is_same = len(before) == len(prepared) and all(one() is thing for one, thing in zip(before, prepared, strict=True))
    if not is_same or any(not wraps and is_trained(model) for model, wraps in found()):
        ddps = WeakSet(_all_wrappers())
        _searched[accelerator] = [*map(ref, prepared)], ddps
    return found()


def forget_search(accelerator: accelerate.Accelerator) -> None:
    """Let the next call of `wrappers` search: something was prepared."""
    _searched.pop(accelerator, None)


def _all_wrappers() -> Iterator[DistributedDataParallel]:
    """Yield the DDP models of the process. Finding them by references to their classes is faster than a loop."""
    kinds = [DistributedDataParallel]
    for kind in kinds:  # the loop extends this list
        kinds += kind.__subclasses__()
    for thing in gc.get_referrers(*kinds):
        # A model whose construction failed has no reducer; a traceback may keep it alive, as in a notebook.
        if type(thing) in kinds and "reducer" in vars(thing):
            yield thing


def overflows(accelerator: accelerate.Accelerator) -> list[bool]:
    """Return, for each optimizer, whether its last step was skipped."""
    return [bool(optimizer._is_overflow) for optimizer in optimizers(accelerator)]


def set_overflows(accelerator: accelerate.Accelerator, values: list[bool]) -> None:
    """Set the values that `overflows` returns."""
    for optimizer, value in zip(optimizers(accelerator), values, strict=True):
        optimizer._is_overflow = value


def has_prepared(thing: Any) -> bool:
    """Whether Accelerate considers a model or a loader prepared."""
    return bool(getattr(thing, "_is_accelerate_prepared", False))


def take_as_prepared(loader: Any) -> None:
    """Mark a loader over this process's own data as prepared, so that Accelerate keeps it without sharding it."""
    vars(loader).update(_is_accelerate_prepared=True, _join_own=True)


def is_own(loader: Any) -> bool:
    """Whether `take_as_prepared` has marked a loader."""
    return bool(vars(loader).get("_join_own"))


def forget_prepared(model: torch.nn.Module) -> None:
    """Let Accelerate prepare a model again."""
    vars(model).pop("_is_accelerate_prepared", None)


# Concatenates tensors of one shape from all ranks: Accelerate's own function, even while it is replaced.
gather: Callable[[Any], Any] = operations._gpu_gather


def without_none(own_iter: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Wrap Accelerate's `__iter__` so that it also works for loaders without batches.

    For such a loader, versions before 1.15 yield `None` before they set `current_batch`, and then fail.
    """

    def iterate(loader: Any) -> Iterator[Any]:
        iterator: Any = own_iter(loader)
        for first in iterator:
            # Do not store the generator's frame in a variable: it keeps all frames above it alive (Python 3.13).
            is_own = "current_batch" in iterator.gi_frame.f_code.co_varnames  # these are generators
            if is_own and "current_batch" not in iterator.gi_frame.f_locals:
                loader.end()
                return
            yield first
            yield from iterator

    return iterate


def batches_replaced(loader: Any, batches: Callable[[], Iterator[Any]]) -> AbstractContextManager[None]:
    """Replace the batches of the loader that `loader` wraps, in loops that start in this context.

    Accelerate calls the wrapped loader's `__iter__` by name once, when its first batch is requested.
    """
    return setting(loader.base_dataloader, __iter__=batches)


@contextmanager
def operations_replaced(own: Any) -> Iterator[None]:
    """Replace the implementations of Accelerate's operations, also for code that has already imported them.

    Args:
        own: Has methods `gather`, `gather_object`, `broadcast` and `reduce`. The last two get Accelerate's own
            function as their first argument.
    """
    # `reduce` has no private implementation, so the function that its decorator wraps is replaced.
    names = operations.reduce.__code__.co_freevars
    cell = operations.reduce.__closure__[names.index("function")]
    with (
        setting(cell, cell_contents=partial(own.reduce, cell.cell_contents)),
        setting(
            operations,
            _gpu_gather=own.gather,
            _gpu_gather_object=own.gather_object,
            _gpu_broadcast=partial(own.broadcast, operations._gpu_broadcast),
        ),
    ):
        yield


def state_file(index: int) -> str:
    """Return the name of the file in which `save_state` stores the state of a stateful loader."""
    return f"dl_state_dict_{index}.bin" if index else "dl_state_dict.bin"


def acting_for_main() -> AbstractContextManager[None]:
    """Make this process act as the main process."""
    return setting(PartialState(), process_index=0, local_process_index=0)


@contextmanager
def active_loader(loader: Any) -> Iterator[None]:
    """In this context, make `loader` Accelerate's active loader, which knows whether its loop is at the end."""
    state = GradientState()
    state._add_dataloader(loader)
    try:
        yield
    finally:
        state._remove_dataloader(loader)


check_names(
    "accelerate",
    SEEN,
    {
        accelerate.Accelerator: "_custom_objects _dataloaders _models _optimizers _schedulers",
        accelerate.optimizer.AcceleratedOptimizer: "_is_overflow",
        operations: "_gpu_broadcast _gpu_gather _gpu_gather_object reduce",
        GradientState: "_add_dataloader _remove_dataloader",
        PartialState: "local_process_index process_index",
    },
)
