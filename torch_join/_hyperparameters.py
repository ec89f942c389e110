"""Whether the ranks' optimizers still have the same hyperparameters.

Two things make them differ. A rank that has joined does not run the user's code, and does not see what the others
gather after that: what it decides then (a learning rate, from a metric of a loop that was uneven), it decides
otherwise. And a schedule over a rank's own number of batches differs from the first step on, which the handover at
the end of each loop would hide. So all compare where they meet anyway, and those that have come so far where one of
them joins: there all end with the error, and none waits for another that has ended with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_join._errors import JoinError

Hyperparameters = list[tuple[str, str]]  # name and value of each
_PLAIN = frozenset((bool, int, float, str, tuple, list, type(None)))
Words = list[tuple[int, Hyperparameters]]  # of a rank's last steps, by their number


def hyperparameters(objects: Sequence[Any]) -> Hyperparameters:
    """Return the name and value of each, of all optimizers among `objects`."""
    named = _named(objects)
    return _described(named, _groups(named))


def take_hyperparameters(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put what another rank has sent into a group of an optimizer: tensors where those are that they replace."""
    for name, value in values.items():
        own = group.get(name)
        group[name] = value.to(own.device) if isinstance(value, Tensor) and isinstance(own, Tensor) else value


def compare(everyone: Sequence[Hyperparameters]) -> None:
    """Compare what the ranks have.

    Raises:
        JoinError: Some differ.
    """
    for values in zip(*everyone, strict=False):
        if any(value != values[0] for value in values):
            said = ", ".join(f"{value} on rank {rank}" for rank, (_, value) in enumerate(values))
            raise JoinError(
                f"The ranks' optimizers differ: {values[0][0]} is {said}. A rank has decided something (an LR scheduler"
                " on a metric, for example) from a value that the others do not have: ranks that run out of inputs do"
                " not see what others gather after that. Decide from a value that was reduced after the loop, or"
                " on one rank that broadcasts it."
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

    def begin(self) -> None:
        """Note what there is at the begin of a step."""
        self.now = True
        self._begun += 1
        self._last = [*self._last[-1:], (self._begun, _groups(self._named))]

    def words(self, late: bool) -> Words:
        """Return what other ranks need for `compare`.

        Args:
            late: Whether something may have changed since the last step's begin.
        """
        # What lies on another device is not copied in each step: of that, there is only what it holds now.
        newest = self._begun if self.now and not late else -1
        return [(step, _described(self._named, groups, step == newest)) for step, groups in self._last]

    def compare(self, everyone: Mapping[int, Words]) -> None:
        """Compare what ranks, which may be some, had at the begin of the same steps.

        Raises:
            JoinError: Some differ.
        """
        found: dict[tuple[int, str], dict[int, str]] = {}
        for rank, words in everyone.items():
            for step, values in words:
                for name, value in values:
                    found.setdefault((step, name), {})[rank] = value
        for (_, name), values_of in found.items():
            if len(set(values_of.values())) > 1:
                raise JoinError(self._explain(name, values_of))

    def _explain(self, name: str, values: Mapping[int, str]) -> str:
        said = ", ".join(f"{value} on rank {rank}" for rank, value in sorted(values.items()))
        optimizer = next(thing for label, thing in self._named if name.endswith(f" of {label}"))
        schedule = next((t for t in self._objects if getattr(t, "optimizer", None) is optimizer), None)
        setter = "Whatever sets it" if schedule is None else f"{type(schedule).__name__}, which sets it,"
        return (
            f"The ranks' optimizers differ in a step that they make together: {name} is {said}. {setter} goes by"
            " something that is each rank's own. The usual cause is a schedule over a rank's own number of batches,"
            " len(loader). Make it of the longest rank's number, the same on all: gather the lengths before, and take"
            " their maximum."
        )


def _named(objects: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return each optimizer, and a name for it."""
    optimizers = [thing for thing in objects if hasattr(thing, "param_groups")]
    kinds = [type(thing).__name__ for thing in optimizers]
    return [
        (kind if kinds.count(kind) == 1 else f"{kind} {kinds[: index + 1].count(kind)}", thing)
        for index, (kind, thing) in enumerate(zip(kinds, optimizers, strict=True))
    ]


def _groups(named: Sequence[tuple[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the groups of each optimizer; copies, whose values stay as they are unless they are on another device."""
    # In each step: so the usual kinds are not asked whether they are tensors.
    return [
        [{name: v if type(v) in _PLAIN else _kept(v) for name, v in group.items()} for group in optimizer.param_groups]
        for _, optimizer in named
    ]


def _kept(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu" else value


def _described(
    named: Sequence[tuple[str, Any]], groups: Sequence[list[dict[str, Any]]], everywhere: bool = True
) -> Hyperparameters:
    def values() -> Iterator[tuple[str, str]]:
        for (label, _), groups_of_it in zip(named, groups, strict=True):
            for index, group in enumerate(groups_of_it):
                where = f" (group {index})" if len(groups_of_it) > 1 else ""
                for name, value in group.items():
                    if isinstance(value, Tensor) and value.ndim == 0 and everywhere:
                        value = value.item()
                    if isinstance(value, (bool, int, float, tuple, str)):
                        yield f"{name}{where} of {label}", repr(value)

    return list(values())
