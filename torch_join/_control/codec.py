"""The encoding of messages: JSON, with a table of the types that a message may contain.

Data from another process is never unpickled, since that would run the sender's code. In JSON, a list is an array, and a
simple value is itself. Any other value is an object with one entry: its type's tag and its contents. Values of types
not in the table cannot be in a message: they go over the process group (`_handover/objects.py`).

Received data is checked for its size, its types and, if given, the expected type. The parser limits the depth.
"""

import json
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_join._base.errors import JoinError, JoinTypeError

C = TypeVar("C", bound=type)

MAX_BYTES = (1 << 23) - 1024
_SIMPLE = frozenset({type(None), bool, int, float, str})


class Malformed(ValueError):  # noqa: N818  the reader turns it into an error
    """The data does not come from `encode`, or does not have the expected type."""


def foreign(what: str, why: object) -> JoinError:
    """Return the error for received data that no rank can have sent."""
    return JoinError(
        f"This rank read a malformed message ({what}): {why}. Either the ranks run different versions of torch_join,"
        " or some were in another collective of the process group when the first `with` (or fit) connected them."
    )


# ------------------------------------------------------------ the table


def closed(tag: str) -> Callable[[C], C]:
    """Allow objects of a dataclass or a `NamedTuple` in messages; their fields must have the annotated types.

    Args:
        tag: The type's tag in messages.
    """

    def register(kind: C) -> C:
        checks = {name: _checker(of) for name, of in typing.get_type_hints(kind).items()}
        # The name of another package is added to its types' tags, since two packages may come from one source.
        package = kind.__module__.partition(".")[0]
        known_as = tag if package == __package__.partition(".")[0] else f"{package}.{tag}"
        if known_as in _REVIVERS:
            raise JoinError(f"Two types are registered for messages under the name {known_as!r}.")
        _WRITERS[kind] = known_as, lambda value: _plain_items([getattr(value, name) for name in checks])

        def revive(content: Any) -> Any:
            if type(content) is not list or len(content) != len(checks):
                raise Malformed(f"a {tag} has {len(checks)} values")
            for (name, fits), value in zip(checks.items(), content, strict=True):
                if not fits(value):
                    raise Malformed(f"the {name} of a {tag} is {brief(value)}")
            found = kind(*content)
            if hasattr(found, "validate"):
                found.validate()
            return found

        _REVIVERS[known_as] = revive
        return kind

    return register


def _list(content: Any) -> list[Any]:
    if type(content) is not list:
        raise Malformed(f"{brief(content)} in place of a list")
    return content


def _scalar(content: Any) -> Tensor:
    dtype, value = _list(content)
    if type(value) not in (bool, int, float, complex):
        raise Malformed(f"a number is {brief(value)}")
    # Create it on the CPU, so that reading a message does not initialize a device. Code that uses it moves it.
    return torch.tensor(value, dtype=_dtypes()[dtype], device="cpu")


def _device(content: Any) -> torch.device:
    if type(content) is not str:  # for a number, torch would look for an accelerator
        raise Malformed(f"a device is {brief(content)}")
    return torch.device(content)


def _size(content: Any) -> torch.Size:
    if not all(type(length) is int and 0 <= length < 1 << 63 for length in _list(content)):
        raise Malformed(f"a size is {brief(content)}")  # such a size could not even be printed
    return torch.Size(content)


def _complex(content: Any) -> complex:
    real, imaginary = _list(content)
    return complex(float(real), float(imaginary))


@cache
def _dtypes() -> dict[str, torch.dtype]:
    return {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


# Functions that write values, by type, and that read them, by tag. `closed` adds classes to both.
_WRITERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("t", lambda value: _plain_items(value)),
    dict: ("d", lambda value: [[_plain(key), _plain(item)] for key, item in value.items()]),
    complex: ("complex", lambda value: [value.real, value.imag]),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("device", str),
    torch.Size: ("size", list),
}
_REVIVERS: dict[str, Callable[[Any], Any]] = {
    "t": lambda content: tuple(_list(content)),
    "d": lambda content: {key: value for key, value in map(_list, _list(content))},  # noqa: C416  checks the pairs
    "complex": _complex,
    "dtype": lambda content: _dtypes()[content],
    "device": _device,
    "size": _size,
    "scalar": _scalar,
}


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if kind is list:
        return _plain_items(value)
    if kind in _WRITERS:
        tag, content = _WRITERS[kind]
        return {tag: content(value)}
    if kind is Tensor and value.ndim == 0 and not (value.requires_grad or value.is_quantized or value.is_meta):
        # A hyperparameter, such as a learning rate.
        return {"scalar": [str(value.dtype).removeprefix("torch."), _plain(value.item())]}
    raise JoinTypeError(
        f"A {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks. Use only numbers, strings, lists,"
        " tuples, dictionaries, dtypes, devices, and types of this package."
    )


