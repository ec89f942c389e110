"""The life of a `Join` on one rank: where this rank's own code is. What it does for the others is its `Role`.

`docs/how-it-works.md` draws both; a test holds the drawing and these tables together.
"""

from enum import Enum

from torch_join._base.membership import Role


class Place(Enum):
    """Where this rank's own code is, as far as its `Join` can know."""

    OUTSIDE = "outside"  # in the `with`, before any loop
    LOOP = "loop"  # in a loop over `batches`
    LEFT = "left"  # behind one that it has left by `break`, which the others do not know yet
    FINISHING = "finishing"  # as before, and about to do something with others: it finishes that loop first
    ENDED = "ended"  # behind one that has ended on all ranks
    PLAIN = "plain"  # in, or behind, a loop without `batches`, where the ranks meet at a model's forward


# From where to where, and what happens there.
PLACES: dict[tuple[Place, Place], str] = {
    (Place.OUTSIDE, Place.LOOP): "batches",
    (Place.ENDED, Place.LOOP): "batches",
    (Place.PLAIN, Place.LOOP): "batches",
    (Place.OUTSIDE, Place.PLAIN): "forward",
    (Place.ENDED, Place.PLAIN): "forward",
    (Place.PLAIN, Place.PLAIN): "forward",
    (Place.LOOP, Place.LEFT): "break",
    (Place.LOOP, Place.ENDED): "all have joined",
    (Place.LEFT, Place.FINISHING): "anything with others",
    (Place.FINISHING, Place.ENDED): "all have joined",
    (Place.FINISHING, Place.OUTSIDE): "an error",
}

ROLES: dict[tuple[Role, Role], str] = {
    (Role.EVEN, Role.TAIL): "another rank has no input",
    (Role.EVEN, Role.SERVING): "this rank has no input",
    (Role.TAIL, Role.EVEN): "the step or the loop ends, or this rank joins",
    (Role.SERVING, Role.EVEN): "the step or the loop ends",
}


def move(here: Place, there: Place) -> Place:
    """Return `there`, if one can get there.

    Raises:
        RuntimeError: One cannot: a mistake of this package.
    """
    if (here, there) not in PLACES:
        raise RuntimeError(f"A Join cannot go from {here.value!r} to {there.value!r}. Please report this.")
    return there
