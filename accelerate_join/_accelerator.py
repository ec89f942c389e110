"""The accelerator's methods that behave differently in the context."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ClassVar, Literal

import accelerate
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.state import GradientState

from accelerate_join import _compat
from accelerate_join._loaders import deals_out, remainder
from accelerate_join._operations import Operations
from torch_join import JoinError, UnsupportedError
from torch_join.integration import gather_given, own_loops, setting

_Method = Callable[..., Any]


def _after_the_loop(method: _Method, at_end: bool = False) -> _Method:
    """Make a method first finish a `join_batches` loop that was left, and then run as outside the context.

    Args:
        method: The method in the context.
        at_end: See `finish`.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The loop may also have ended after the lookup: `accelerator.save(accelerator.unwrap_model(model))`.
        if own_loops.finish(self, at_end=at_end) or not isinstance(self, InContext):
            return getattr(self, method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return call


def _own(
    name: str, within: Callable[[Operations], AbstractContextManager[Any]] = nullcontext, at_end: bool = False
) -> _Method:
    """Return a method that calls Accelerate's method of this name inside the context `within`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with within(self._operations):
            return getattr(super(InContext, self), name)(*args, **kwargs)

    call.__name__ = name
    return _after_the_loop(call, at_end)


def _operation(name: str) -> _Method:
    """Return a method that calls the method of `Operations` with this name in place of the accelerator method."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._operations, name)(*args, **kwargs)

    call.__name__ = name
    return _after_the_loop(call)


class InContext:
    """Methods that override the accelerator's in the context; a base class before the accelerator's own class."""

    _operations: ClassVar[Operations]

    save = _own("save", Operations.acting_for_main_process)
    prepare = _own("prepare")
    free_memory = _own("free_memory", at_end=True)
    end_training = _own("end_training", at_end=True)

    @_after_the_loop
    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        with self._operations.naming_failures(), setting(self._operations, for_metrics=True):
            return super().gather_for_metrics(*args, **kwargs)  # type: ignore[misc]

    @_after_the_loop
    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return self._operations.pad(super().pad_across_processes, tensor, *args, **kwargs)  # type: ignore[misc]

    @_after_the_loop
    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        raise JoinError(
            "A model was prepared inside join_uneven_inputs or a loop over join_batches, which is too late for it to"
            " take part. Prepare all models first. If a variable still holds the iterator of an earlier loop, `del`"
            " it, because that loop has not ended."
        )

    @_after_the_loop
    def stop_requested(self) -> bool:
        return self._operations.driver.stop_requested()

    @_after_the_loop
    def unwrap_model(self, *args: Any, **kwargs: Any) -> Any:
        self._operations.driver.return_to_loop()  # hands over the latest state: callers usually save this model
        return super().unwrap_model(*args, **kwargs)  # type: ignore[misc]

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> Any:
        raise UnsupportedError(
            "trigger_sync_in_backward synchronizes a model in a backward whose forward ran under no_sync, which"
            " finished ranks cannot follow. Run the last forward of an accumulation window outside no_sync, as"
            " accelerator.accumulate does."
        )


# Their errors name the failed rank here, because a `join_batches` loop has no `with` that could do it.
_NAMING = ("backward", "check_trigger", "clip_grad_norm_", "clip_grad_value_", "gather", "reduce", "wait_for_everyone")
for _name in _NAMING:
    setattr(InContext, _name, _own(_name, Operations.naming_failures))
for _name in ("get_state_dict", "load_state", "log", "print", "save_model", "save_state"):
    setattr(InContext, _name, _operation(_name))


def gather_in_order(
    accelerator: accelerate.Accelerator,
    rows: Any,
    indices: Any = None,
    rank: int | None = None,
    order: Literal["dataset", "shards"] | None = None,
) -> Any:
    """Return the results of all processes, in order; all processes call this after a loop.

    ```python
    rows, indices = [], []
    for batch in test_loader:
        rows.append({"logits": model(batch["x"]), "names": batch["names"]})
        indices.append(batch["index"])
    everything = gather_in_order(accelerator, rows, indices)
    ```

    With indices, rows are sorted by index, and each index occurs once: the first row of the lowest process that has it.
    (With `even_batches=True`, Accelerate gives some samples to two processes.) With `order="shards"`, rows are sorted
    by process, then by index, or by batch without indices.

    Args:
        accelerator: The accelerator.
        rows: See `torch_join.Join.gather_in_order`.
        indices: See `torch_join.Join.gather_in_order`.
        rank: The process that gets the result; by default all do.
        order: `"dataset"` (the default if there are `indices`): all processes have the same dataset, and indices refer
            to it. `"shards"`: each process has its own dataset.

    Returns:
        See `torch_join.Join.gather_in_order`.

    Raises:
        JoinValueError: On all processes, if some process's rows cannot be gathered, or if a prepared loader splits one
            dataset among the processes and neither `indices` nor `order` is passed.
        JoinError: Some processes have run out of batches while others have not.
    """
    own_loops.finish(accelerator)
    if isinstance(accelerator, InContext):
        accelerator._operations.driver.check_together("gather_in_order")
    dealt_out = any(map(deals_out, _compat.loaders(accelerator)))
    return gather_given(rows, indices, None, rank, order, dealt_out)


@contextmanager
def class_replaced(accelerator: accelerate.Accelerator, operations: Operations) -> Iterator[None]:
    """In this context, make the methods of `accelerator` and its gradient state consider all ranks."""

    def end_of_dataloader(state: GradientState) -> bool:
        """Whether this is the last step of the longest rank."""
        loader = state.active_dataloader
        return loader is not None and loader is operations.progress.find_loader() and operations.driver.find_last_step()

    def remainder_of(state: GradientState) -> int:
        """The number of new samples in the last step, if that step also repeats samples."""
        return -1 if state.active_dataloader is None else remainder(state.active_dataloader)

    own = type(accelerator)
    with (
        setting(accelerator, __class__=type(own.__name__, (InContext, own), {"_operations": operations})),
        setting(GradientState, end_of_dataloader=property(end_of_dataloader), remainder=property(remainder_of)),
        setting(LocalSGD, step=_refuse_local_sgd),
    ):
        yield


def _refuse_local_sgd(*_: Any) -> None:
    raise UnsupportedError(
        "LocalSGD averages parameters every few steps, so a finished rank would lose its steps since the last"
        " average. Give all ranks the same number of batches, or use DistributedDataParallel, which averages"
        " gradients in each step."
    )
