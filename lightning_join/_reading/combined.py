"""Several dataloaders side by side, treated as one loader in which a rank has a position."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from lightning_join import _compat
from lightning_join._compat import CombinedLoader
from torch_join import JoinValueError
from torch_join.integration import LoaderPlace, SideBySide, draws_globally, forget_states, keeps_place, sampler_of


class Combined(SideBySide):
    """Lightning's combined loader, with the batches that it yields in each step.

    Without a state, a position is restored by reading all batches before it again.

    Attributes:
        loaders: The dataloaders, in order.
    """

    __slots__ = ("_combined",)  # a slot is hidden from the search for objects that draw an order, unlike attributes
    _remedy = "which shuffles by torch's default generator. Pass `DataLoader(..., generator=torch.Generator())`"

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined, self.loaders = combined, combined.flattened

    @property
    def problem(self) -> str:
        """Why the current order cannot be restored: a dataloader has restarted, in an order that is lost."""
        restarted = zip(self.loaders, _compat.get_cycled(self._combined), strict=False)  # none in other modes
        names = [type(part).__name__ for part, has_restarted in restarted if has_restarted and self._loses_order(part)]
        if not names:
            return ""
        return (
            "The order of the second pass cannot be restored, because a CombinedLoader(mode='max_size_cycle')"
            f" restarted its {names[0]}, {self._remedy}."
        )

    def _loses_order(self, loader: Any) -> bool:
        return draws_globally(loader)

    def __iter__(self) -> Iterator[Any]:
        # Lightning's loader is not its own iterator: `iter()` would restart it.
        return iter(partial(next, iter(self._combined)), object())


class StatefulCombined(Combined):
    """A combined loader in which some dataloaders have a state with their position; the others start anew.

    Attributes:
        stateless: The dataloaders without such a state.
    """

    __slots__ = ("_loaded", "_newest", "_stateful", "_watched", "stateless")
    _remedy = "whose torch sampler has no state. Use a sampler of torchdata.stateful_dataloader.sampler"

    def __init__(self, combined: CombinedLoader) -> None:
        super().__init__(combined)
        self.stateless = [part for part in self.loaders if not keeps_place(part)]
        self._stateful = [(place, part) for place, part in enumerate(self.loaders) if keeps_place(part)]
        self._loaded: dict[str, Any] = {}  # until there is an iterator
        self._newest: list[Any] = []
        self._watched: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        iterator, loaded, self._loaded = super().__iter__(), self._loaded, {}
        self._newest = loaded.get("states", [])
        _compat.set_cycled(self._combined, loaded.get("cycled", []))
        self._watched = _compat.watch_ends(self._combined, forget_states)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the dataloaders that have one, and which loaders have ended and restarted."""
        before, states = self._newest, []
        for number, (place, part) in enumerate(self._stateful):
            # A loader that ended before the others would start anew, so its state stays as it was before that.
            has_ended = before and self._combined._mode == "max_size" and self._watched[place].ended
            states.append(before[number] if has_ended else deepcopy(part.state_dict()))  # which may change later
        self._newest = states
        return {"states": states, "cycled": _compat.get_cycled(self._combined)}

    def _loses_order(self, loader: Any) -> bool:
        sampler = sampler_of(loader)
        is_stateless = type(sampler).__module__ == "torch.utils.data.sampler" and hasattr(sampler, "generator")
        return is_stateless and keeps_place(loader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["states"]) != len(self._stateful):
            raise JoinValueError(
                f"The state was written with {len(state['states'])} stateful dataloaders, but there are"
                f" {len(self._stateful)} now. Resume with the same dataloaders."
            )
        self._loaded = deepcopy(state)
        for (_, part), own in zip(self._stateful, state["states"], strict=True):
            part.load_state_dict(own)


def place_keeper(combined: CombinedLoader) -> Any:
    """Return the object that a `Position` reads for a combined loader: its only dataloader, or all of them as one."""
    if len(combined.flattened) == 1:
        return combined.flattened[0]
    return (StatefulCombined if any(map(keeps_place, combined.flattened)) else Combined)(combined)


def states_in(place: LoaderPlace) -> list[Any]:
    """Return the states in a position, one for each dataloader that has a state, as Lightning saves them."""
    state = place.get("state")
    is_combined = isinstance(state, dict) and state.keys() == {"states", "cycled"}
    return [] if state is None else state["states"] if is_combined else [state]


def state_of(keeper: Any, states: Sequence[Any], cycled: Sequence[bool] = ()) -> Any:
    """Return the state of a `place_keeper`'s return value from a list of states, as `states_in` returns it."""
    if not isinstance(keeper, Combined):
        return states[0]
    stateful = [part for part in keeper.loaders if hasattr(part, "load_state_dict")]
    known = [state for part, state in zip(stateful, states, strict=False) if keeps_place(part)]
    return {"states": known, "cycled": [*cycled]}
