"""Attributes that are other ones for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def setting(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object, a class or a module inside; then it has its own again, or none where it had none."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
