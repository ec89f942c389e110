"""The state that `Join.state_dict` returns, and the loops that resume from it.

An epoch may have several named loops. In the resumed epoch, the loops that were over when the state was saved are
empty, until the interrupted loop resumes. After that, all loops start from their first batch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch_join._base.errors import JoinValueError
from torch_join._schedule.positions import NOT_DEALT, LoaderPlace, dealt_among
from torch_join._schedule.stateful import begin_anew, loaders_in
from torch_join._tail.reader import Reader

R = TypeVar("R")
VERSION = 3  # of the state that `state_of` returns; the next release no longer reads version 2 (0.2.0)
OVER = -2  # replaces the first step if the loop was over


def state_of(
    places: Sequence[LoaderPlace | None], in_loop: bool, name: str = "", others: Sequence[dict[str, LoaderPlace]] = ()
) -> dict[str, Any]:
    """Return a loop's state for a checkpoint: every rank's place, and the step from which the loop resumes.

    Args:
        places: By rank, its place; `None` if there was no loop yet.
        in_loop: Whether the loop is still running.
        name: The user's name for the loop.
        others: By rank and name, the places in other loops, which are over.
    """
    started = [place for place in places if place is not None]
    over = not in_loop and all(place["ended"] and not place["left"] for place in started)
    # A rank that has a batch at a step has trained on a batch in each earlier step.
    steps = (place["taken"] if place["plan"] is None else place["plan"]["step"] for place in started)
    step = 0 if over else max(steps, default=0)
    found = {"version": VERSION, "name": name, "step": step, "over": over, "places": _placed(places, over)}
    names = others[0] if others else ()
    return {**found, "others": {other: _placed([each.get(other) for each in others], True) for other in names}}


def _placed(places: Sequence[LoaderPlace | None], over: bool) -> list[LoaderPlace | None]:
    return [None if place is None else {**place, "over": over} for place in places]


class Resuming:
    """Starts the loops of one name, and resumes a loop from a loaded state.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        restored: The generators of resumed loops, shared with loops of other names.

    Attributes:
        loaded: The loaded state, until a loop starts.
        reader: The reader of the last loop.
        plan: The rebalancing plan in the state from which the current loop resumed.
    """

    def __init__(self, rank: int, world_size: int, restored: list[Any] | None = None) -> None:
        self._rank, self._world_size = rank, world_size
        self._restored = [] if restored is None else restored
        self.loaded: dict[str, Any] | None = None
        self.reader: Reader[Any] | None = None
        self._ended: Callable[[], LoaderPlace] | None = None  # returns the place after the last loop
        self.plan: dict[str, Any] | None = None
        self._resumed: tuple[Any, LoaderPlace] | None = None  # a loader, and the place at which a loop over it resumed

    def load(self, state: dict[str, Any]) -> None:
        """Resume the next loop from a state.

        Raises:
            JoinValueError: Another version wrote the state; or another world size did, and the loop's rest is unknown.
        """
        if "places" not in state:
            raise JoinValueError(
                "A loop cannot resume from this object, which does not contain each rank's position. Pass the return"
                " value of join.state_dict(), or what fabric.save wrote for a dataloader."
            )
        places = state["places"]
        if state["version"] == 2:
            places = [None if place is None else {**NOT_DEALT, **place} for place in places]
        elif state["version"] != VERSION:
            raise JoinValueError(
                f"The state has version {state['version']}, but this torch_join reads only version {VERSION}. Resume"
                " with the torch_join version that wrote the state."
            )
        if len(places) != self._world_size:
            places = dealt_among(places, self._world_size, state["step"], state["over"])
        self.loaded = {**state, "places": places}

    @property
    def place(self) -> LoaderPlace | None:
        """This rank's place in the loaded state; if the loop is not over, marked as left."""
        place = None if self.loaded is None else self.loaded["places"][self._rank]
        return None if place is None else {**place, "left": not place["over"], "world": self._world_size}

    def find_place(self) -> LoaderPlace | None:
        """Return this rank's place in the last loop, or where the next loop resumes."""
        if self.loaded is not None:
            return self.place
        if self.reader is not None:
            return self.reader.place()
        return None if self._ended is None else self._ended()

    def end(self) -> None:
        """End the last loop, even if it was left by `break`, because another loop starts."""
        if self.reader is not None:
            self._ended = self.reader.end()
            self.reader = None

    @property
    def first_step(self) -> int:
        """The first step of the next loop; -1 if it does not resume."""
        return -1 if self.loaded is None else int(self.loaded["step"])

    def open(self, loader: Iterable[Any], reader_of: Callable[..., R]) -> R:
        """Return a reader of the loader, which starts at the place to resume from.

        Raises:
            JoinValueError: The place belongs to another loader.
        """
        place, self.loaded = self.place, None
        resumed = self._resumed
        after = resumed is not None and resumed[0] is loader
        if resumed is not None and after:
            begin_anew(loaders_in(loader), resumed[1]["epochs"])
            self._resumed = None
        self.plan = None if place is None or place["over"] else place["plan"]
        if place is None:
            return reader_of(loader, None, True) if after else reader_of(loader)
        if not place["over"]:
            self._resumed = loader, place
        return reader_of(loader, {**place, "restored": self._restored})


