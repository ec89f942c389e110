"""A rank's place in a loader, which counts batches trained on and not those read ahead, and how to resume from it.

A loader with a state gets its state back. In any other loader, the batches that were trained on are skipped: by index
if they come from a sampler, so that no sample is read, else by reading. Skipping needs the same order. So meanwhile the
generators that may draw the order are set to their states at the loop's start.

Contract: A `DataLoader` draws its base seed, and then asks its sampler for indices. A sampler draws from torch's,
numpy's or Python's generator, or from a generator that is an attribute of the loader or of an object that it holds.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import cached_property
from itertools import chain, islice
from typing import Any

from torch_join._base.errors import JoinDataWarning, JoinValueError, UnsupportedError
from torch_join._schedule.deals import Deal, Dealer, dealer_of, left_of, redealt_loader
from torch_join._schedule.drawing import (
    drawing,
    drawn_as,
    drawn_later,
    draws_globally,
    draws_order,
    global_kept,
    has_epoch,
    keeps_place,
    loses_order,
    own_drawing,
    parts_of,
    set_drawing,
    set_global,
    set_own,
    told_epochs,
)
from torch_join._schedule.remaining import begin_again, check_same, describe, differs_from, read_past, skip
from torch_join._schedule.stateful import (
    SideBySide,
    begin_anew,
    check_order,
    epochs_of,
    forget_states,
    has_place,
    is_finished,
    loaders_in,
    resumed_at,
)

# The result of `Position.place`: plain types and tensors, if the loader's own state consists of these. Code that knows
# the places of all ranks sets `over`, which means that another loop comes next.
LoaderPlace = dict[str, Any]
NOT_DEALT: LoaderPlace = {"dealt": None, "dealt_to": None, "deals": [], "start": 0, "seeds": None}
_END = object()
EVERY = 64  # reads between two kept states of a loader that is read ahead


class Position:
    """This rank's place in one loop over a loader.

    Args:
        loader: The loader.
        place: The place to resume from; by default the start.
        ahead: The number of reads between two kept states of the loader, if batches are read ahead.
        after: Whether this is the next loop after a resumed one.
        advice: A further remedy if the place belongs to another loader, for messages.

    Attributes:
        iterator: The iterator over the batches left.
        first: How many batches were trained on before.
        keeps: Whether to call `keep` before each read.

    Raises:
        JoinValueError: The place belongs to another loader.
    """

    def __init__(
        self,
        loader: Any,
        place: LoaderPlace | None = None,
        ahead: int = 0,
        after: bool = False,
        advice: str = " If an epoch has several loops, give each a name: `join.batches(loader, name=...)`.",
    ) -> None:
        # For `windows`: the inner loader, and the size of its windows.
        self._windows: Any = loader if hasattr(type(loader), "over") else None
        self._size: int = 1 if self._windows is None else loader.size
        self._loader = loader = loader if self._windows is None else loader.loader
        self._parts = loaders_in(loader)
        self._deals: list[Deal] = [] if place is None or place["over"] else place["deals"]
        self._start: int = place["start"] if place is not None and self._deals else 0
        self._seeds: dict[str, Any] | None = None
        self._all_left: int | None = None  # this rank's number of batches in an epoch that is dealt out anew
        self._stateful = keeps_place(loader) and not self._deals
        # Whether the loader has a state that does not restore its order.
        self._keeps_none = not self._stateful and any(map(has_place, self._parts))
        self.keeps, self._every = bool(ahead) and self._stateful, ahead
        # The last kept states: the number of batches read before, the loader's state, and its generators' states.
        self._states: deque[tuple[int, Any, Any]] = deque()
        self._at_end: LoaderPlace | None = None  # the loader's place, if the loop resumed with no batch left
        restored: list[Any] = [] if place is None else place.pop("restored", [])
        if place is None or place["over"]:
            self.first = 0
            if place is not None:
                if differs := differs_from(loader, self._size, place):
                    JoinDataWarning.warn(
                        f"The state was written after a loop over a different loader than this {type(loader).__name__}"
                        f" ({differs}), so the order may differ from an uninterrupted run.{advice}"
                    )
                self._end(place, restored)
            self._source_states = drawing(loader)
            iterator = begin_again(loader, self._source_states) if after or place is not None else iter(loader)
        else:
            check_same(loader, self._size, place, advice)
            self.first, self._source_states = place["taken"], place["begun"]
            iterator = self._resume(place)
        if place is not None:
            restored += [thing for _, thing in self._drawn]
        self.iterator: Iterator[Any] = iterator if self._windows is None else self._windows.over(iterator)

    @cached_property
    def _drawn(self) -> list[tuple[str, Any]]:
        """The loader's parts from which an order may be drawn, once its iterator exists."""
        return parts_of(self._loader)

    def keep(self, read: int, taken: int) -> None:
        """Keep the loader's state after every `ahead` reads, to start from it when `place` is called later.

        Args:
            read: How many batches have been read.
            taken: A lower bound of the batches trained on when `place` is next called.
        """
        if (read - self.first) % self._every or (self._states and self._states[-1][0] == read):
            return
        try:
            state = deepcopy(self._loader.state_dict())
        except Exception as error:  # `place` raises it
            state = error
        self._states.append((read, state, own_drawing(self._loader, self._drawn)))
        while len(self._states) > 1 and self._states[1][0] <= taken:
            self._states.popleft()

    def place(self, taken: int, read: int, ended: bool) -> LoaderPlace:
        """Return this rank's place, from which a `Position` in another process can resume.

        Args:
            taken: How many batches have been trained on since the loop started.
            read: How many batches have been read.
            ended: Whether no batch is left.

        Raises:
            UnsupportedError: The order is drawn in a way that cannot be reproduced.
        """
        if self._at_end is not None:
            return self._at_end
        state, repeated, now = None, 0, own_drawing(self._loader, self._drawn)
        if self._stateful and (read > taken or (self._states and self._states[-1][0] == read)):
            kept, state, now = next(found for found in reversed(self._states) if found[0] <= taken)
            repeated = taken - kept + (ended and kept == read)  # include the read that has found the end
            if isinstance(state, Exception):
                raise state
        elif self._stateful:
            state = deepcopy(self._loader.state_dict())
        if not ended:
            check_order(self._loader, self._stateful, self._drawn)
        dealer = dealer_of(self._loader)
        return {
            "taken": taken,
            "ended": ended,
            "over": False,
            "dealt": None if dealer is None else dealer.batch * self._size,
            "dealt_to": None if dealer is None else [dealer.rank, dealer.world],
            "deals": self._deals,
            "start": self._start,
            "seeds": self._seeds,
            "loader": describe(self._loader, self._size, ended),
            "begun": self._source_states,
            "now": now,
            "epochs": epochs_of(self._parts),
            "state": state,
            "again": repeated,  # how many batches to read and drop after the state is loaded
        }

    @property
    def length(self) -> int | None:
        """The number of batches, including those before a resume, in an epoch that is dealt out anew; else `None`."""
        return None if self._all_left is None else self._start + -(-self._all_left // self._size)

    def _resume(self, place: LoaderPlace) -> Iterator[Any]:
        loader, taken, state = self._loader, (self.first - self._start) * self._size, place["state"]
        if self._deals:
            is_new = bool(place["plan"] and place["plan"].get("is_new"))
            loader = redealt_loader(loader, self._deals, self._source_states, place["world"], is_new)
            self._all_left = len(loader)
            # The order is the one that the earlier ranks drew; each rank draws anything else itself.
            self._seeds = place["seeds"] or drawing(loader)
            with global_kept():
                set_global(self._seeds)
                return skip(loader, taken, reuses=False)
        if self._keeps_none:
            state = None
        if (state is not None) != self._stateful:
            raise JoinValueError(
                f"The state has {'a' if state is not None else 'no'} position of a loader, but this"
                f" {type(loader).__name__} {'cannot use one' if state is not None else 'needs one'}. Resume with the"
                " kind of loader with which the state was written."
            )
        is_over = place["ended"] or (state is not None and is_finished(state))
        # Other loaders are read up to the last batch: a stream may count its passes, a sampler may draw at its end.
        if is_over and (state is not None or self._keeps_none):
            self._end(place, [])
            self._at_end = place
            return iter(())
        with drawn_as(loader, place["begun"]):
            if state is None:
                return skip(loader, taken, place["begun"]["reuses"])
            loader.load_state_dict(deepcopy(state))  # the loader may change the state later
            with resumed_at(self._parts, place["epochs"], taken):
                iterator = iter(loader)
            if not taken:  # before its first batch, a stream's state is the end of the previous epoch
                forget_states(self._parts)
            # Do not call `state_dict` before a read: LitData's loader would then forget the state just loaded.
            self._states.append((self.first - place["again"], state, place["now"]))
            # A sampler without a state draws the order again, some samplers only at the first read.
            waits = drawn_later(loader, place["begun"])
            drawn = drawing(loader)
        now = {name: state for name, state in place["now"]["own"].items() if name not in waits}
        set_own(loader, {**place["now"], "own": now})  # torchdata's loader draws no base seed here
        return read_past(self._after_state(iterator, drawn), place["again"] * self._size)

    def _after_state(self, iterator: Iterator[Any], drawn: dict[str, Any]) -> Iterator[Any]:
        """Yield the batches after a loaded state; `drawn` is the result of `drawing` when it was loaded."""
        # Set only for the first read: other draws in a step, by transforms for example, belong to this job.
        with drawn_as(self._loader, drawn) if any(map(draws_globally, self._parts)) else nullcontext():
            first = next(iterator, _END)
        forget_states(self._parts)  # else all iterators of this epoch would apply them
        if first is not _END:
            yield first
            yield from iterator

    def _end(self, place: LoaderPlace, restored: Sequence[Any]) -> None:
        """Move the loader to the end of the epoch, where the place is, so that its next iterator starts the next epoch.

        Args:
            place: The place.
            restored: Generators that the loader shares with resumed loaders, which may have drawn from them since.
        """
        loader = self._loader
        before, now = own_drawing(loader), place["now"]
        # A dataset that applies its state in all iterators of an epoch would start at that end again.
        if self._stateful and place["state"] is not None and not any(each is not None for each in place["epochs"]):
            epochs = told_epochs(loader, drawing(loader))  # for the next loop
            with drawn_as(loader, place["begun"]):
                loader.load_state_dict(deepcopy(place["state"]))
                reads_first = not (hasattr(loader, "next_iter_state") or isinstance(loader, SideBySide))
                with suppress(StopIteration):  # the iterator may already be the next epoch's, with fewer batches
                    with resumed_at(self._parts, place["epochs"], place["taken"]):
                        iterator = iter(loader)
                    read_past(iterator, max(place["again"], reads_first))  # some start only at a read
            begin_anew(self._parts, place["epochs"])
            for thing, epoch in epochs:
                if has_epoch(thing):
                    thing.set_epoch(epoch)
        shared = {name for name, thing in parts_of(loader) if any(thing is one for one in restored)}
        kept = {of: {name: state for name, state in before[of].items() if name in shared} for of in before}
        set_own(loader, {of: {**now[of], **kept[of]} for of in kept})


def place_of_state(loader: Any, state: Any, taken: int, epochs: Sequence[Any] | None = None) -> LoaderPlace:
    """Return the place in a loader for which other code has saved only a state.

    Args:
        loader: The loader.
        state: The result of the loader's `state_dict`.
        taken: How many batches had been trained on.
        epochs: The result of `epochs_of` at that time; by default its result now.
    """
    return {
        **NOT_DEALT,
        "taken": taken,
        "ended": False,
        "over": False,
        "loader": describe(loader, 1),
        "begun": drawing(loader),
        "now": {"own": {}, "told": {}},
        "epochs": epochs_of(loaders_in(loader)) if epochs is None else epochs,
        "state": state,
        "again": 0,
        "left": False,
        "plan": None,
    }


def dealt_among(
    places: Sequence[LoaderPlace | None], world: int, step: int, over: bool = False
) -> Sequence[LoaderPlace | None]:
    """Return the places of `world` ranks in an epoch that another number of ranks has started.

    Args:
        places: The places of the ranks that have started it.
        world: How many ranks continue.
        step: The step from which they continue.
        over: Whether the epoch is over. Then a loader that belongs to one rank starts anew.

    Raises:
        JoinValueError: The ranks' data does not come from one sampler that distributes it to all of them.
    """
    is_dealt = all(
        place is not None and place["dealt"] is not None and [*place["dealt_to"]] == [rank, len(places)]
        for rank, place in enumerate(places)
    )
    first: Any = next((place for place in places if place is not None and not place["ended"]), places[0])
    if is_dealt:
        first = {**first, "begun": _of_all(first["begun"]), "now": _of_all(first["now"])}
    if over:
        return [{**first, "state": None} if is_dealt else None] * world
    if not is_dealt:
        raise JoinValueError(
            f"The state was written in the middle of a loop by {len(places)} ranks, and there are {world} now. Here"
            " some rank has its own data; only a sampler that splits one order among all ranks, such as"
            f" DistributedSampler, can redistribute it. Resume with {len(places)} ranks, or from a state written"
            " after a loop."
        )
    taken = [place["taken"] - place["start"] for place in places if place is not None]
    deals = [*first["deals"], {"world": len(places), "taken": taken, "batch": first["dealt"]}]
    plan = {"step": step, "left": [None] * world, "max_sent_per_step": [None] * world, "gone": [], "is_new": True}
    reset = {"taken": step, "start": step, "left": False, "state": None, "again": 0, "plan": plan, "seeds": None}
    return [{**first, **reset, "deals": deals} for _ in range(world)]


def _of_all(drawn: dict[str, Any]) -> dict[str, Any]:
    """Return the states that are equal on all ranks: all but those of the dataset, which differ between ranks."""
    return {**drawn, "own": {part: state for part, state in drawn["own"].items() if draws_order(part)}}


class Order:
    """The order of one loop over a loader whose place a framework restores itself.

    Args:
        loader: The loader, with all sources of the order.
        place: The result of `place` for the loop to resume, or for the loop before this one; `None` in other loops.
        advice: A further remedy if the place belongs to another loader, for the error.
    """

    def __init__(self, loader: Any, place: LoaderPlace | None = None, advice: str = "") -> None:
        self._loader, self._place, self._source_states, self._advice = loader, place, drawing(loader), advice

    def go_through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the framework's batches; the caller has not read the first one yet.

        Raises:
            JoinValueError: The place belongs to another loader.
            UnsupportedError: The order cannot be reproduced.
        """
        place, first = self._place, list[Any]()
        if place is not None and place["ended"]:
            set_drawing(self._loader, place["begun"])
            self._source_states = drawing(self._loader)
        elif place is not None:
            self._check(place)
            self._source_states = place["begun"]
            with drawn_as(self._loader, place["begun"]):
                first += islice(batches, 1)
        yield from chain(first, batches)

    def rest(self, dealer: Dealer | None, deals: Sequence[Deal], world: int, is_new: bool) -> list[Any]:
        """Return this rank's rest of a loop that other ranks have started, instead of `go_through`; see `left_of`.

        Raises:
            JoinValueError: The place belongs to another loader.
            UnsupportedError: The order cannot be reproduced.
        """
        assert self._place is not None
        self._check(self._place)
        self._source_states = self._place["begun"]
        return left_of(self._loader, dealer, deals, self._source_states, world, is_new)

    def _check(self, place: LoaderPlace) -> None:
        if "refused" in place:
            raise UnsupportedError(place["refused"])
        check_same(self._loader, 1, place, self._advice)

    def place(self, ended: bool) -> LoaderPlace:
        """Return the states that draw the order, in plain types and tensors; if `ended`, those for the next loop."""
        if ended:
            return {"ended": True, "begun": drawing(self._loader)}
        try:
            check_order(self._loader, has_place(self._loader), parts_of(self._loader))
            if loses_order(self._loader):
                raise UnsupportedError(
                    "The position in a stateful DataLoader is unknown: its sampler draws from the same generator as the"
                    " loader, and torchdata would resume in another order. Pass torchdata's StatefulDataLoader("
                    "shuffle=True), a sampler with its own generator, or (Accelerate) use_seedable_sampler=True."
                )
            return {"ended": False, "loader": describe(self._loader, 1), "begun": self._source_states}
        except UnsupportedError as error:  # no reason to fail here: frameworks save more, and can resume without places
            return {"ended": False, "refused": str(error)}
