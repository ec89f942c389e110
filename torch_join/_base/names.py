"""Whether a framework still has the private names that this project relies on.

Compat modules say which, as they are imported. What has gone is told by one error, which says what was seen to work,
and not by an `AttributeError` from inside of a hook, in the midst of a training.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from types import FunctionType
from typing import Any

from torch_join._base.errors import UnsupportedError


def check_names(framework: str, seen: str, needed: Mapping[Any, str]) -> None:
    """Check that a framework has what is needed of it.

    Args:
        framework: The name of its package.
        seen: The versions that were seen to have all of it.
        needed: By class or module, the names that its objects must have, with spaces between.

    Raises:
        UnsupportedError: It lacks some.
    """
    missing = [
        f"{owner.__name__}.{name}" for owner, names in needed.items() for name in names.split() if not _has(owner, name)
    ]
    if missing:
        raise _gone(framework, seen, ", ".join(missing))


@contextmanager
def naming_missing(framework: str, seen: str) -> Iterator[None]:
    """Put around imports: where a name of a framework is not there, the error is that of `check_names`."""
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith(f"{framework}.") and (error.name != framework or not error.path):
            raise  # of another package, or this one is not installed
        raise _gone(framework, seen, str(error)) from error
    except AttributeError as error:
        if getattr(error.obj, "__module__", getattr(error.obj, "__name__", "")).partition(".")[0] != framework:
            raise
        raise _gone(framework, seen, str(error)) from error


def _gone(framework: str, seen: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{framework} {version(framework)} does not have what this package needs of it ({what}). It works with"
        f" {framework} {seen}: install one of these versions, or a newer version of this package."
    )


def _has(owner: Any, name: str) -> bool:
    """Whether the objects of a class have an attribute, or a module has: it may be set in a method, or declared."""
    if hasattr(owner, name):
        return True
    kinds = owner.__mro__ if isinstance(owner, type) else (owner,)
    return any(
        name in getattr(kind, "__annotations__", ())
        or any(isinstance(each, FunctionType) and name in each.__code__.co_names for each in vars(kind).values())
        for kind in kinds
    )
