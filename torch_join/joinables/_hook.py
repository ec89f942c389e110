"""Hooks of ours in users' models."""

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook that stays with its model: in place of it, a copy or a pickle of the model has one that does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*_: Any, **__: Any) -> None:
    pass