def _plain_items(values: Sequence[Any]) -> Sequence[Any]:
    if _SIMPLE.issuperset(map(type, values)):  # the usual case: each record goes through this
        return values
    return [value if type(value) in _SIMPLE else _plain(value) for value in values]


# ------------------------------------------------------------ writing and reading


_encoder = json.JSONEncoder(separators=(",", ":"), check_circular=False)


class Encoded(bytes):
    """A return value of `encode`; `in_pair` combines several of them without encoding them again."""

    __slots__ = ()


def in_pair(values: Iterable[Encoded], value: Encoded) -> Encoded:
    """Return the encoding of a tuple of two: a list of encoded values, and another encoded value."""
    return Encoded(b'{"t":[[' + b",".join(values) + b"]," + value + b"]}")


def encode(value: Any) -> Encoded:
    """Return bytes from which `decode` makes an equal value; return an encoded value unchanged.

    Raises:
        JoinTypeError: A part of the value has a type that a message cannot have, or the value is too large.
    """
    try:
        data = value if type(value) is Encoded else Encoded(_encoder.encode(_plain(value)).encode("ascii"))
    except (RecursionError, ValueError) as error:
        raise JoinTypeError(f"A value cannot be sent to other ranks: {error}.") from error
    if len(data) > MAX_BYTES:
        raise JoinTypeError(f"A value of {len(data)} bytes is too large to be sent to other ranks.")
    return data


def is_closed(value: Any) -> bool:
    """Whether `encode` accepts `value`."""
    try:
        encode(value)
    except JoinTypeError:
        return False
    return True


def decode(data: bytes, of: Any = Any) -> Any:
    """Return the value that was encoded; a tensor is on the CPU.

    Args:
        data: Bytes that another rank has written.
        of: The type that the value must have: a class, or one composed of `list`, `tuple`, `dict` and `|`.

    Raises:
        Malformed: The data is malformed, or has another type. Nothing in it has been executed.
    """
    if len(data) > MAX_BYTES:
        raise Malformed(f"it has {len(data)} bytes")
    try:
        value = _decoder.decode(data.decode("ascii"))
    except Malformed:
        raise
    except Exception as error:  # from the parser or torch, whose errors are not documented
        raise Malformed(f"{type(error).__name__} in {brief(data)}") from None
    return check(value, of)


def check(value: Any, of: Any) -> Any:
    """Return `value` if it has the type `of`.

    Raises:
        Malformed: It has another type.
    """
    if not _checker(of)(value):
        raise Malformed(f"{brief(value)} in place of {of if typing.get_origin(of) else getattr(of, '__name__', of)}")
    return value


def _revive(pairs: Sequence[tuple[str, Any]]) -> Any:
    if len(pairs) != 1:
        raise Malformed("an object has one entry, its kind")
    ((tag, content),) = pairs
    if tag not in _REVIVERS:
        raise Malformed(f"there is no kind {brief(tag)}")
    return _REVIVERS[tag](content)


_decoder = json.JSONDecoder(object_pairs_hook=_revive)


# ------------------------------------------------------------ types


@cache
def _checker(of: Any) -> Callable[[Any], bool]:
    """Return a function that returns whether a value has this type."""
    origin, args = typing.get_origin(of), typing.get_args(of)
    if of is Any:
        return lambda value: True
    if of in (None, type(None)):
        return lambda value: value is None
    if origin in (typing.Union, types.UnionType):
        kinds = {*_SIMPLE.intersection(args), *((int,) if float in args else ())}
        others = [_checker(arg) for arg in args if arg not in kinds]
        return lambda value: type(value) in kinds or any(check(value) for check in others)
    if of is float:
        return lambda value: type(value) in (int, float)
    if origin is None:
        return lambda value: type(value) is of
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        each, simple = _checker(args[0]), {args[0]} if args[0] in (bool, int, str) else None
        if simple is not None:
            return lambda value: type(value) is origin and simple.issuperset(map(type, value))
        return lambda value: type(value) is origin and all(map(each, value))
    if origin is tuple:
        ordered = [_checker(arg) for arg in args]
        return lambda value: (
            type(value) is tuple
            and len(value) == len(ordered)
            and all(check(item) for check, item in zip(ordered, value, strict=True))
        )
    if origin is dict:
        of_key, of_item = map(_checker, args)
        return lambda value: type(value) is dict and all(map(of_key, value)) and all(map(of_item, value.values()))
    raise JoinTypeError(f"{of} is no type of what a message may have.")


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def brief(value: Any) -> str:
    """Return the start of `repr(value)`, however malformed the value is."""
    try:
        return _short.repr(value[:60] if isinstance(value, bytes) else value)
    except Exception:  # it is nested too deeply, or has a number that is too long
        return f"something of type {type(value).__name__}"
