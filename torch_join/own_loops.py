"""A loop over one loader that is a context of its own, so that no line of it need be indented anew."""

import atexit
import os
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, Generic, NoReturn, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_join._base.errors import DECIDE, ENDS, JoinError, JoinTimeoutError, PeerFailedError, check_all_go_on
from torch_join._compat.ddp import differentiable
from torch_join._compat.torchrun import forget_victim
from torch_join._control.failures import telling_failures
from torch_join._control.rendezvous import open_channel
from torch_join._tail.loop import LoopDriver
from torch_join._tail.nesting import read_ahead
from torch_join._tail.reader import Unbegun

R = TypeVar("R")
T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Loop(Generic[T]):
    """A loop over `loader` in a context of its own.

    Args:
        owner: Whose context it is: an accelerator, a strategy. It has one such context at a time.
        loader: What to loop over.
        new_context: Returns the context, which gives its driver.
        batches: Returns what to loop over, in that context.
        distributed: Whether others may wait for this process to begin the loop, or to end it.
        advice: What ends a loop that was left by `break`, for an error.

    Attributes:
        context: That of the loop, as long as it is open.
        driver: Of that context.
        left: Whether it was left by `break`, so that its context is still open.
        handled: What exception was being handled when it began.
    """

    owner: Hashable
    loader: Iterable[T]
    new_context: Callable[[], AbstractContextManager[LoopDriver]]
    batches: Callable[[LoopDriver, Iterable[T]], Iterable[T]]
    distributed: bool
    advice: str
    context: AbstractContextManager[LoopDriver] | None = None
    driver: LoopDriver | None = None
    left: bool = False
    handled: BaseException | None = None

    def __iter__(self) -> Iterator[T]:
        if self.distributed:
            if dist.group.WORLD is None:
                raise JoinError(
                    "A loop whose ranks serve each other was started without a process group. Call fabric.launch(), or"
                    " make the Accelerator, before the loop, and destroy the group after it."
                )
            _end_at_exit()
            ticket = _unbegun.setdefault(self.owner, Unbegun()).add(
                partial(self._go_through_unasked, ref(dist.group.WORLD))
            )
        return self._go_through(ticket if self.distributed else None)

    def _go_through_unasked(self, world: Callable[[], object]) -> Iterator[T]:
        """Go through a loop that others are in, and that here nobody has asked for a batch: a rank may have none."""
        if world() is dist.group.WORLD:
            with self.new_context() as driver:
                driver.asks = False
                yield from self.batches(driver, self.loader)

    def _go_through(self, ticket: object) -> Iterator[T]:
        if ticket is not None:
            _unbegun[self.owner].begin(ticket)
        finish(self.owner, also_held=True)
        context = self.new_context()
        driver = context.__enter__()
        self.context, self.driver, self.left, self.handled = context, driver, False, sys.exc_info()[1]
        if self.distributed:
            _loops[self.owner] = self
            driver.end_with_loop = self.leave
        try:
            yield from self.batches(driver, self.loader)
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
        if context is None:
            return
        _loops.pop(self.owner, None)
        assert self.driver is not None
        driver, self.driver = self.driver, None
        driver.end_with_loop = None
        ahead = driver.trained_ahead
        try:
            context.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))
        finally:
            driver.tail.refusal = None
        if ahead:
            _refuse_backwards(self.owner, ahead, driver.members.name)

    @property
    def has_next(self) -> bool:
        """Whether there is a batch that was not asked for; the next one is read for this."""
        reader = None if self.driver is None else self.driver.reader
        return reader is not None and reader.has_next()


# By owner, those that have an iterator that has not been asked for a batch yet.
_unbegun: WeakKeyDictionary[Any, Unbegun] = WeakKeyDictionary()
# The loops whose context is open. Until it ends, Accelerate's functions are replaced by ones that hold it.
_loops: dict[Hashable, Loop[Any]] = {}


def finish(owner: Hashable, also_held: bool = False, at_end: bool = False) -> bool:
    """End the context of a loop that was left, before this process does anything else with others.

    Args:
        owner: Whose loop it may be.
        also_held: Whether a loop by `iter` and `next` counts as left that has no batch any more.
        at_end: Whether any does whose iterator is held in a variable: training has ended.

    Returns:
        Whether there was one.
    """
    loop, error = _loops.get(owner), sys.exc_info()[1]
    found = loop is not None and (loop.left or at_end or (also_held and not loop.has_next))
    if loop is not None and found:
        # At the end, in a `finally`, the others hear best what it was; elsewhere an error that is handled is none.
        loop.leave(error if at_end and error is not loop.handled else None)
    if at_end and error is None and owner in _unbegun:
        _unbegun[owner].begin_all()
    return found


