"""The tree of plain values that represents the state of an object."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Slot:
    """Represents a tensor."""

    index: int


@dataclass(frozen=True, order=True)
class Place:
    """Represents a parameter that is a dictionary key, by its place in an optimizer's groups."""

    group: int
    position: int

    def __str__(self) -> str:
        return f"parameter {self.position} of group {self.group}"


@dataclass(frozen=True)
class Keep:
    """Represents an object that is not sent: every rank keeps its own."""

    kind: str


@dataclass(frozen=True)
class Nested:
    """The state of an object with `state_dict` and `load_state_dict` inside another object's state."""

    tree: Any


@dataclass(frozen=True)
class Pickled:
    """Any other value, pickled; `slots` are the indices of its tensors, in order."""

    data: bytes
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Captured:
    """The state of one object.

    Attributes:
        state: The state's tree.
        hints: Values that help to restore it but are not part of it.
    """

    state: Any
    hints: dict[str, Any] = field(default_factory=dict)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each leaf of a tree, and the leaf: a `Slot`, pickled bytes, or a plain value."""
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
