"""A loop over one loader that is a context of its own, so that no line of it need be indented anew."""

import atexit
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import accelerate

from accelerate_join._prepared import check_supported
from torch_join import Join, JoinError

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Loop(Generic[T]):
    """A loop over `loader` in a context of its own.

    Args:
        accelerator: Whose context it is.
        loader: What to loop over.
        new_context: Returns the context.

    Attributes:
        context: That of the loop, as long as it is open.
        left: Whether it was left by `break`, so that its context is still open.
    """

    accelerator: accelerate.Accelerator
    loader: Iterable[T]
    new_context: Callable[[], AbstractContextManager[Join]]
    context: AbstractContextManager[Join] | None = None
    left: bool = False

    def __iter__(self) -> Iterator[T]:
        finish(self.accelerator)
        context = self.new_context()
        join = context.__enter__()
        self.context, self.left = context, False
        if check_supported(self.accelerator):  # in a single process no one waits for the context's end
            _leave_at_exit()
            _loops[self.accelerator] = self
        try:
            yield from join.batches(self.loader)
        except GeneratorExit:
            # To wait for others, as the context's end does, or to raise, is not for a generator that is being closed.
            self.left = True
            raise
        except BaseException as error:
            self.leave(error)
            raise
        self.leave()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def leave(self, error: BaseException | None = None) -> None:
        """End the context, by `error` if there is one."""
        context, self.context = self.context, None
        _loops.pop(self.accelerator, None)
        if context is not None:
            context.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))


# The loops whose context is open. Until it ends, Accelerate's functions are replaced by ones that hold the accelerator.
_loops: dict[accelerate.Accelerator, Loop[Any]] = {}


def finish(accelerator: accelerate.Accelerator) -> None:
    """End the context of a loop that was left by `break`."""
    loop = _loops.get(accelerator)
    if loop is not None and loop.left:
        loop.leave()


@cache
def _leave_at_exit() -> None:
    atexit.register(_fail_open_loops)


def _fail_open_loops() -> None:
    """Tell others that may wait for this process that it ends, and why."""
    error = getattr(sys, "last_value", None) or JoinError(
        "The process ended after it had left a loop over join_batches. Call accelerator.end_training() at the end."
    )
    for loop in list(_loops.values()):
        with suppress(BaseException):
            loop.leave(error)
