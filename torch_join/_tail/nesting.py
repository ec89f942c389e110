"""Several `Join`s of one process at the same time."""

from typing import TYPE_CHECKING

from torch_join._base.errors import JoinError

if TYPE_CHECKING:
    from torch_join.join import Join

_entered: list["Join"] = []


def enter(join: "Join") -> None:
    """Note that `join` is entered.

    Raises:
        JoinError: It is already, or another one that is entered holds something of it or is in its loop.
    """
    for other in _entered:
        if other is join:
            raise JoinError("This Join is entered already. Enter it again after its `with`, or make another one.")
        shared = [thing for thing in join._objects if any(thing is one for one in other._objects)]
        if shared:
            raise JoinError(
                f"{type(shared[0]).__name__} was given to two Joins of which one is entered inside the other, and both"
                " would announce what it does. Use one Join for everything in the loop, or one after the other."
            )
        if other._in_loop:
            raise JoinError(
                "A Join was entered inside a loop of another one, and ranks that have joined cannot follow: they wait"
                " for the loop's end. Give everything to one Join around the loop."
            )
    _entered.append(join)


def is_entered(join: object) -> bool:
    """Whether `join` is."""
    return any(join is other for other in _entered)


def check_entered(join: object) -> None:
    """Raise if `join` is not entered.

    Raises:
        JoinError: It is not.
    """
    if not is_entered(join):
        raise JoinError(
            "A loop over join.batches was begun outside of its `with`, where no rank serves another. Put it inside:"
            " `with Join([...]) as join: for batch in join.batches(loader): ...`."
        )


def leave(join: "Join") -> None:
    """Note that `join` is left; does nothing if it was not entered."""
    _entered[:] = [other for other in _entered if other is not join]
