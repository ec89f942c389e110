"""Whether a generator that is being closed was left on purpose, or by an exception.

Python closes a generator in the same way after a `break` and when an exception leaves the `for` loop over it, and hides
that exception meanwhile. Only the current instruction of the frame that drops the generator differs: an instruction
that raises never just drops a value.
"""

import dis
import sys
from types import FrameType

# Those of `break`, `return` and `del`, and of the end of a `zip` or an `islice` around the generator. A store is not
# among them: at the end of an `except` it drops the exception, whose frames may hold the generator (Python 3.11). A
# `zip` whose other iterator raises looks like the end of a `zip`; so does a `map` whose function raises.
_DROPS = {"POP_TOP", "POP_ITER", "END_FOR", "FOR_ITER", "DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "DELETE_DEREF"}
# Those of an outer generator that is being closed too.
_YIELDS = {"YIELD_VALUE", "YIELD_FROM", "RESUME", "SEND"}


def is_left_on_purpose() -> bool:
    """Return whether the generator that calls this is being closed on purpose, not by an exception."""
    frame = sys._getframe(1).f_back
    while frame is not None and _instruction(frame) in _YIELDS:
        frame = frame.f_back
    return frame is not None and _instruction(frame) in _DROPS


def _instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]
