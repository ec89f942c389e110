"""A loop over one loader that opens and closes a context by itself, so that user code needs no `with`."""

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

from torch_join._base.errors import (
    DECIDE,
    ENDS,
    JoinError,
    JoinTimeoutError,
    PeerFailedError,
    check_all_go_on,
    shorten_traceback,
)
from torch_join._compat.ddp import differentiable
from torch_join._compat.launchers import forget_victim
from torch_join._control.failures import telling_failures
from torch_join._control.rendezvous import open_channel
from torch_join._tail.loop import LoopDriver
from torch_join._tail.nesting import read_ahead
from torch_join._tail.reader import Unbegun
from torch_join.join import Join

R = TypeVar("R")
T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Loop(Generic[T]):
    """A loop over `loader`, with a context around it.

    Args:
        owner: The accelerator or strategy that the context belongs to. It has one such context at a time.
        loader: The loader.
        new_context: Returns the context, which yields its `Join`.
        batches: Returns the iterable to loop over in that context.
        distributed: Whether other processes may wait for this one to start or to end the loop.
        advice: The call that ends a loop left by `break`, for errors.

    Attributes:
        context: The loop's context, while it is open.
        driver: The driver of that context.
        left: Whether the loop was left by `break`, so that its context is still open.
        handled: The exception that was being handled when the loop started.
    """

    owner: Hashable
    loader: Iterable[T]
    new_context: Callable[[], AbstractContextManager[Join]]
    batches: Callable[[Join, Iterable[T]], Iterable[T]]
    distributed: bool
    advice: str
    context: AbstractContextManager[Join] | None = None
    driver: LoopDriver | None = None
    left: bool = False
    handled: BaseException | None = None

    def __iter__(self) -> Iterator[T]:
        if self.distributed:
            if dist.group.WORLD is None:
                raise JoinError(
                    "A loop that joins was started without a process group. Call fabric.launch(), or create the"
                    " Accelerator, before the loop, and destroy the group after it."
                )
            _end_at_exit()
            ticket = _unbegun.setdefault(self.owner, Unbegun()).add(
                partial(self._go_through_unasked, ref(dist.group.WORLD))
            )
        return self._go_through(ticket if self.distributed else None)

    def _go_through_unasked(self, world: Callable[[], object]) -> Iterator[T]:
        """Run a loop that other ranks have started, but that this rank's code never asked for a batch."""
        if world() is dist.group.WORLD:
            with self.new_context() as join:
                join._driver.asks = False
                yield from self.batches(join, self.loader)

    def _go_through(self, ticket: object) -> Iterator[T]:
        if ticket is not None:
            _unbegun[self.owner].begin(ticket)
        finish(self.owner, also_held=True)
        context = self.new_context()
        join = context.__enter__()
        self.context, self.driver, self.left, self.handled = context, join._driver, False, sys.exc_info()[1]
        if self.distributed:
            _loops[self.owner] = self
            join._driver.end_with_loop = self.leave
        try:
            yield from self.batches(join, self.loader)
        except GeneratorExit:
            # A generator that is being closed must not raise or wait for other ranks, as the end of the context does.
            self.left = True
            raise
        except BaseException as error:
            self.leave(error)
            shorten_traceback(error)
            raise
        self.leave()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def leave(self, error: BaseException | None = None) -> None:
        """End the context, with `error` if there is one."""
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
        """Whether the loader has another batch; this reads it ahead."""
        reader = None if self.driver is None else self.driver.reader
        return reader is not None and reader.has_next()


# By owner, the loops whose iterator has not been asked for a batch yet.
_unbegun: WeakKeyDictionary[Any, Unbegun] = WeakKeyDictionary()
# By owner, the loop with an open context. The functions that replace Accelerate's hold the context until it ends.
_loops: dict[Hashable, Loop[Any]] = {}


