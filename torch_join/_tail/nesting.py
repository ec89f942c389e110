"""Checks against conflicts between nested `Join`s, and against loops that are not allowed."""

from typing import Any

from torch_join._base.errors import JoinError

_entered: list[Any] = []  # the drivers whose `Join` is entered


def enter(driver: Any) -> None:
    """Note that a `LoopDriver`'s `Join` is entered.

    Raises:
        JoinError: The `Join` is already entered, or shares an object with another one, or is inside another one's loop.
    """
    for other in _entered:
        if other is driver:
            raise JoinError(
                "This Join is already active. Enter it again after its `with` has ended, or create another Join."
            )
        shared = [thing for thing in driver.given if any(thing is one for one in other.given)]
        if shared:
            raise JoinError(
                f"{type(shared[0]).__name__} was passed to two nested Joins, and both would announce its calls. Use a"
                " single Join for everything in the loop, or two Joins one after the other."
            )
        if other.in_loop:
            raise JoinError(
                "A Join was entered inside another Join's loop, which finished ranks do not run, so they would never"
                " enter it. Pass everything to a single Join around the loop."
            )
    _entered.append(driver)


def is_entered(driver: object) -> bool:
    """Whether the driver's `Join` is entered."""
    return any(driver is other for other in _entered)


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
    _entered[:] = [other for other in _entered if other is not driver]


def left_behind() -> JoinError:
    """Return the error for a loop that continues after its end."""
    return JoinError(
        "A loop over join.batches continued after its `with` had ended or another loop had started. Start a new loop."
    )


def read_ahead(rank: int) -> JoinError:
    """Return the error for a backward after the end of a loop that asked for a second batch before any forward."""
    return JoinError(
        f"Rank {rank} ran a backward after the end of its loop over join.batches: a prefetcher requests a batch"
        " before the model has seen the previous one, so the other ranks would miss the last batches of this rank."
        " Put the prefetcher inside: join.batches(prefetcher(loader)), fabric.strategy.batches(prefetcher(loader))."
        " Run any other backward in a loop of its own."
    )
