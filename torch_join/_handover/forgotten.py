"""Finds objects that follow a given model but were not passed to `Join`: a teacher, a parameter average, an optimizer.

No given object refers to such an object: it is a variable of the loop's code, or an attribute of `self`. So when the
first rank joins, and only then, this searches the variables of the code that asks for batches and of its callers. It
looks for modules and containers of tensors that have the shapes of a given model, for optimizers of given parameters,
and for LR schedulers of such optimizers. An object was forgotten if it was equal on all ranks at that time and differs
after the tail, as for all values that the audit finds.

An object that the loop only reads is still equal then. One that each rank keeps or trains for itself differed before. A
copy that the loop makes replaces an earlier copy, and changes no object.

An average that only one rank keeps cannot be compared. It is recorded before the last step of a rank that runs out
before others, if that step is known, and at the start of the loop. The record from the start is used only if the
average still has the same tensors. If the average has changed when that rank runs out, it lacks the steps of the tail.
If the rank has not stepped its optimizer in between, only an earlier loop can tell.
"""

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from inspect import CO_OPTIMIZED
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from torch_join._base.hyperparameters import group_options
from torch_join._base.specs import flaw
from torch_join._compat.ddp import is_shard, local_part
from torch_join._handover.digest import checksums
from torch_join._handover.optimizers import is_optimizer, with_wrapped
from torch_join._handover.reachable import DEPTH, reachable, values_in

_FRAMES = 16  # frames whose variables are searched
_DEPTH = 3  # attributes and items: `self.trainer.averages["fast"]`
_ITEMS = 256  # per container
_OBJECTS = 2**14
# Packages whose objects and functions hold no user objects except those that they were given.
_PASSED_OVER = {
    *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "contextlib"),
    *("torch_join", "lightning_join", "pytorch_lightning_join", "accelerate_join"),
}
_PLAIN = (str, bytes, int, float, complex, type(None), type, Tensor, ModuleType, FunctionType, MethodType)