class NamedLoops:
    """The loops over `batches` by name: the last place in each loop, and where the next loop resumes.

    Args:
        rank: This rank.
        world_size: The number of ranks.

    Attributes:
        name: The name of the current or last loop.
        current: Starts loops of that name.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._ranks = rank, world_size
        self.name = ""
        self.current = Resuming(rank, world_size)
        self._by_name: dict[str, Resuming] = {}
        self._left_out: set[str] = set()  # names that have had an empty loop

    def load(self, state: dict[str, Any]) -> None:
        """See `Resuming.load`."""
        restored: list[Any] = []
        found = Resuming(*self._ranks, restored)
        found.load(state)
        self.current.end()
        self.name, self.current = state["name"], found
        self._by_name[self.name] = found
        for name, places in state["others"].items():
            self._by_name[name] = Resuming(*self._ranks, restored)
            self._by_name[name].load({**state, "places": places, "step": 0, "over": True})

    def begin(self, name: str) -> bool:
        """Start a loop of this name; return whether it was over in the loaded state, and so must be empty.

        Raises:
            JoinValueError: The interrupted loop has not been resumed.
        """
        loaded = self.current.loaded
        if name != self.name and loaded is not None and not loaded["over"]:
            if name in self._left_out or name not in loaded["others"]:
                raise JoinValueError(
                    f"The state passed to join.load_state_dict() was saved in the middle of the loop {self.name!r}, but"
                    f" the loop {name!r} {'begins again' if name in self._left_out else 'begins'} first. Load the state"
                    " before the epoch's first loop, and run the epoch's loops under the same names in the same order."
                )
            self._left_out.add(name)
            return True
        self._left_out.clear()
        self.current.end()
        self.name, self.current = name, self._by_name.setdefault(name, Resuming(*self._ranks))
        return False

    def find_others(self, _: int = 1) -> dict[str, LoaderPlace]:
        """Return this rank's places in loops of other names."""
        places = {name: each.find_place() for name, each in self._by_name.items() if each is not self.current}
        return {name: place for name, place in places.items() if place is not None}


def check_resumed(names: Sequence[int], steps: Sequence[int], loops: Sequence[str]) -> None:
    """Raise if the ranks have not all loaded the same state, or start loops of different names.

    Args:
        names: The ranks' names in errors.
        steps: By rank, the `first_step` of its loop.
        loops: By rank, its loop's name.

    Raises:
        JoinValueError: The steps or the names differ.
    """
    if len({*loops}) > 1:
        described = "; ".join(f"rank {name}: {loop!r}" for name, loop in zip(names, loops, strict=True))
        raise JoinValueError(
            f"The ranks started loops with different names ({described}). Start the same loops in the same order."
        )
    if len({*steps}) > 1:
        ranks = zip(names, steps, strict=True)
        at = {-1: "at none", OVER: "past its end"}
        described = "; ".join(f"rank {name}: {at.get(step, f'at step {step}')}" for name, step in ranks)
        raise JoinValueError(
            "The ranks would resume a loop at different steps, because they passed different states to"
            f" join.load_state_dict() ({described}). Load the same state on all ranks."
        )
