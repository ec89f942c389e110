"""The records with which active ranks announce what they do, and what a joined rank takes for one."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch_join._base import compat as _compat
from torch_join._collectives.call import Call
from torch_join._control import codec as _codec

END, DONE, COLLECTIVE, TAIL = "end", "done", "collective", "tail"

Announcement = tuple[int, str, Any]  # by which part (-1: none), what, and what else others need to know
ASIDE = "aside/{}/{}"  # before which record of the log, and which one of those there
RECORD = tuple[list[Announcement], tuple[int, ...]]  # and who is active
_KINDS = {
    COLLECTIVE: Call,
    TAIL: list[int],  # the synced backwards of each model
    DONE: tuple[bool, bool],  # a step in lockstep; whether its backward is one too, and has a loss
    # The parts' closing messages, the place in the beats, whose state all take, whether backwards go in pieces.
    END: tuple[list[Any], tuple[int, list[tuple[int, int, int]]], int, bool],
}
_MEETINGS = ("all_reduce", "all_gather", "all_gather_single", "all_gather_object", "barrier")


def record(said: Iterable[_codec.Encoded], active: tuple[int, ...]) -> _codec.Encoded:
    """Return the record of what these ranks announce."""
    return _codec.in_tuple(_codec.in_list(said), _codec.encode(active))


def check_record(said: Sequence[Announcement], active: tuple[int, ...], parts: int, before: tuple[int, ...]) -> None:
    """Check what a record says.

    Args:
        said: What is announced.
        active: By whom.
        parts: The number of parts.
        before: Who was active in the record before.

    Raises:
        JoinError: No active rank can have written it.
    """
    known = all(-1 <= index < parts for index, _, _ in said)
    if not (said and known and set(active) <= set(before)):
        raise _codec.foreign("a record of the tail", f"{_codec.brief(said)} of ranks {_codec.brief(active)}")


def is_record(kind: str, payload: Any, expected: str) -> bool:
    """Whether an announcement that is no part's is of this kind.

    Raises:
        JoinError: It is of none, or not as such a one is.
    """
    try:
        _codec.check(payload, _KINDS[kind])
    except (_codec.Malformed, KeyError) as problem:
        raise _codec.foreign("a record of the tail", problem) from None
    return kind == expected


def wait_if_synchronizing(call: Call) -> bool:
    """Wait for a collective, if nobody can leave it before all have come; of nothing, backends exchange nothing."""
    if call.operation not in _MEETINGS or any(math.prod(spec.shape) == 0 for spec in call.inputs):
        return False
    _compat.wait_for_device(call.device)
    return True