# By owner, what refuses backwards of steps whose loop has ended before them, until the next one begins.
_refusals: WeakKeyDictionary[Any, ExitStack] = WeakKeyDictionary()


def _refuse_backwards(owner: Hashable, models: list[nn.Module], rank: int) -> None:
    """Have a backward of these models raise: the context, which would have noticed it, has ended with the loop."""

    def refuse(_: Tensor) -> NoReturn:
        raise read_ahead(rank)

    def after_forward(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in differentiable(output) if torch.is_grad_enabled() else []:
            tensor.register_hook(refuse)  # type: ignore[no-untyped-call]

    _refusals[owner] = hooks = ExitStack()
    for model in models:
        hooks.callback(model.register_forward_hook(after_forward).remove)


_PATIENCE = timedelta(seconds=10)  # at the end of training, where others may have long work of their own left
# Those whose last loop may have been uneven, so that a rank may not know that there is no other; of which world.
_ending: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()


@contextmanager
def begin(owner: Hashable, driver: LoopDriver | None = None) -> Iterator[None]:
    """Put around the begin of a context: training goes on.

    Args:
        owner: Whose context it is.
        driver: Of a context that is around one loop alone, on all ranks.
    """
    may_have_ended = _ending.pop(owner, None) is not None
    if driver is not None:
        # All ranks know alike whether one of them may have ended its training, which says so as a context begins.
        driver.is_one_loop, driver.begins_with_loop = True, not may_have_ended
    _refusals.pop(owner, ExitStack()).close()
    try:
        yield
    except PeerFailedError as error:
        if not may_have_ended:
            raise
        hint = f"{error} If it has ended well, it did so in a loop in which this rank had run out of batches. {DECIDE}"
        raise PeerFailedError(hint, error.rank, error.reason) from error


def may_end(owner: Hashable, driver: LoopDriver) -> None:
    """Note, where a context has ended, that some ranks may go on to the next one, and others to the end."""
    world = dist.group.WORLD
    if world is not None and driver.members.group is world and not driver.was_even:
        _ending[owner] = ref(world)
        _end_at_exit()


def end(owner: Hashable) -> None:
    """End training, where the ranks meet in the place of a next `with`.

    A rank that has run out of batches is not told of a stop that the others decide on in the loop's body. Where they
    end their training, it begins the next loop, and would find them gone. Nobody fails by a rank whose process has
    ended, or that does not come in time: it may have work of its own left.

    Raises:
        JoinError: On all ranks, if one of them begins another loop: it was not told.
    """
    world = _ending.pop(owner, None)
    # In a `finally` this rank fails already.
    if world is None or dist.group.WORLD is None or world() is not dist.group.WORLD or sys.exc_info()[1] is not None:
        return
    channel = open_channel(world(), _PATIENCE)
    try:
        with telling_failures(channel):
            check_all_go_on(channel.gather(ENDS, of=list[str]), channel.global_ranks)
        channel.close(meets=True)
    except JoinTimeoutError:
        pass
    except PeerFailedError as error:
        if DECIDE in error.reason:
            raise
        forget_victim()
    finally:
        channel.close()


def to_the_end(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Return what `function` does: all that a process does that ends without `atexit`, as those of a pool do."""
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        for problem in _end_open_loops(error):
            raise problem from error
        raise
    for problem in _end_open_loops(None):
        raise problem
    return result


@cache
def _end_at_exit() -> None:
    atexit.register(_at_exit)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)
    problems = _end_open_loops(error)
    for problem in problems:
        traceback.print_exception(problem)
    if problems and error is None:  # the interpreter would end well
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end_open_loops(error: BaseException | None) -> list[BaseException]:
    """Finish loops that were left, as the process ends; tell others that may wait for it if it ends by an error.

    Returns:
        What was raised, but for `error` itself.
    """
    problems: list[BaseException] = []

    def attempt(do: Callable[[], object]) -> None:
        try:
            do()
        except BaseException as found:
            if found is not error:
                problems.append(found)

    for loop in list(_loops.values()):
        if error is None and loop.driver is not None:  # where others go on, whose steps this rank would have to follow
            loop.driver.tail.refusal = JoinError(
                "The process left a loop that others continued, and ended. What it did after the loop used outdated"
                f" parameters. Call {loop.advice}, or anything else that processes do together, after the loop."
            )
        attempt(partial(loop.leave, error))
    if error is None:
        for unbegun in list(_unbegun.values()):
            attempt(unbegun.begin_all)
        for owner in list(_ending):
            attempt(partial(end, owner))
    return problems
