"""Several dataloaders side by side, as one in which a rank has a place."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from lightning_join import _compat
from lightning_join._compat import CombinedLoader
from torch_join import JoinValueError
from torch_join.integration import LoaderPlace, SideBySide, draws_globally, forget_states, keeps_place, sampler_of


class Combined(SideBySide):
    """Lightning's combined loader, with what it yields of each step.

    Without a state of its own a place in it is found by reading what comes before once more.

    Attributes:
        loaders: The dataloaders, in order.
    """

    __slots__ = ("_combined",)  # what draws an order is looked for in what is no slot
    _remedy = "that shuffles by torch's default generator: give it one, `DataLoader(..., generator=torch.Generator())`"

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined, self.loaders = combined, combined.flattened

    @property
    def problem(self) -> str:
        """Why the current order cannot be restored: a dataloader has started again, in an order that is lost."""
        restarted = zip(self.loaders, _compat.get_cycled(self._combined), strict=False)  # none in other modes
        names = [type(part).__name__ for part, has_restarted in restarted if has_restarted and self._loses_order(part)]
        if not names:
            return ""
        return (
            f"A CombinedLoader(mode='max_size_cycle') has started its {names[0]} again, and {self._remedy}. Otherwise"
            " the order of its second pass cannot be restored."
        )

    def _loses_order(self, loader: Any) -> bool:
        return draws_globally(loader)

    def __iter__(self) -> Iterator[Any]:
        # Lightning's is no iterator of its own: it would begin again if it were asked for one.
        return iter(partial(next, iter(self._combined)), object())


class StatefulCombined(Combined):
    """The same where some of the dataloaders have a state that says where they are; the others begin anew.

    Attributes:
        stateless: Those.
    """

    __slots__ = ("_loaded", "_newest", "_stateful", "_watched", "stateless")
    _remedy = "its sampler is one of torch's, which has no state: use torchdata.stateful_dataloader.sampler"

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
        """Return the states of the dataloaders that have one, and which have come to their end and begun again."""
        before, states = self._newest, []
        for number, (place, part) in enumerate(self._stateful):
            # One that has ended while others go on would begin anew, so its state stays what it was before that.
            has_ended = before and self._combined._mode == "max_size" and self._watched[place].ended
            states.append(before[number] if has_ended else deepcopy(part.state_dict()))  # which may go on changing
        self._newest = states
        return {"states": states, "cycled": _compat.get_cycled(self._combined)}

    def _loses_order(self, loader: Any) -> bool:
        sampler = sampler_of(loader)
        is_stateless = type(sampler).__module__ == "torch.utils.data.sampler" and hasattr(sampler, "generator")
        return is_stateless and keeps_place(loader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["states"]) != len(self._stateful):
            raise JoinValueError(
                f"The state is one of {len(state['states'])} dataloaders side by side that have states, and here"
                f" {len(self._stateful)} do. Resume with the dataloaders that there were when it was written."
            )
        self._loaded = deepcopy(state)
        for (_, part), its in zip(self._stateful, state["states"], strict=True):
            part.load_state_dict(its)


def place_keeper(combined: CombinedLoader) -> Any:
    """Return what a `Position` goes through for a combined loader: its only dataloader, or all of them as one."""
    if len(combined.flattened) == 1:
        return combined.flattened[0]
    return (StatefulCombined if any(map(keeps_place, combined.flattened)) else Combined)(combined)


def states_in(place: LoaderPlace) -> list[Any]:
    """Return the states that a place has, one for each dataloader that has a state, as Lightning saves them."""
    state = place.get("state")
    is_combined = isinstance(state, dict) and state.keys() == {"states", "cycled"}
    return [] if state is None else state["states"] if is_combined else [state]


def state_of(keeper: Any, states: Sequence[Any], cycled: Sequence[bool] = ()) -> Any:
    """Return the opposite, for a place in what `place_keeper` has returned; states are those of all that have one."""
    if not isinstance(keeper, Combined):
        return states[0]
    stateful = [part for part in keeper.loaders if hasattr(part, "load_state_dict")]
    known = [state for part, state in zip(stateful, states, strict=False) if keeps_place(part)]
    return {"states": known, "cycled": [*cycled]}