class Forgotten:
    """The objects with the shapes of a given model among the variables of user code.

    Args:
        given: Everything passed to `Join`.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = given
        self._noted: dict[str, tuple[Any, set[int], list[int]]] = {}
        self._trained: list[int] = []  # checksums of the given models at the last `note`
        self._at_start: dict[str, tuple[list[weakref.ref[Tensor]], list[int]]] = {}
        self._follows: dict[str, bool] = {}  # whether a step has changed an object that this rank keeps, if known
        self.clear()

    def clear(self) -> None:
        """Release all objects."""
        self._found: dict[str, tuple[Any, set[int]]] = {}
        self._has_left = self._is_unknown = False

    def note(self, at_last: bool) -> None:
        """Record the objects before the last step of a rank that runs out before others, or as such a loop starts."""
        kept = self._found  # if another rank has joined before
        self.search(sys._getframe(1))
        noted = {name: (*found, self._sums(*found)) for name, found in self._found.items()}
        if at_last:
            self._noted, self._trained = noted, self._sums_given()
        else:  # weak references, so that nothing is kept alive for a whole loop
            self._at_start = {
                name: ([weakref.ref(tensor) for _, tensor in _tensors(thing, own)], sums)
                for name, (thing, own, sums) in noted.items()
            }
        self._found = kept

    def leave(self, has_run: bool) -> None:
        """Find out what has changed since `note`, as this rank runs out.

        Args:
            has_run: Whether this rank has run a step in this loop.
        """
        self._has_left = True
        stepped = bool(self._noted) and self._sums_given() != self._trained
        self._is_unknown = not has_run or (bool(self._noted) and not stepped)
        for name, (*found, sums) in self._noted.items() if stepped else ():
            self._follows[name] = self._follows.get(name, False) or self._sums(*found) != sums
        for name, (before, sums) in self._at_start.items():
            thing, own = self._found.get(name, ((), set()))
            in_place = [id(each()) for each in before] == [id(tensor) for _, tensor in _tensors(thing, own)]
            if in_place and self._sums(thing, own) != sums:
                self._follows[name] = True
        self._noted, self._at_start = {}, {}

    @property
    def kept(self) -> dict[str, str]:
        """By object: "changed" if a step changed it before this rank ran out, "unknown" if unclear, else "there"."""
        kept = dict.fromkeys(self._found, "there")
        if self._has_left:
            texts = {True: "changed", False: "there", None: "unknown" if self._is_unknown else "there"}
            kept = {name: texts[self._follows.get(name)] for name in kept}
        return kept

    def _sums_given(self) -> list[int]:
        given = [p for thing in self._given if isinstance(thing, nn.Module) for p in thing.parameters()]
        return checksums([part for p in given if flaw(part := local_part(p)) is None])

    @staticmethod
    def _sums(thing: Any, own: set[int]) -> list[int]:
        return checksums([tensor for _, tensor in _tensors(thing, own)])

    def search(self, frame: FrameType | None = None) -> None:
        """Search for such objects.

        Args:
            frame: The frame whose variables, and whose callers' variables, are searched; by default the caller's.
        """
        self.clear()
        with suppress(Exception):  # a user's class may raise at any access
            self._search(_frames(sys._getframe(1) if frame is None else frame))

    def _search(self, frames: Sequence[FrameType]) -> None:
        seen: set[int] = set()
        held = [found for thing in self._given for _, found in _objects(thing, "", seen, _DEPTH + 1)]
        models = [thing for thing in held if isinstance(thing, nn.Module)]
        own = {id(t) for model in models for t in (*model.modules(), *model.parameters(), *model.buffers())}
        groups = [group for one in self._given if is_optimizer(one) for group in one.param_groups]
        own |= {id(p) for group in groups for p in group["params"]}
        seen |= {id(inner) for one in self._given if is_optimizer(one) for inner in with_wrapped(one)}
        wanted = _Shapes(thing for thing in self._given if isinstance(thing, nn.Module))
        if not wanted.whole:
            return
        variables = _variables(frames)
        found = ((where, *one) for where, name, value in variables for one in _objects(value, name, seen, _DEPTH))
        for where, name, thing in itertools.islice(found, _OBJECTS):
            for one, place in _alike(thing, wanted, own):
                kind = "" if isinstance(one, (dict, list, tuple)) else f" ({type(one).__name__})"
                self._found.setdefault(f"{name}{place}{kind}{where}, which was not given to Join", (one, own))

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the current value of each value in the objects; the name includes the object's name."""
        for name, (thing, own) in self._found.items():
            if _is_stepped(thing):
                yield from _held_by(thing, name)
            for key, tensor in _tensors(thing, own):
                yield f"{name}: {key}", tensor


class _Shapes:
    """The shapes of the tensors that a copy of a model may have: all parameters, the trained ones, or a whole state."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.whole: list[Counter[Any]] = []
        for model in models:
            parameters, buffers = list(model.parameters()), list(model.buffers())
            trained = [p for p in parameters if p.requires_grad]
            for tensors in (parameters, trained, [*parameters, *buffers]):
                if tensors and (shapes := _shapes(tensors)) not in self.whole:
                    self.whole.append(shapes)
        self.fewest = min((shapes.total() for shapes in self.whole), default=0)

    def are(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) >= self.fewest and _shapes(tensors) in self.whole

    def contain(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these may be an untrained part of a model (a target network lacks the predictor)."""
        untrained = all(tensor.grad is None for tensor in tensors)
        return untrained and any(_shapes(tensors) <= shapes for shapes in self.whole)


