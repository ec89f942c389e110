"""Runs a torch call that may block forever in another thread, and meanwhile checks whether to give up."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOOKS_EVERY = 0.05  # seconds


def run_polling(act: Callable[[], T], check: Callable[[], None]) -> T:
    """Return what `act` returns, or raise what it raises.

    Args:
        act: Called in another thread, which continues to run if `check` raises.
        check: Called repeatedly until `act` has returned.
    """
    results: list[T] = []
    errors: list[BaseException] = []  # a future would keep the waiting frames and their objects alive

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
        check()