def finish(owner: Hashable, also_held: bool = False, at_end: bool = False) -> bool:
    """End the context of a loop that was left, before this process communicates with others again.

    Args:
        owner: The loop's owner.
        also_held: Whether to treat a loop driven by `iter` and `next` as exited once it has no more batches.
        at_end: Whether to treat every open loop as exited, because training has ended.

    Returns:
        Whether there was such a loop.
    """
    loop, error = _loops.get(owner), sys.exc_info()[1]
    found = loop is not None and (loop.left or at_end or (also_held and not loop.has_next))
    if loop is not None and found:
        # At the end of training, in a `finally`, other ranks need the error. Elsewhere, user code has caught it.
        loop.leave(error if at_end and error is not loop.handled else None)
    if at_end and error is None and owner in _unbegun:
        _unbegun[owner].begin_all()
    return found


# By owner, the hooks that make a backward raise between the end of its loop and the start of the next loop.
_refusals: WeakKeyDictionary[Any, ExitStack] = WeakKeyDictionary()


def _refuse_backwards(owner: Hashable, models: list[nn.Module], rank: int) -> None:
    """Make a backward of these models raise, since the context that would have noticed it has ended with the loop."""

    def refuse(_: Tensor) -> NoReturn:
        raise read_ahead(rank)

    def after_forward(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in differentiable(output) if torch.is_grad_enabled() else []:
            tensor.register_hook(refuse)  # type: ignore[no-untyped-call]

    _refusals[owner] = hooks = ExitStack()
    for model in models:
        hooks.callback(model.register_forward_hook(after_forward).remove)


_PATIENCE = timedelta(seconds=10)  # how long `end` waits for other ranks, which may still have long work to do
# By owner, the world of the last loop, if that was uneven, so that a rank may expect another loop.
_ending: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()


@contextmanager
def begin(owner: Hashable, driver: LoopDriver | None = None) -> Iterator[None]:
    """Wrap what starts a context: starting one shows that training continues.

    Args:
        owner: The owner of the context.
        driver: The driver, if the context contains exactly one loop on every rank.
    """
    may_have_ended = _ending.pop(owner, None) is not None
    if driver is not None:
        # All ranks know whether one of them may have ended training. That rank sends `ENDS` at the start of a context.
        driver.is_one_loop, driver.begins_with_loop = True, not may_have_ended
    _refusals.pop(owner, ExitStack()).close()
    try:
        yield
    except PeerFailedError as error:
        if not may_have_ended:
            raise
        hint = f"{error} If it ended without an error, it did so in a loop in which this rank had finished. {DECIDE}"
        raise PeerFailedError(hint, error.rank, error.reason) from error


def may_end(owner: Hashable, driver: LoopDriver) -> None:
    """Record, at the end of a context, that some ranks may start another one while others end training."""
    world = dist.group.WORLD
    if world is not None and driver.members.group is world and not driver.was_even:
        _ending[owner] = ref(world)
        _end_at_exit()


def end(owner: Hashable) -> None:
    """End training. The ranks synchronize here, since no later `with` does it.

    A rank that has run out of batches does not run the loop's body, so it does not see others decide there to stop. It
    would start the next loop while they end training. A rank whose process has ended, or that does not come in time, is
    no error here: it may have other work to do.

    Raises:
        JoinError: On all ranks, if one of them starts another loop because it did not learn of the stop.
    """
    world = _ending.pop(owner, None)
    # In a `finally` that an exception passes through, this rank fails anyway.
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
    """Run `function` as the whole work of a process that skips `atexit` (a pool's worker), and return its result."""
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
    if problems and error is None:  # else the interpreter would exit with status 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end_open_loops(error: BaseException | None) -> list[BaseException]:
    """Finish loops that were left, as the process ends. If it ends with an error, report that to waiting ranks.

    Returns:
        The errors raised, except `error` itself.
    """
    problems: list[BaseException] = []

    def attempt(do: Callable[[], object]) -> None:
        try:
            do()
        except BaseException as found:
            if found is not error:
                problems.append(found)

    for loop in list(_loops.values()):
        if error is None and loop.driver is not None:  # if others continue, this rank would have to follow their steps
            loop.driver.tail.refusal = JoinError(
                "This process left a loop early and exited while the others continued, so its parameters after the loop"
                f" were outdated. Call {loop.advice}, or another operation that all processes run, after the loop."
            )
        attempt(partial(loop.leave, error))
    if error is None:
        for unbegun in list(_unbegun.values()):
            attempt(unbegun.begin_all)
        for owner in list(_ending):
            attempt(partial(end, owner))
    return problems
