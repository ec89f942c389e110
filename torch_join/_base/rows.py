"""Structures that hold one row per sample, such as batches and outputs.

Tuples and mappings hold other structures, which errors call `rows['logits']` or `rows[0]`. A tensor holds one row per
sample along its first dimension. A list holds one object per sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_join._base.errors import JoinTypeError, JoinValueError
from torch_join._base.specs import flaw


@dataclass(frozen=True)
class Leaf:
    """The description of a tensor, or a list, without its rows.

    Attributes:
        path: Its name in errors.
        dtype: A tensor's dtype; a list has none.
        shape: The shape of a tensor's row.
        device: The type of a tensor's device.
    """

    path: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    device: str = field(default="cpu", compare=False)

    @property
    def row_bytes(self) -> int:
        """The size in bytes of a tensor's row."""
        assert self.dtype is not None
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        kind = "a list" if self.dtype is None else f"{str(self.dtype).removeprefix('torch.')} rows of {[*self.shape]}"
        return f"{self.path} ({kind})"


@dataclass(frozen=True)
class Rows:
    """The rows of one batch.

    Attributes:
        tree: The structure, with a `Leaf` in place of each tensor and list.
        values: The tensors and lists, by path.
        count: The number of rows in each.
    """

    tree: Any
    values: dict[str, Any]
    count: int


def split(structure: Any, path: str = "rows", count: int | None = None) -> Rows:
    """Split a structure into its leaves.

    Args:
        structure: Tuples and mappings of tensors and lists.
        path: Its name in errors.
        count: Its number of samples; by default the number of rows in its first tensor or list.

    Raises:
        JoinTypeError: A part of it has no rows.
        JoinValueError: A part of it has another number of rows.
    """
    values: dict[str, Any] = {}
    tree = _walk(structure, path, values)
    if not values:
        raise JoinTypeError(f"{path} contains no tensors or lists, so it has no rows.")
    of = "its batch" if count is not None else next(iter(values))
    count = len(next(iter(values.values()))) if count is None else count
    for name, value in values.items():
        if len(value) != count:
            raise JoinValueError(
                f"{name} has {len(value)} rows, but {of} has {count}. Return one row per sample: a tensor, or a list"
                " with one object per sample. Put several outputs into a tuple or a dictionary."
            )
    return Rows(tree, values, count)


def _walk(value: Any, path: str, values: dict[str, Any]) -> Any:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            raise JoinTypeError(f"{path} is a 0-dimensional tensor, so it has no rows. Leave it out.")
        if why := flaw(value):
            raise JoinTypeError(f"{path} {why}, so its rows cannot be combined across ranks.")
        values[path] = value.detach()
        return Leaf(path, value.dtype, tuple(value.shape[1:]), value.device.type)
    if isinstance(value, list):
        values[path] = value
        return Leaf(path)
    if isinstance(value, Mapping):
        return {key: _walk(value[key], f"{path}[{key!r}]", values) for key in value}
    if isinstance(value, tuple):
        parts = [_walk(each, f"{path}[{index}]", values) for index, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    raise JoinTypeError(
        f"{path} is a {type(value).__name__}, which does not have one row per sample. Use tensors or lists, or tuples"
        " or dictionaries of them."
    )


def build(tree: Any, values: Mapping[str, Any]) -> Any:
    """Rebuild a structure from its values by path."""
    if isinstance(tree, Leaf):
        return values[tree.path]
    if isinstance(tree, dict):
        return {key: build(each, values) for key, each in tree.items()}
    parts = [build(each, values) for each in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def leaves(tree: Any) -> list[Leaf]:
    """Return all leaves of a structure, in its order."""
    if isinstance(tree, Leaf):
        return [tree]
    return [leaf for each in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(each)]


def check_alike(tree: Any, other: Any, names: Sequence[str]) -> None:
    """Compare the structures of two batches.

    Args:
        tree: The structure of one.
        other: The structure of the other.
        names: The names of the two in errors.

    Raises:
        JoinValueError: They differ in more than their numbers of rows.
    """
    if tree == other:
        return
    first, second = ({leaf.path: leaf for leaf in leaves(each)} for each in (tree, other))
    for path in (*first, *second):
        if first.get(path) != second.get(path):
            one, another = (str(found.get(path, f"no {path}")) for found in (first, second))
            raise JoinValueError(
                f"{names[0]} has {one}, and {names[1]} has {another}. Only the number of rows may differ. Pad the"
                " rows to the same shape, or return them as a list."
            )
    raise JoinValueError(f"{names[0]} and {names[1]} are nested structures of different types.")
