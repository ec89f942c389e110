"""Checks that the ranks' optimizers still have the same hyperparameters.

They come to differ for two reasons. A joined rank does not run user code and does not get the values that active ranks
gather, so it misses a decision made there, such as a learning rate set from a metric. And a schedule over a rank's own
number of batches differs from the first step; the handover after each loop would hide that. So all ranks compare where
they meet anyway, and active ranks compare when one of them joins. All of them then raise the error, and none waits for
a rank that has already raised it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torch_join._base.errors import JoinError

_SIMPLE = (bool, int, float, str)
_Simple = float | bool | str | None  # an `int` is a `float`, too
Hyperparameters = list[tuple[str, _Simple | tuple[_Simple, ...]]]  # names and values
# Some optimizers compute a hyperparameter (`d` in Prodigy and D-Adaptation), whose last bits may depend on the number
# of threads, for example. Different schedules differ by far more.
_TOLERANCE = 1e-6
Recorded = list[tuple[int, Hyperparameters]]  # the hyperparameters in a rank's last steps, with the steps' numbers


def hyperparameters(objects: Sequence[Any]) -> Hyperparameters:
    """Return the names and values of all hyperparameters of the optimizers among `objects`."""
    named = _named(objects)
    return _described(named, [optimizer.param_groups for _, optimizer in named])


def group_options(optimizer: Any) -> list[dict[str, Any]]:
    """Return each group of an optimizer without its parameters, for `take_group_options`."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def take_group_options(optimizer: Any, options: Sequence[Mapping[str, Any]]) -> None:
    """Set the groups of an optimizer to another rank's `group_options`; tensors stay on their devices.

    Raises:
        ValueError: The optimizer has another number of groups.
    """
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name, value in values.items():
            own = group.get(name)
            group[name] = value.to(own.device) if isinstance(value, Tensor) and isinstance(own, Tensor) else value


def compare(by_rank: Sequence[Hyperparameters], names: Sequence[int]) -> None:
    """Compare the ranks' hyperparameters.

    Args:
        by_rank: The hyperparameters, by rank.
        names: The ranks' names in errors.

    Raises:
        JoinError: Some differ.
    """
    if all(values is by_rank[0] for values in by_rank):  # `gather` returns one object for equal values
        return
    for values in zip(*by_rank, strict=False):
        if not all(name == values[0][0] and _are_alike(value, values[0][1]) for name, value in values):
            listing = ", ".join(f"{value!r} on rank {rank}" for rank, (_, value) in zip(names, values, strict=True))
            raise JoinError(
                f"The ranks' optimizers differ: {values[0][0]} is {listing}. One rank changed the value based on"
                " something local, such as its own metric or batch counter. Base the change on the step number, on a"
                " value reduced after the loop, or on one rank's decision that it broadcasts."
            )


class Steps:
    """The hyperparameters at the start of this rank's last two steps in a loop.

    When the ranks notice that a rank has joined, it has started as many steps as the others, or one fewer. Since then,
    code after a loop or at the top of the next step may have changed hyperparameters.

    Args:
        objects: Everything passed to `Join`.

    Attributes:
        now: Whether this rank has only just started its last step.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._named = _named(objects)
        self.forget()

    def forget(self) -> None:
        """Start another loop."""
        self.now = False
        self._step_number = 0
        self._last: list[tuple[int, list[list[dict[str, Any]]]]] = []
        self._changing: list[tuple[int, int, str]] = []  # optimizer, group and name of values that may change in place
        self._counts: list[int] = []  # each optimizer's number of groups when `_changing` was computed

    def begin(self) -> None:
        """Record the hyperparameters at the start of a step."""
        self.now = True
        self._step_number += 1
        self._last = [*self._last[-1:], (self._step_number, self._copies())]

    def skip(self) -> None:
        """Start a step; no rank can join in it or before it."""
        self.now = True
        self._step_number += 1

    def _copies(self) -> list[list[dict[str, Any]]]:
        """Return copies of all groups, whose values no longer change.

        There may be hundreds of groups, so this searches once per loop for values that may change in place.
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

    def recorded(self, late: bool) -> Recorded:
        """Return the values that other ranks need for `compare`.

        Args:
            late: Whether a value may have changed since the start of the last step.
        """
        # A value that started to change in place within the loop has no copy, only its current value.
        newest = self._step_number if self.now and not late else -1
        return [(step, _described(self._named, groups, step == newest)) for step, groups in self._last]

    def compare(self, by_rank: Mapping[int, Recorded]) -> None:
        """Compare the hyperparameters of some ranks, by name, at the start of the same steps.

        Raises:
            JoinError: Some differ.
        """
        found: dict[tuple[int, str], dict[int, Any]] = {}
        for rank, recorded in by_rank.items():
            for step, values in recorded:
                for name, value in values:
                    found.setdefault((step, name), {})[rank] = value
        for (_, name), values_of in found.items():
            first, *others = values_of.values()
            if not all(_are_alike(first, other) for other in others):
                raise JoinError(self._explain(name, values_of))

    def _explain(self, name: str, values: Mapping[int, Any]) -> str:
        listing = ", ".join(f"{value!r} on rank {rank}" for rank, value in sorted(values.items()))
        optimizer = next(thing for label, thing in self._named if name.endswith(f" of {label}"))
        schedule = next((t for t in self._objects if getattr(t, "optimizer", None) is optimizer), None)
        setter = "Whatever sets it" if schedule is None else f"{type(schedule).__name__}, which sets it,"
        return (
            f"The ranks' optimizers differ in the same step: {name} is {listing}. {setter} depends on a value that"
            " differs between ranks, usually len(loader) or a step counter. Use the largest len(loader) of all ranks,"
            " and pass the counter to Join (an object with state_dict and load_state_dict) or compute it: epoch *"
            " longest + step."
        )


def _named(objects: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return each optimizer with its name for errors."""
    optimizers = [thing for thing in objects if hasattr(thing, "param_groups")]
    kinds = [type(thing).__name__ for thing in optimizers]
    return [
        (kind if kinds.count(kind) == 1 else f"{kind} {kinds[: index + 1].count(kind)}", thing)
        for index, (kind, thing) in enumerate(zip(kinds, optimizers, strict=True))
    ]


class _OnDevice(NamedTuple):
    """A copy of a number on another device; it is read only when it is compared, not in each step."""

    copy: Tensor


def _read(value: Any) -> Any:
    """Return the current value of a number, or list of numbers, that may change in place."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item() if value.device.type == "cpu" else _OnDevice(value.detach().clone())
    if type(value) is list and value and all(type(part) in (bool, int, float) for part in value):
        return tuple(value)
    return value


def _described(
    named: Sequence[tuple[str, Any]], groups: Sequence[Sequence[Mapping[str, Any]]], is_now: bool = True
) -> Hyperparameters:
    """Return the hyperparameters in `groups` by name. Values that change in place are read only if `is_now`."""
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
    """Return `value` in a form that can be sent and compared, or `None`."""
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, tuple):
        parts = tuple(map(_comparable, value))
        simple = all(kept is not None or part is None for kept, part in zip(parts, value, strict=True))
        return parts if simple and not any(isinstance(part, tuple) for part in parts) else repr(value)
    return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two values are equal up to rounding; zero, NaN and infinity equal only themselves."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)
