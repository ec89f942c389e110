"""A loop over one loader that is a context of its own, so that no line of it need be indented anew."""

import atexit
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from types import TracebackType
from typing import Any, Generic, TypeVar, overload
from weakref import WeakKeyDictionary

import accelerate
from torch.utils.data import DataLoader

from accelerate_join._context import join_uneven_inputs
from torch_join import Join, JoinError, Weighting

T = TypeVar("T")


@overload
def join_batches(
    accelerator: accelerate.Accelerator,
    loader: DataLoader[T],
    joinables: Sequence[Any] | None = None,
    even_batches: bool | None = False,
    *,
    weighting: Weighting = "world",
    throw_on_early_termination: bool = False,
    **kwargs: Any,
) -> Iterable[T]: ...
@overload
def join_batches(
    accelerator: accelerate.Accelerator,
    loader: Iterable[T],
    joinables: Sequence[Any] | None = None,
    even_batches: bool | None = False,
    *,
    weighting: Weighting = "world",
    throw_on_early_termination: bool = False,
    **kwargs: Any,
) -> Iterable[T]: ...
def join_batches(
    accelerator: accelerate.Accelerator,
    loader: Iterable[T],
    joinables: Sequence[Any] | None = None,
    even_batches: bool | None = False,
    **kwargs: Any,
) -> Iterable[T]:
    """Go through the batches of `loader`, in a context of its own that is `join_uneven_inputs`.

    ```python
    for epoch in range(epochs):
        for batch in join_batches(accelerator, loader):  # was: in loader
            ...
    ```

    The context ends with the loop, or, after a `break`, with the next such loop or `end_training`: until then what
    the accelerator does is in it.

    Args:
        accelerator: What has prepared the models, optimizers, schedulers and loaders.
        loader: One that was prepared, or anything else that can be iterated over.
        joinables: As in `join_uneven_inputs`.
        even_batches: As in `join_uneven_inputs`.
        **kwargs: What else `join_uneven_inputs` takes.

    Returns:
        This process's batches, to loop over once.

    Limits:
        An exception that is caught outside of the loop, to go on after it, looks like a `break`: use the `with`, in
        which the others are told. One that ends the process is told.
    """
    return _Loop(accelerator, loader, {"joinables": joinables, "even_batches": even_batches, **kwargs})


class _Loop(Generic[T]):
    def __init__(self, accelerator: accelerate.Accelerator, loader: Iterable[T], options: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self._loader = loader
        self._options = options
        self._context: AbstractContextManager[Join] | None = None
        self.left = False

    def __iter__(self) -> Iterator[T]:
        finish(self._accelerator)
        self.left = False
        context = join_uneven_inputs(self._accelerator, **self._options)
        join = context.__enter__()
        self._context = context
        _watch_exit()
        _loops[self._accelerator] = self
        try:
            yield from join.batches(self._loader)
        except GeneratorExit:
            # To wait for others, as the context's end does, or to raise, is not for a generator that is being closed.
            self.left = True
            raise
        except BaseException as error:
            self.leave(type(error), error, error.__traceback__)
            raise
        self.leave()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def leave(
        self,
        kind: type[BaseException] | None = None,
        value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """End the context."""
        context, self._context = self._context, None
        _loops.pop(self._accelerator, None)
        if context is not None:
            context.__exit__(kind, value, traceback)


_loops: "WeakKeyDictionary[accelerate.Accelerator, _Loop[Any]]" = WeakKeyDictionary()


def finish(accelerator: accelerate.Accelerator) -> None:
    """End the context of a loop that was left by `break`."""
    loop = _loops.get(accelerator)
    if loop is not None and loop.left:
        loop.leave()


@cache
def _watch_exit() -> None:
    atexit.register(_fail_all)


def _fail_all() -> None:
    """Tell others that may wait for this process that it ends, and why."""
    error = getattr(sys, "last_value", None) or JoinError(
        "The process ended after it had left a loop over join_batches. Call accelerator.end_training() at the end."
    )
    for loop in list(_loops.values()):
        with suppress(BaseException):
            loop.leave(type(error), error, error.__traceback__)
