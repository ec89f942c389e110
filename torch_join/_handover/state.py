"""State as a tree of plain values in which numbered slots stand for the tensors.

`Capture` turns live state into such a tree, which can be pickled regardless of the tensors' size; `Restore` turns the
tree back into values on another rank, with that rank's own tensors in the slots if they fit and new ones otherwise. The
tensors' contents are sent separately.
"""

import io
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torch_join._base.errors import JoinTypeError, JoinValueError
from torch_join._base.pytree import Keep, Nested, Pickled, Place, Slot
from torch_join._base.specs import TensorSpec, flaw

MISSING: Any = object()
# Objects that a state may refer to without containing them: every rank keeps its own.
_REFERENCES: tuple[type, ...] = (
    *(Optimizer, nn.Module, weakref.ReferenceType),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
)


def has_state(value: Any) -> bool:
    """Whether `value` has `state_dict` and `load_state_dict`."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class Capture:
    """Turns live state into a tree and collects the tensors.

    Args:
        canonical: Whether equal values must have equal trees, for comparisons. Such trees cannot be restored.
        local: The `id` of each parameter that every rank keeps for itself, with its state.

    Attributes:
        specs: The descriptions of the tensors, by slot.
        tensors: The tensors themselves, by slot.
        places: The places of parameters that may be keys of dictionaries, by `id`.
    """

    def __init__(self, canonical: bool = False, local: frozenset[int] = frozenset()) -> None:
        self._canonical = canonical
        self.local = local
        self.places: dict[int, Place] = {}
        self.specs: list[TensorSpec] = []
        self.tensors: list[Tensor] = []
        self._slots: dict[int, Slot] = {}

    def tensor(self, tensor: Tensor, path: str) -> Slot:
        """Return the slot of `tensor`: one slot, however often it occurs.

        Raises:
            JoinTypeError: Its contents cannot be copied as bytes.
        """
        if id(tensor) not in self._slots:
            if (reason := flaw(tensor)) is not None:
                raise JoinTypeError(f"{path} cannot be handed over: it {reason}.")
            self._slots[id(tensor)] = Slot(len(self.tensors))
            self.tensors.append(tensor)
            self.specs.append(TensorSpec.of(tensor))
        return self._slots[id(tensor)]

    def tree(self, value: Any, path: str) -> Any:
        """Return the tree of `value`; `path` is its name in errors.

        Raises:
            JoinTypeError: A part of `value` can be neither sent nor kept.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        # A sparse tensor consists of dense ones, which pickling finds.
        if isinstance(value, Tensor) and value.layout == torch.strided:
            return self.tensor(value, path)
        if type(value) is dict:
            return {
                (own := self._key(key, path)): self.tree(item, f"{path}[{own!r}]")
                for key, item in value.items()
                if id(key) not in self.local
            }
        if type(value) in (list, tuple):
            return type(value)(self.tree(item, f"{path}[{index}]") for index, item in enumerate(value))
        if isinstance(value, _REFERENCES):
            return Keep(type(value).__name__)
        if has_state(value):
            return Nested(self.tree(value.state_dict(), f"{path}.state_dict()"))
        if self._canonical and isinstance(value, dict):
            return self.tree(dict(value), path)
        if self._canonical and isinstance(value, (set, frozenset)):
            return sorted(map(repr, value))
        return self._pickle(value, path)

    def _key(self, key: Any, path: str) -> Any:
        if isinstance(key, Tensor):
            if id(key) not in self.places:
                raise JoinTypeError(f"{path} has a tensor as a key, which cannot be matched between ranks.")
            return self.places[id(key)]
        return key

    def _pickle(self, value: Any, path: str) -> Pickled:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self, path)
        pickler.fast = self._canonical
        try:
            pickler.dump(value)
        except JoinTypeError:
            raise
        except Exception as error:
            raise JoinTypeError(f"{path} is a {type(value).__name__} that cannot be pickled: {error}") from error
        return Pickled(buffer.getvalue(), tuple(pickler.slots))


