"""What `Join.state_dict` returns, and the loops that go on from it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch_join._base.errors import JoinValueError
from torch_join._schedule.positions import LoaderPlace, end_resumed
from torch_join._tail.reader import Reader

_VERSION = 1  # of what `state_of` returns


def state_of(places: Sequence[LoaderPlace | None], in_loop: bool) -> dict[str, Any]:
    """Return what a checkpoint says of a loop: every rank's place, and where it goes on.

    Args:
        places: By rank; `None` if there was no loop yet.
        in_loop: Whether it is under way.
    """
    begun = [place for place in places if place is not None]
    over = not in_loop and all(place["ended"] and not place["left"] for place in begun)
    # A rank that has a batch at a step has trained on one in each step before.
    steps = (place["taken"] if place["plan"] is None else place["plan"]["step"] for place in begun)
    step = 0 if over else max(steps, default=0)
    placed = [None if place is None else {**place, "over": over} for place in places]
    return {"version": _VERSION, "step": step, "over": over, "places": placed}


class Resuming:
    """Begins loops where a state that was loaded says that they go on.

    Args:
        rank: This rank.
        world_size: How many there are.

    Attributes:
        loaded: The state, until a loop has begun.
        plan: Of the loop that has begun, what the state says of batches that are rebalanced.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self.loaded: dict[str, Any] | None = None
        self.plan: dict[str, Any] | None = None
        self._resumed: tuple[Any, LoaderPlace] | None = None  # a loader, and where a loop over it has gone on

    def load(self, state: dict[str, Any]) -> None:
        """Have the next loop go on where a state says.

        Raises:
            JoinValueError: Other ranks, or another version, have written it.
        """
        if "places" not in state:
            raise JoinValueError(
                "What a loop was to go on from is no state that join.state_dict() has returned, or fabric.save has"
                " written for a dataloader under one of these strategies: it does not say where each rank was."
            )
        if state["version"] != _VERSION:
            raise JoinValueError(
                f"A state of version {state['version']} was given to join.load_state_dict(), which knows {_VERSION}:"
                " another version of torch_join has written it. Resume with that one."
            )
        then = len(state["places"])
        if then != self._world_size and not state["over"]:
            raise JoinValueError(
                f"The state was written in the middle of a loop by {then} ranks, each with a place in its own data, and"
                f" there are {self._world_size} now. Resume with {then} ranks, or from a state that was written after a"
                " loop."
            )
        self.loaded = state if then == self._world_size else {**state, "places": [None] * self._world_size}

    @property
    def place(self) -> LoaderPlace | None:
        """This rank's place in what was loaded; like one where a loop was left, if it is not over."""
        place = None if self.loaded is None else self.loaded["places"][self._rank]
        return None if place is None else {**place, "left": not place["over"]}

    @property
    def first_step(self) -> int:
        """The first step of the loop that is about to begin; -1 where it begins anew."""
        return -1 if self.loaded is None else int(self.loaded["step"])

    def open(self, loader: Iterable[Any], reader_of: Callable[..., Reader[Any]]) -> Reader[Any]:
        """Return what reads a loader, from where it is to go on.

        Raises:
            JoinValueError: That is a place in another loader.
        """
        place, self.loaded = self.place, None
        resumed, self._resumed = self._resumed, None
        after = resumed is not None and resumed[0] is loader
        if resumed is not None and after:
            end_resumed(*resumed)
        self.plan = None if place is None or place["over"] else place["plan"]
        if place is None:
            return reader_of(loader, None, True) if after else reader_of(loader)
        if not place["over"]:
            self._resumed = loader, place
        return reader_of(loader, place)


def check_resumed(names: Sequence[int], steps: Sequence[int]) -> None:
    """Raise if not all ranks have loaded the same state.

    Args:
        names: What errors call the ranks.
        steps: By rank, the `first_step` of its loop.

    Raises:
        JoinValueError: They differ.
    """
    if len({*steps}) > 1:
        ranks = zip(names, steps, strict=True)
        said = "; ".join(f"rank {name}: {'at none' if step < 0 else f'at step {step}'}" for name, step in ranks)
        raise JoinValueError(
            f"A loop goes on at different steps, by the states that ranks gave to join.load_state_dict() ({said}). All"
            " ranks load the same state, before the same loop."
        )
