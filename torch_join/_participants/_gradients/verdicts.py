"""A rank's report on its gradients."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from torch_join._control.codec import closed, foreign

CLEARED, KEPT, CHANGED, UNKNOWN = "cleared", "kept", "changed", "unknown"
NONE, ZERO, FULL = "none", "zero", "full"


@closed("gradient")
class State(NamedTuple):
    """What has happened to one gradient.

    Attributes:
        verdict: `CLEARED`, `KEPT`, `CHANGED` by hand, or `UNKNOWN`.
        content: The gradient's current content: `NONE`, `ZERO`, or `FULL` for anything else.
        norm: The gradient's 1-norm, if it is the kept average of all ranks.
    """

    verdict: str
    content: str
    norm: float | None = None


# Runs of equal states, with their lengths: usually all states of a model are equal.
Runs = list[tuple[State, int]]


def runs_of(states: Iterable[State]) -> Runs:
    """Return the states as runs, the form in which ranks send them."""
    return [(state, len([*same])) for state, same in groupby(states)]


def states_of(runs: Sequence[tuple[State, int]], count: int) -> list[State]:
    """Return the states that were sent as `runs`.

    Raises:
        JoinError: `runs` does not hold `count` states.
    """
    if any(number < 1 for _, number in runs) or sum(number for _, number in runs) != count:
        raise foreign("the state of gradients", f"{runs} in place of those of {count} parameters")
    return [state for state, number in runs for _ in range(number)]


def common_verdict(verdicts: Iterable[str]) -> str:
    """Return `CLEARED` or `KEPT` if there is evidence for one and none for the other, else `UNKNOWN`."""
    found = {*verdicts} & {CLEARED, KEPT}
    return found.pop() if len(found) == 1 else UNKNOWN
