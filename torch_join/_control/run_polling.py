"""Doing in another thread what torch may wait for without an end, and looking meanwhile whether it makes sense."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOOKS_EVERY = 0.05  # seconds


def run_polling(act: Callable[[], T], look: Callable[[], None]) -> T:
    """Return what `act` returns, or raise what it raises.

    Args:
        act: Called in a thread, which is left to itself where `look` raises.
        look: Called again and again until then.
    """
    results: list[T] = []
    errors: list[BaseException] = []  # not a future: it would keep the frames that wait for it, and what these hold

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="torch_join beside", daemon=True)
    thread.start()
    while True:
        thread.join(_LOOKS_EVERY)
        if results:
            return results[0]
        if errors:
            raise errors.pop()
        look()