class Restore:
    """Turns trees back into values whose tensors are still to be filled.

    Args:
        specs: The descriptions of the tensors, by slot.
        local: As for `Capture`.

    Attributes:
        specs: The descriptions of the tensors, by slot.
        targets: The tensors that receive the contents of each slot.
        places: The parameters that may be keys of dictionaries, by place.
    """

    def __init__(self, specs: list[TensorSpec], local: frozenset[int] = frozenset()) -> None:
        self.specs = specs
        self.local = local
        self.places: dict[Place, Tensor] = {}
        self.targets: list[list[Tensor]] = [[] for _ in specs]
        self._owners: dict[int, int] = {}
        self._later: list[Callable[[], Any]] = []

    def later(self, action: Callable[[], Any]) -> None:
        """Run `action` once the tensors are filled."""
        self._later.append(action)

    def finish(self) -> None:
        """Run the actions passed to `later`."""
        for action in self._later:
            action()

    def tensor(self, slot: Slot, own: Any = MISSING, device: torch.device | None = None) -> Tensor:
        """Return the tensor for `slot`: `own` if it fits, else a new one (on `device`)."""
        spec, targets = self.specs[slot.index], self.targets[slot.index]
        # One tensor cannot hold two contents: it stays with the slot that came first.
        if spec.fits(own) and self._owners.setdefault(id(own), slot.index) == slot.index:
            if not any(target is own for target in targets):
                targets.append(own)
            return own  # type: ignore[no-any-return]
        if not targets:
            like = own.device if isinstance(own, Tensor) and device is None else device
            targets.append(spec.create(like))
        return targets[0]

    def parameter(self, slot: Slot, own: Tensor, is_trained: bool, path: str) -> None:
        """Fill one of this rank's parameters, and freeze or unfreeze it as on the source.

        Raises:
            JoinValueError: Its shape or type differs from that on the source.
        """
        if self.tensor(slot, own) is not own:
            raise JoinValueError(
                f"{path} is {TensorSpec.of(own)} here and {self.specs[slot.index]} on the source rank."
            )
        if own.requires_grad != is_trained:
            self.later(lambda: own.requires_grad_(is_trained))

    def value(self, tree: Any, own: Any, path: str, device: torch.device | None = None, reuse: bool = True) -> Any:
        """Return the value of `tree`.

        Args:
            tree: The result of `Capture.tree` on the source.
            own: This rank's value at the same place, or `MISSING`.
            path: Its name in errors.
            device: The device for new tensors of its type.
            reuse: Whether `own`'s tensors may be written to.

        Raises:
            JoinValueError: The source refers to an object that has no counterpart here.
        """
        if isinstance(tree, Slot):
            return self.tensor(tree, own if reuse else MISSING, device)
        if isinstance(tree, dict):
            items = own if isinstance(own, dict) else {}
            kept = {key: item for key, item in items.items() if id(key) in self.local}
            return kept | {
                (own_key := self._key(key)): self.value(
                    item, items.get(own_key, MISSING), f"{path}[{key!r}]", device, reuse
                )
                for key, item in tree.items()
            }
        if isinstance(tree, (list, tuple)):
            return type(tree)(
                self.value(item, _item(own, index), f"{path}[{index}]", device, reuse)
                for index, item in enumerate(tree)
            )
        if isinstance(tree, Keep):
            return self._kept(own, tree.kind, path)
        if isinstance(tree, Nested):
            self._kept(own if has_state(own) else MISSING, "object with load_state_dict", path)
            state = self.value(tree.tree, own.state_dict(), f"{path}.state_dict()", device, reuse=False)
            self.later(lambda: own.load_state_dict(state))
            return own
        return _Unpickler(tree, self, device).load() if isinstance(tree, Pickled) else tree

    def _key(self, key: Any) -> Any:
        return self.places[key] if isinstance(key, Place) else key

    def _kept(self, own: Any, kind: str, path: str) -> Any:
        if own is MISSING:
            raise JoinValueError(f"{path} is a {kind} on the source rank. Create one on every rank.")
        return own


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, capture: Capture, path: str) -> None:
        super().__init__(file)
        self.slots: list[int] = []
        self._capture = capture
        self._path = path

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            self.slots.append(self._capture.tensor(value, self._path).index)
            return len(self.slots) - 1
        if isinstance(value, (Optimizer, LRScheduler, nn.Module)):
            # Other ranks would get a copy of it in addition to their own.
            raise JoinTypeError(
                f"{self._path} refers to a {type(value).__name__}, which cannot be sent. Leave it out of the"
                " state dict."
            )
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: Pickled, restore: Restore, device: torch.device | None) -> None:
        super().__init__(io.BytesIO(pickled.data))
        self._slots = pickled.slots
        self._restore = restore
        self._device = device

    def persistent_load(self, number: int) -> Tensor:
        return self._restore.tensor(Slot(self._slots[number]), device=self._device)


def _item(own: Any, index: int) -> Any:
    return own[index] if isinstance(own, (list, tuple)) and index < len(own) else MISSING
