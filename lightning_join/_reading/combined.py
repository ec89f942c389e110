"""Several dataloaders side by side, as one in which a rank has a place."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from lightning_join import _compat
from lightning_join._compat import CombinedLoader, Stateful
from torch_join.integration import LoaderPlace, SideBySide, forget_states


class Combined(SideBySide):
    """Lightning's combined loader, with what it yields of each step.

    Without a state of its own a place in it is found by reading what comes before once more.

    Attributes:
        loaders: The dataloaders, in order.
    """

    __slots__ = ("_combined",)  # what draws an order is looked for in what is no slot

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined, self.loaders = combined, combined.flattened

    def __iter__(self) -> Iterator[Any]:
        return iter(self._combined)


class StatefulCombined(Combined):
    """The same where some of the dataloaders have a state; see `begin_anew_in`."""

    __slots__ = ("_loaded", "_newest")

    def __init__(self, combined: CombinedLoader) -> None:
        super().__init__(combined)
        self._loaded: dict[str, Any] = {}  # until there is an iterator
        self._newest: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        iterator, loaded, self._loaded = super().__iter__(), self._loaded, {}
        self._newest = loaded.get("states", [])
        _compat.set_cycled(self._combined, loaded.get("cycled", []))
        _compat.watch_ends(self._combined, forget_states)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the dataloaders that have one, and which have come to their end and begun again."""
        states = self._combined._state_dicts()
        if self._newest:
            # A loader that has ended while others go on would begin anew, so its state stays what it was before that.
            ends = zip(_compat.ended_parts(self._combined), self._newest, states, strict=True)
            states = [before if ended else state for ended, before, state in ends]
        self._newest = deepcopy(states)  # a state may hold what the loader goes on changing
        return {"states": self._newest, "cycled": _compat.get_cycled(self._combined)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = deepcopy(state)
        self._combined._load_state_dicts(state["states"])


def place_keeper(combined: CombinedLoader) -> Any:
    """Return what a `Position` goes through for a combined loader: its only dataloader, or all of them as one."""
    if len(combined.flattened) == 1:
        return combined.flattened[0]
    is_stateful = any(isinstance(part, Stateful) for part in combined.flattened)
    return StatefulCombined(combined) if is_stateful else Combined(combined)


def begin_anew_in(keeper: Any) -> list[Any]:
    """Return the dataloaders that begin anew where others go on from their states."""
    stateless = [part for part in getattr(keeper, "loaders", ()) if not isinstance(part, Stateful)]
    return stateless if isinstance(keeper, StatefulCombined) else []


def states_in(place: LoaderPlace) -> list[Any]:
    """Return the states that a place has, one for each dataloader that has a state, as Lightning saves them."""
    state = place.get("state")
    is_combined = isinstance(state, dict) and state.keys() == {"states", "cycled"}
    return [] if state is None else state["states"] if is_combined else [state]


def state_of(keeper: Any, states: Sequence[Any], cycled: Sequence[bool] = ()) -> Any:
    """Return the opposite, for a place in what `place_keeper` has returned."""
    return {"states": [*states], "cycled": [*cycled]} if isinstance(keeper, Combined) else states[0]
