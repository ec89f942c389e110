"""The records in which active ranks announce their actions, and the checks that a joined rank makes on them."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from torch_join._collectives.call import Call
from torch_join._control import codec as _codec

END, DONE, COLLECTIVE, TAIL = "end", "done", "collective", "tail"

Announcement = tuple[int, str, Any]  # the participant's index (-1: none), the kind, and the payload
ASIDE = "aside/{}/{}"  # the number of the log's next record, and the index of the aside announcement before it
RECORD = tuple[list[Announcement], tuple[int, ...]]  # the announcements and the active ranks
_KINDS = {
    COLLECTIVE: Call,
    TAIL: list[int],  # the synced backwards of each model
    DONE: tuple[bool, bool, list[Any]],  # a lockstep step: whether it has a backward, and a loss; the front end's data
    # Closing messages, the rank whose state is handed over, whether backwards run in pieces, whether no step was run.
    END: tuple[list[Any], int, bool, bool],
}


def record(said: Iterable[_codec.Encoded], active: tuple[int, ...]) -> _codec.Encoded:
    """Return the record of the active ranks' announcements."""
    return _codec.in_pair(said, _ranks(active))


@lru_cache(maxsize=8)
def _ranks(active: tuple[int, ...]) -> _codec.Encoded:
    return _codec.encode(active)


def check_record(
    said: Sequence[Announcement], active: tuple[int, ...], participants: int, before: tuple[int, ...]
) -> None:
    """Check the contents of a record.

    Args:
        said: The announcements.
        active: The ranks that made them.
        participants: The number of participants.
        before: The ranks that were active in the previous record.

    Raises:
        JoinError: No active rank can have written this record.
    """
    known = all(-1 <= index < participants for index, _, _ in said)
    if not (known and set(active) <= set(before)):
        raise _codec.foreign("a record of the tail", f"{_codec.brief(said)} of ranks {_codec.brief(active)}")


def is_record(kind: str, payload: Any, expected: str) -> bool:
    """Whether an announcement without a participant is of this kind.

    Raises:
        JoinError: Its kind is unknown, or its payload is malformed.
    """
    try:
        _codec.check(payload, _KINDS[kind])
    except (_codec.Malformed, KeyError) as problem:
        raise _codec.foreign("a record of the tail", problem) from None
    return kind == expected
