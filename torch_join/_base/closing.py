"""Whether a generator that is being closed was left on purpose, or by an exception.

Python closes a generator in the same way after a `break`, and when an exception passes through the `for` loop over it;
meanwhile it hides that exception. The difference is the current instruction of the code that drops the generator: an
instruction that raises is never one that only drops a value.
"""

import dis
import sys
from types import FrameType

# `break` and `return`; the end of a `zip` or an `islice` around it; `del`. Not a store: at the end of an `except`, a
# store drops the exception, and so the frames that may hold the generator. Seen in Python 3.11. The end of a `zip`
# looks the same if its other iterator raises, and so does that of a `map` whose function raises.
_DROPS = {"POP_TOP", "POP_ITER", "END_FOR", "FOR_ITER", "DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "DELETE_DEREF"}
# The instructions of a generator around it that is itself being closed.
_YIELDS = {"YIELD_VALUE", "YIELD_FROM", "RESUME", "SEND"}


def is_left_on_purpose() -> bool:
    """Return, in the frame of a generator that is being closed, whether this is not due to an exception."""
    frame = sys._getframe(1).f_back
    while frame is not None and _instruction(frame) in _YIELDS:
        frame = frame.f_back
    return frame is not None and _instruction(frame) in _DROPS


def _instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]
