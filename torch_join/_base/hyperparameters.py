"""Whether the ranks' optimizers still have the same hyperparameters.

Two things make them differ. A rank that has joined does not run the user's code, and does not see what the others
gather after that: what it decides then (a learning rate, from a metric of a loop that was uneven), it decides
otherwise. And a schedule over a rank's own number of batches differs from the first step on, which the handover at
the end of each loop would hide. So all compare where they meet anyway, and those that have come so far where one of
them joins: there all end with the error, and none waits for another that has ended with it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torch_join._base.errors import JoinError

_SIMPLE = (bool, int, float, str)
_Simple = float | bool | str | None  # an `int` is a `float`, too
Hyperparameters = list[tuple[str, _Simple | tuple[_Simple, ...]]]  # name and value of each
# Some optimizers compute one (Prodigy and D-Adaptation their `d`), and the last bits of that depend on the number of
# threads, for example. A schedule that differs does so by far more.
_TOLERANCE = 1e-6
Words = list[tuple[int, Hyperparameters]]  # of a rank's last steps, by their number


def hyperparameters(objects: Sequence[Any]) -> Hyperparameters:
    """Return the name and value of each, of all optimizers among `objects`."""
    named = _named(objects)
    return _described(named, [optimizer.param_groups for _, optimizer in named])


def group_options(optimizer: Any) -> list[dict[str, Any]]:
    """Return what each group of an optimizer holds besides its parameters, for `take_group_options`."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def take_group_options(optimizer: Any, options: Sequence[Mapping[str, Any]]) -> None:
    """Put what another rank's `group_options` are into the groups of an optimizer: tensors where they replace some.

    Raises:
        ValueError: It has another number of groups.
    """
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name, value in values.items():
            own = group.get(name)
            group[name] = value.to(own.device) if isinstance(value, Tensor) and isinstance(own, Tensor) else value


def compare(everyone: Sequence[Hyperparameters], names: Sequence[int]) -> None:
    """Compare what the ranks have.

    Args:
        everyone: By rank.
        names: What errors call these ranks.

    Raises:
        JoinError: Some differ.
    """
    if all(values is everyone[0] for values in everyone):  # as `gather` returns what is the same
        return
    for values in zip(*everyone, strict=False):
        if not all(name == values[0][0] and _are_alike(value, values[0][1]) for name, value in values):
            said = ", ".join(f"{value!r} on rank {rank}" for rank, (_, value) in zip(names, values, strict=True))
            raise JoinError(
                f"The ranks' optimizers differ: {values[0][0]} is {said}. A rank has decided by a value that the others"
                " do not have, such as a metric or a counter of its own batches. Decide by the number of the step, by a"
                " value that was reduced after the loop, or on one rank that broadcasts it."
            )


