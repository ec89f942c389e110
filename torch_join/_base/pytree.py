"""The tree of plain values that stands for the state of an object."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor."""

    index: int


@dataclass(frozen=True, order=True)
class Place:
    """Stands for the parameter at a place of an optimizer's groups, where it is the key of a dictionary."""

    group: int
    position: int

    def __str__(self) -> str:
        return f"parameter {self.position} of group {self.group}"


@dataclass(frozen=True)
class Keep:
    """Stands for an object that every rank has one of its own of."""

    kind: str


@dataclass(frozen=True)
class Nested:
    """The state of an object with `state_dict` and `load_state_dict` inside the state of another."""

    tree: Any


@dataclass(frozen=True)
class Pickled:
    """Any other value, pickled; the tensors in it are numbered, and in these slots."""

    data: bytes
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Captured:
    """The state of one object.

    Attributes:
        state: Its tree.
        hints: What helps to restore it but is not a part of it.
    """

    state: Any
    hints: dict[str, Any] = field(default_factory=dict)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield where each leaf of a tree is, and the leaf: a `Slot`, bytes of what is pickled, or a plain value."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from leaves(item, f"{path}[{key if isinstance(key, Place) else repr(key)}]")
    elif isinstance(tree, (list, tuple)):
        yield f"{path} (length)", len(tree)
        for index, item in enumerate(tree):
            yield from leaves(item, f"{path}[{index}]")
    elif isinstance(tree, Nested):
        yield from leaves(tree.tree, path)
    elif isinstance(tree, Pickled):
        yield path, tree.data
        yield from ((f"{path}, tensor {number}", Slot(index)) for number, index in enumerate(tree.slots))
    else:
        yield path, tree.kind if isinstance(tree, Keep) else tree
