"""Whether a generator that is being closed was left on purpose, or by an exception.

Python closes a generator in the same way after a `break`, and when an exception passes through the `for` that goes
through it; it hides that exception meanwhile. What differs is the instruction at which the code stands that drops the
generator: one that raises is never one of those that do nothing but drop a value.
"""

import dis
import sys
from types import FrameType

# `break` and `return`; the end of a `zip` or an `islice` around it; `del`. Not a store: at the end of an `except` a
# store drops the exception, and with it the frames that may hold the generator. Seen in Python 3.11. What cannot be
# told from the end of a `zip` is one whose other iterator raises, and a `map` whose function does.
_DROPS = {"POP_TOP", "POP_ITER", "END_FOR", "FOR_ITER", "DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "DELETE_DEREF"}
# Where a generator around it stands that is itself being closed.
_YIELDS = {"YIELD_VALUE", "YIELD_FROM", "RESUME", "SEND"}


def is_left_on_purpose() -> bool:
    """Return, in a generator that is being closed, whether it was no exception; call it in its own frame."""
    frame = sys._getframe(1).f_back
    while frame is not None and _instruction(frame) in _YIELDS:
        frame = frame.f_back
    return frame is not None and _instruction(frame) in _DROPS


def _instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]