def _shapes(tensors: Iterable[Tensor]) -> "Counter[Any]":
    return Counter(tuple(tensor.shape) for tensor in tensors)


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of user code, outermost first: ranks at different places have the outermost one in common."""
    found: list[FrameType] = []
    while frame is not None and len(found) < _FRAMES:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _PASSED_OVER:
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _variables(frames: Iterable[FrameType]) -> Iterator[tuple[str, str, Any]]:
    """Yield the function of each variable, its name and its value."""
    for frame in frames:
        code, names = frame.f_code, frame.f_globals
        where = "" if code.co_name == "<module>" else f" in {code.co_name}()"
        found = frame.f_locals
        try:
            yield from [(where, name, value) for name, value in [*found.items()]]
        finally:
            # Before Python 3.13 a frame keeps the values read from it, batches too, until its function returns.
            if code.co_flags & CO_OPTIMIZED and type(found) is dict and sys.getrefcount(found) <= 3:
                found.clear()
        yield from [("", name, names[name]) for name in code.co_names if name in names]


def _objects(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield modules, optimizers, LR schedulers and containers that are attached to a value, each once."""
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module) or _is_stepped(value):
        yield name, value
        return
    if isinstance(value, (dict, list, tuple)):
        yield name, value
    elif type(value).__module__.partition(".")[0] in _PASSED_OVER:
        return
    if depth:
        for key, item in itertools.islice(_items(value), _ITEMS):
            yield from _objects(item, f"{name}{key}", seen, depth - 1)


def _held_by(thing: Any, name: str) -> list[tuple[str, Any]]:
    groups = group_options(thing) if is_optimizer(thing) else ()
    try:
        return [*values_in(groups, f"{name}: .param_groups", DEPTH), *reachable(thing, name, frozenset())]
    except Exception:  # from a user's class
        return []


def _is_stepped(thing: Any) -> bool:
    is_container = isinstance(thing, (dict, list, tuple))  # a mock's calls are tuples with any attribute
    return isinstance(thing, LRScheduler) or (not is_container and is_optimizer(thing))


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):  # ignoring overrides in a user's class
        return [(f"[{key!r}]" if type(key) in (str, int) else "[...]", item) for key, item in dict.items(value)]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    attributes = getattr(value, "__dict__", None)
    return [(f".{key}", item) for key, item in attributes.items()] if isinstance(attributes, dict) else []


def _alike(thing: Any, wanted: _Shapes, own: set[int]) -> Iterator[tuple[Any, str]]:
    """Yield `thing`, or modules in it, if they have a given model's shapes or step its parameters; with their paths."""
    if _is_stepped(thing):
        groups = getattr(thing.optimizer if isinstance(thing, LRScheduler) else thing, "param_groups", ())
        if any(id(p) in own for group in groups if isinstance(group, dict) for p in group.get("params", ())):
            yield thing, ""
        return
    if not isinstance(thing, nn.Module):
        if len(thing) >= wanted.fewest and wanted.are(list(dict(_tensors(thing, own)).values())):
            yield thing, ""
        return
    tensors = [tensor for _, tensor in _tensors(thing, own)]
    if tensors and (wanted.are(tensors) or wanted.contain(tensors)):
        yield thing, ""
        return
    inner = [(name, module) for name, module in thing.named_children() if id(module) not in own]
    while inner:
        name, module = inner.pop()
        tensors = [tensor for _, tensor in _tensors(module, own)]
        if wanted.are(tensors):
            yield module, f".{name}"
        elif len(tensors) > wanted.fewest:
            inner += [(f"{name}.{key}", child) for key, child in module.named_children() if id(child) not in own]


def _tensors(thing: Any, own: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters, or the tensors of a container that holds nothing else, except given ones."""
    if isinstance(thing, nn.Module):
        found: list[tuple[str, Any]] = list(thing.named_parameters())
    elif _is_stepped(thing):
        return
    else:
        items = dict.items(thing) if isinstance(thing, dict) else enumerate(thing)
        found = [(str(key), item) for key, item in [*items]]
        if not all(isinstance(item, Tensor) and id(item) not in own for _, item in found):
            return
    yield from ((name, t) for name, t in found if id(t) not in own and flaw(t) is None and not is_shard(t))