class Steps:
    """The hyperparameters at the begin of this rank's last two steps in a loop.

    A rank that joins has begun one step less than the others when they find out, or as many. And in between, code
    after a loop or at the top of the next step may have changed what there is now.

    Args:
        objects: Everything that was given to `Join`.

    Attributes:
        now: Whether this rank has only just begun its last step.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._named = _named(objects)
        self.forget()

    def forget(self) -> None:
        """Begin another loop."""
        self.now = False
        self._begun = 0
        self._last: list[tuple[int, list[list[dict[str, Any]]]]] = []
        self._changing: list[tuple[int, int, str]] = []  # optimizer, group and name of what may change in place
        self._counts: list[int] = []  # of the groups of each optimizer, when these were found

    def begin(self) -> None:
        """Note what there is at the begin of a step."""
        self.now = True
        self._begun += 1
        self._last = [*self._last[-1:], (self._begun, self._copies())]

    def skip(self) -> None:
        """Begin a step before which, and in which, nobody can join."""
        self.now = True
        self._begun += 1

    def _copies(self) -> list[list[dict[str, Any]]]:
        """Return copies of all groups, whose values stay as they are.

        In each step, of perhaps hundreds of groups: so what may change in place is looked for once in a loop.
        """
        copies = [[group.copy() for group in optimizer.param_groups] for _, optimizer in self._named]
        if (counts := list(map(len, copies))) != self._counts:
            self._counts = counts
            self._changing = [
                (number, index, name)
                for number, groups in enumerate(copies)
                for index, group in enumerate(groups)
                for name, value in group.items()
                if _read(value) is not value
            ]
        for number, index, name in self._changing:
            group = copies[number][index]
            group[name] = _read(group.get(name))
        return copies

    def words(self, late: bool) -> Words:
        """Return what other ranks need for `compare`.

        Args:
            late: Whether something may have changed since the last step's begin.
        """
        # Of what began to change in place within the loop there is no copy, only what it holds now.
        newest = self._begun if self.now and not late else -1
        return [(step, _described(self._named, groups, step == newest)) for step, groups in self._last]

    def compare(self, everyone: Mapping[int, Words]) -> None:
        """Compare what ranks, by name, which may be some, had at the begin of the same steps.

        Raises:
            JoinError: Some differ.
        """
        found: dict[tuple[int, str], dict[int, Any]] = {}
        for rank, words in everyone.items():
            for step, values in words:
                for name, value in values:
                    found.setdefault((step, name), {})[rank] = value
        for (_, name), values_of in found.items():
            first, *others = values_of.values()
            if not all(_are_alike(first, other) for other in others):
                raise JoinError(self._explain(name, values_of))

    def _explain(self, name: str, values: Mapping[int, Any]) -> str:
        said = ", ".join(f"{value!r} on rank {rank}" for rank, value in sorted(values.items()))
        optimizer = next(thing for label, thing in self._named if name.endswith(f" of {label}"))
        schedule = next((t for t in self._objects if getattr(t, "optimizer", None) is optimizer), None)
        setter = "Whatever sets it" if schedule is None else f"{type(schedule).__name__}, which sets it,"
        return (
            f"The ranks' optimizers differ in a step that they make together: {name} is {said}. {setter} goes by"
            " something that is each rank's own. The usual causes are a schedule over a rank's own number of batches,"
            " len(loader), and a counter of a rank's own steps, which stands still where the rank has run out of"
            " batches. Make a schedule from the longest rank's number, the same on all: gather the lengths before, and"
            " take their maximum. Keep a counter in an object with state_dict and load_state_dict, and give it to Join;"
            " or count from that number: epoch * longest + step."
        )


def _named(objects: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return each optimizer, and a name for it."""
    optimizers = [thing for thing in objects if hasattr(thing, "param_groups")]
    kinds = [type(thing).__name__ for thing in optimizers]
    return [
        (kind if kinds.count(kind) == 1 else f"{kind} {kinds[: index + 1].count(kind)}", thing)
        for index, (kind, thing) in enumerate(zip(kinds, optimizers, strict=True))
    ]


class _OnDevice(NamedTuple):
    """A copy of a number on another device, which is waited for when it is compared, and not in each step."""

    copy: Tensor


def _read(value: Any) -> Any:
    """Return what a value that may change in place holds now: a number, a list of numbers."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item() if value.device.type == "cpu" else _OnDevice(value.detach().clone())
    if type(value) is list and value and all(type(part) in (bool, int, float) for part in value):
        return tuple(value)
    return value


def _described(
    named: Sequence[tuple[str, Any]], groups: Sequence[Sequence[Mapping[str, Any]]], is_now: bool = True
) -> Hyperparameters:
    """Return the hyperparameters in `groups` by name; what may have changed in place since only if they are of now."""
    described: Hyperparameters = []
    for (label, _), groups_of_it in zip(named, groups, strict=True):
        for index, group in enumerate(groups_of_it):
            where = f" (group {index})" if len(groups_of_it) > 1 else ""
            for name, value in group.items():
                if type(value) in _SIMPLE:
                    described.append((f"{name}{where} of {label}", value))
                    continue
                held = _read(value) if is_now else value
                if (found := _comparable(held.copy.item() if isinstance(held, _OnDevice) else held)) is not None:
                    described.append((f"{name}{where} of {label}", found))
    return described


def _comparable(value: Any) -> Any:
    """Return `value` as what can be sent and compared, `None` if it cannot."""
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, tuple):
        parts = tuple(map(_comparable, value))
        simple = all(kept is not None or part is None for kept, part in zip(parts, value, strict=True))
        return parts if simple and not any(isinstance(part, tuple) for part in parts) else repr(value)
    return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two values are the same, but for rounding: zero, NaN and infinity are like themselves alone."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)
