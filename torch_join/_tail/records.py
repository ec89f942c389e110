"""The records with which active ranks announce what they do, and what a joined rank takes for one."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from torch_join._collectives.call import Call
from torch_join._control import codec as _codec

END, DONE, COLLECTIVE, TAIL = "end", "done", "collective", "tail"

Announcement = tuple[int, str, Any]  # by which participant (-1: none), what, and what else others need to know
ASIDE = "aside/{}/{}"  # before which record of the log, and which one of those there
RECORD = tuple[list[Announcement], tuple[int, ...]]  # and who is active
_KINDS = {
    COLLECTIVE: Call,
    TAIL: list[int],  # the synced backwards of each model
    DONE: tuple[bool, bool, list[Any]],  # a step in lockstep: is its backward one, has it a loss; the front end's
    # Closing messages, whose state all take, if backwards go in pieces, if nobody has made a step in this tail.
    END: tuple[list[Any], int, bool, bool],
}


def record(said: Iterable[_codec.Encoded], active: tuple[int, ...]) -> _codec.Encoded:
    """Return the record of what these ranks announce."""
    return _codec.in_pair(said, _ranks(active))


@lru_cache(maxsize=8)
def _ranks(active: tuple[int, ...]) -> _codec.Encoded:
    return _codec.encode(active)


def check_record(
    said: Sequence[Announcement], active: tuple[int, ...], participants: int, before: tuple[int, ...]
) -> None:
    """Check what a record says.

    Args:
        said: What is announced.
        active: By whom.
        participants: How many there are.
        before: Who was active in the record before.

    Raises:
        JoinError: No active rank can have written it.
    """
    known = all(-1 <= index < participants for index, _, _ in said)
    if not (known and set(active) <= set(before)):
        raise _codec.foreign("a record of the tail", f"{_codec.brief(said)} of ranks {_codec.brief(active)}")


def is_record(kind: str, payload: Any, expected: str) -> bool:
    """Whether an announcement that is no participant's is of this kind.

    Raises:
        JoinError: It is of none, or not as such a one is.
    """
    try:
        _codec.check(payload, _KINDS[kind])
    except (_codec.Malformed, KeyError) as problem:
        raise _codec.foreign("a record of the tail", problem) from None
    return kind == expected
