"""Checks that a framework still has the private names that this project relies on.

Compat modules list these names and check them on import. If one is gone, a single error reports it and the versions
that work, instead of an `AttributeError` from inside a hook in the middle of training. A framework that is newer than
all tested versions is used, with a warning.
"""

import dis
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import parent_process
from types import FunctionType
from typing import Any

from torch_join._base.errors import JoinWarning, UnsupportedError

TORCH = "2.6 to 2.14"  # the versions tested


def check_names(framework: str, seen: str, needed: Mapping[Any, str]) -> None:
    """Check that a framework has the names that this project needs.

    Args:
        framework: Its package.
        seen: The versions known to have all of the names.
        needed: By class or module, the names that its objects must have, separated by spaces.

    Warns:
        JoinWarning: Once in a job, if the installed version is newer than all of these.

    Raises:
        UnsupportedError: Some names are missing.
    """
    missing = [
        f"{owner.__name__}.{name}" for owner, names in needed.items() for name in names.split() if not _has(owner, name)
    ]
    if missing:
        raise _gone(framework, seen, ", ".join(missing))
    _warn_of_newer(framework.partition(".")[0], seen)


_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
_judged: set[str] = set()


def _warn_of_newer(framework: str, seen: str) -> None:
    """Warn in the first process of a job, according to the launcher's environment variables."""
    first = all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))
    if framework in _judged or not first or parent_process() is not None:
        return
    _judged.add(framework)
    installed = _release_of(framework)
    newest = [int(part) for part in _NUMBERS.findall(seen)[-1].split(".")]
    if [int(part) for part in _NUMBERS.match(installed)[0].split(".")][: len(newest)] > newest:  # type: ignore[index]
        JoinWarning.warn(
            f"{framework} {installed} is newer than the versions tested with this package ({seen}). All private names"
            " that this package needs exist, but training results have not been verified. Before a long run, compare"
            f" a short run with a single process, or install {framework} {seen}."
        )


@contextmanager
def naming_missing(seen: str, *packages: str) -> Iterator[None]:
    """Wrap imports: if one of these packages lacks a name, raise the error of `check_names`.

    Args:
        seen: As for `check_names`.
        packages: The packages; the framework's comes first.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        owner = error.name if isinstance(error, ImportError) else error.obj
        of = owner if isinstance(owner, str) else getattr(owner, "__module__", getattr(owner, "__name__", ""))
        roots = {name.partition(".")[0] for name in packages}
        if of.partition(".")[0] not in roots or (of in roots and not getattr(error, "path", "inside")):
            raise  # another package lacks the name, or this one is not installed
        raise _gone(packages[0], seen, str(error)) from error


def _gone(package: str, seen: str, what: str) -> UnsupportedError:
    framework = package.partition(".")[0]
    return UnsupportedError(
        f"{framework} {_release_of(framework)} lacks {what}, which this package needs. Install {framework} {seen}, or"
        " a newer version of this package."
    )


def _release_of(framework: str) -> str:
    try:
        return version(framework)
    except PackageNotFoundError:  # the `lightning_fabric` inside `pytorch_lightning`
        return str(sys.modules[framework].__version__)


def _has(owner: Any, name: str) -> bool:
    """Whether a module, or an object of a class, has an attribute; ones set in a method or declared count."""
    if hasattr(owner, name):
        return True
    kinds = owner.__mro__ if isinstance(owner, type) else (owner,)
    return any(
        name in getattr(kind, "__annotations__", ())
        or any(isinstance(each, FunctionType) and _sets(each, name) for each in vars(kind).values())
        for kind in kinds
    )


def _sets(function: Any, name: str) -> bool:
    function = inspect.unwrap(function)
    return name in function.__code__.co_names and any(
        step.opname == "STORE_ATTR" and step.argval == name for step in dis.get_instructions(function)
    )
