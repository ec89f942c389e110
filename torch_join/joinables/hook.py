"""Callables of ours in users' objects."""

from collections.abc import Callable
from typing import Any


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Hook:
    """A callable that stays with its object: a copy or a pickle of that has another one in its place.

    Args:
        call: What to call.
        copied: What copies have instead; a method of the object becomes the copy's own.
    """

    def __init__(self, call: Callable[..., Any], copied: Callable[..., Any] = _nothing) -> None:
        self._call = call
        self._copied = copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _same, (self._copied,)


def _same(copied: Any) -> Any:
    return copied
