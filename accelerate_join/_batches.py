"""A loop over one loader that is a context of its own, so that no line of it need be indented anew."""

import atexit
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import accelerate
import torch.distributed as dist

from accelerate_join._prepared import check_supported
from torch_join import Join, JoinError, PeerFailedError
from torch_join.integration import DECIDE, driver_of, say_farewell

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
        join: What that context has given.
        left: Whether it was left by `break`, so that its context is still open.
        handled: What exception was being handled when it began.
    """

    accelerator: accelerate.Accelerator
    loader: Iterable[T]
    new_context: Callable[[], AbstractContextManager[Join]]
    context: AbstractContextManager[Join] | None = None
    join: Join | None = None
    left: bool = False
    handled: BaseException | None = None

    def __iter__(self) -> Iterator[T]:
        if check_supported(self.accelerator):  # in a single process nobody waits for this one to begin it
            _end_at_exit()
            _unbegun.append((ref(dist.group.WORLD), self))
        return self._go_through()

    def _go_through(self) -> Iterator[T]:
        _begin_unasked(self.accelerator, until=self)
        finish(self.accelerator, also_held=True)
        context = self.new_context()
        join = context.__enter__()
        self.context, self.join, self.left, self.handled = context, join, False, sys.exc_info()[1]
        if check_supported(self.accelerator):  # in a single process no one waits for the context's end
            _loops[self.accelerator] = self
            driver_of(join).end_with_loop = self.leave
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

    def go_through_unasked(self) -> None:
        """Go through it as a rank does whose user has not asked for a batch: there may have been none."""
        with self.new_context() as join:
            driver_of(join).asks = False
            for _ in join.batches(self.loader):
                pass

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def leave(self, error: BaseException | None = None) -> None:
        """End the context, by `error` if there is one."""
        context, self.context = self.context, None
        if context is None:
            return
        _loops.pop(self.accelerator, None)
        assert self.join is not None
        driver, self.join = driver_of(self.join), None
        driver.end_with_loop = None
        try:
            context.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))
        finally:
            driver.tails.refusal = None

    def refuse_to_serve(self, why: BaseException) -> None:
        """From here on, raise `why` on all ranks where others go on, whose steps this rank would have to follow."""
        if self.join is not None:
            driver_of(self.join).tails.refusal = why

    @property
    def has_next(self) -> bool:
        """Whether there is a batch that was not asked for; the next one is read for this."""
        reader = None if self.join is None else driver_of(self.join).reader
        return reader is not None and reader.has_next()


# Those that have an iterator that has not been asked for a batch yet, in order, and of which world.
_unbegun: list[tuple[ref[Any], Loop[Any]]] = []
# The loops whose context is open. Until it ends, Accelerate's functions are replaced by ones that hold the accelerator.
_loops: dict[accelerate.Accelerator, Loop[Any]] = {}


def _begin_unasked(accelerator: accelerate.Accelerator, until: Loop[Any] | None = None) -> None:
    """Go through loops that others are in, and that here nobody has asked for a batch: a rank may have none."""
    mine = [(world, loop) for world, loop in _unbegun if loop.accelerator is accelerator]
    if until is not None:
        ends = next((index for index, (_, loop) in enumerate(mine) if loop is until), -1)
        mine = mine[: ends + 1]
    _unbegun[:] = [one for one in _unbegun if one not in mine]
    for world, loop in mine:
        if loop is not until and world() is dist.group.WORLD:
            loop.go_through_unasked()


def finish(accelerator: accelerate.Accelerator, also_held: bool = False, at_end: bool = False) -> bool:
    """End the context of a loop that was left, before this process does anything else with others.

    Args:
        accelerator: Whose loop it may be.
        also_held: Whether a loop by `iter` and `next` counts as left that has no batch any more.
        at_end: Whether any does whose iterator is held in a variable: training has ended.

    Returns:
        Whether there was one.
    """
    loop, error = _loops.get(accelerator), sys.exc_info()[1]
    found = loop is not None and (loop.left or at_end or (also_held and not loop.has_next))
    if loop is not None and found:
        # At the end, in a `finally`, the others hear best what it was; elsewhere an error that is handled is none.
        loop.leave(error if at_end and error is not loop.handled else None)
    if at_end and error is None:
        _begin_unasked(accelerator)
    return found


_PATIENCE = timedelta(seconds=10)  # at the end of training, where others may have long work of their own left
# Those whose last loop may have been uneven, so that a rank may not know that there is no other; of which world.
_ending: WeakKeyDictionary[accelerate.Accelerator, ref[Any]] = WeakKeyDictionary()


@contextmanager
def begin(accelerator: accelerate.Accelerator) -> Iterator[None]:
    """Put around the begin of a context: training goes on."""
    may_have_ended = _ending.pop(accelerator, None) is not None
    try:
        yield
    except PeerFailedError as error:
        if not may_have_ended:
            raise
        hint = f"{error} If it has ended well, it did so in a loop in which this rank had run out of batches. {DECIDE}"
        raise PeerFailedError(hint, error.rank, error.reason) from error


def may_end(accelerator: accelerate.Accelerator, join: Join) -> None:
    """Note, where a context has ended, that some ranks may go on to the next one, and others to the end."""
    driver, world = driver_of(join), dist.group.WORLD
    if world is not None and driver.members.group is world and not driver.was_even:
        _ending[accelerator] = ref(world)
        _end_at_exit()


def end(accelerator: accelerate.Accelerator) -> None:
    """End training.

    Raises:
        JoinError: On all ranks, if one of them begins another loop: it was not told.
    """
    world = _ending.pop(accelerator, None)
    # In a `finally` this rank fails already.
    if world is not None and dist.group.WORLD is not None and world() is dist.group.WORLD and sys.exc_info()[1] is None:
        say_farewell(world(), _PATIENCE)


@cache
def _end_at_exit() -> None:
    atexit.register(_end_open_loops)


def _end_open_loops() -> None:
    """Finish loops that were left, as the process ends; tell others that may wait for it if it ends by an error."""
    error = getattr(sys, "last_value", None)
    for loop in list(_loops.values()):
        if error is None:
            loop.refuse_to_serve(
                JoinError(
                    "The process ended after it had left a loop over join_batches, which others went on with, so that"
                    " what it did after the loop was done with old parameters. Call accelerator.end_training(), or"
                    " anything else that processes do together, after the loop."
                )
            )
        _at_exit(partial(loop.leave, error), error)
    for accelerator in [] if error is not None else [loop.accelerator for _, loop in _unbegun]:
        _at_exit(partial(_begin_unasked, accelerator), None)
    for accelerator in [] if error is not None else list(_ending):
        _at_exit(partial(end, accelerator), None)


def _at_exit(do: Callable[[], object], error: BaseException | None) -> None:
    """Do something as the process ends, by an `error` or without one; it fails if this does."""
    try:
        do()
    except BaseException as found:
        if found is error:
            return
        traceback.print_exception(found)
        if error is None:  # which the interpreter would end well
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
