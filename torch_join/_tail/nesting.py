"""Checks against conflicts between nested `Join`s, and against loops that are not allowed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch_join._base.errors import JoinError, name_ranks


class _Entered(NamedTuple):
    driver: object
    objects: Sequence[Any]  # passed to the `Join`
    in_loop: Callable[[], bool]


_entered: list[_Entered] = []


def enter(driver: object, objects: Sequence[Any], in_loop: Callable[[], bool]) -> None:
    """Note that a driver's `Join` is entered.

    Raises:
        JoinError: The `Join` is already entered, or shares an object with another one, or is inside another one's loop.
    """
    for other in _entered:
        if other.driver is driver:
            raise JoinError(
                "This Join is already active. Enter it again after its `with` has ended, or create another Join."
            )
        shared = [thing for thing in objects if any(thing is one for one in other.objects)]
        if shared:
            raise JoinError(
                f"{type(shared[0]).__name__} was passed to two nested Joins, and both would announce its calls. Use a"
                " single Join for everything in the loop, or two Joins one after the other."
            )
        if other.in_loop():
            raise JoinError(
                "A Join was entered inside another Join's loop, which finished ranks do not run, so they would never"
                " enter it. Pass everything to a single Join around the loop."
            )
    _entered.append(_Entered(driver, objects, in_loop))


def is_entered(driver: object) -> bool:
    """Whether the driver's `Join` is entered."""
    return any(driver is other.driver for other in _entered)


def check_entered(driver: object, what: str = "A loop over join.batches was started") -> None:
    """Raise if the driver's `Join` is not entered.

    Raises:
        JoinError: The `Join` is not entered.
    """
    if not is_entered(driver):
        raise JoinError(
            f"{what} outside its `with`, where finished ranks do not follow the others. Move it inside: `with"
            " Join([...]) as join: for batch in join.batches(loader): ...`."
        )


def leave(driver: object) -> None:
    """Note that a driver's `Join` has ended; does nothing if it was not entered."""
    _entered[:] = [other for other in _entered if other.driver is not driver]


def nested() -> JoinError:
    """Return the error for a loop inside another loop."""
    return JoinError(
        "A loop over join.batches was started before another one had ended, so finished ranks cannot follow. If a"
        " variable (a progress bar, for example) still holds a loop that was left with `break`, `del` the variable."
        " Otherwise start one loop after the other, or loop over both at once: join.batches(zip(a, b))."
    )


def left_behind() -> JoinError:
    """Return the error for a loop that continues after its end."""
    return JoinError(
        "A loop over join.batches continued after its `with` had ended or another loop had started. Start a new loop."
    )


def left_amid(rank: int, step: int) -> JoinError:
    """Return the error for a `break` after taking a batch and before the model's forward, with `may_break=True`."""
    return JoinError(
        f"Rank {rank} left its loop at step {step}, after taking a batch but before the model's forward, on which the"
        " other ranks already rely. Put the `break` at the end of a step."
    )


def refuse_unasked(ranks: Sequence[int]) -> None:
    """Raise if there are ranks that have batches in a loop but never asked for one.

    Raises:
        JoinError: `ranks` is not empty.
    """
    if ranks:
        raise JoinError(
            f"{name_ranks(ranks).capitalize()} created an iterator over join.batches, but never took any of its"
            " batches while other ranks iterated over theirs. Call next() for each batch, or leave such loops at the"
            " same step on all ranks."
        )


def late_backward(rank: int) -> JoinError:
    """Return the error for a backward whose forward ran in a loop that has ended on all ranks."""
    return JoinError(
        f"Rank {rank} ran a backward whose forward belongs to an uneven loop over join.batches that has ended. The"
        " other ranks have moved on, so its gradients would be averaged with those of later backwards. Run each"
        " batch's backward before you request the next batch."
    )


def read_ahead(rank: int) -> JoinError:
    """Return the error for a backward after the end of a loop that asked for a second batch before any forward."""
    return JoinError(
        f"Rank {rank} ran a backward after the end of its loop over join.batches: a prefetcher requests a batch"
        " before the model has seen the previous one, so the other ranks would miss the last batches of this rank."
        " Put the prefetcher inside: join.batches(prefetcher(loader)), fabric.strategy.batches(prefetcher(loader))."
        " Run any other backward in a loop of its own."
    )
