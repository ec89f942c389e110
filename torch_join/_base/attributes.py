"""Replaces attributes for a while."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import getattr_static
from typing import Any


@contextmanager
def setting(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object, a class or a module inside the `with`; afterwards restore or remove them."""
    properties = [name for name in attributes if hasattr(getattr_static(type(owner), name, None), "__set__")]
    before = {name: getattr(owner, name) for name in properties}
    before |= {name: vars(owner)[name] for name in attributes if name not in before and name in vars(owner)}
    done = []
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
            done.append(name)
        yield
    finally:
        for name in done:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def replace(owner: Any, **attributes: Any) -> Callable[[], None]:
    """Set attributes as `setting` does; return a function that restores them."""
    inside = ExitStack()
    inside.enter_context(setting(owner, **attributes))
    return inside.close
