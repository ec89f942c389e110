"""Each process's position in its loaders, in a checkpoint: Accelerate saves one process's position for all.

Each process writes its own `join_position_<rank>.bin` beside Accelerate's files. As with the random states, this needs
no communication: a script may let only the main process save.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import accelerate
import torch
from accelerate import DistributedType
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import load as load_file

from accelerate_join import _compat
from accelerate_join._loaders import (
    Iterate,
    dealer_of,
    deals_out,
    drawn_from,
    known_as,
    skipped_in,
    with_rest,
)
from accelerate_join._prepared import PreparedLoader
from torch_join import JoinDataWarning, JoinError, UnsupportedError
from torch_join.integration import Deal, Order, gather_objects, global_kept, length_of, resumed_at, set_own, setting

_MARK = "join_world_size"  # key in a loader's state that one process has written for all
_VERSION = 3  # of the files
# The default entries of a position.
NO_MORE: dict[str, Any] = {"deals": [], "dealt": None, "gives": False, "has_no_rest": False, "state": None}
# The moment of a save: the epochs of all loaders, and the step in the current loop. It is equal on all ranks.
When = tuple[list[int], int]


@dataclass
class _Loop:
    """A loop over a loader: its epoch and order, whether it has ended, and whether this process got a batch."""

    iteration: int
    order: Order
    before: int | None  # how many batches were trained on before it with this number of processes
    deals: list[Deal]  # of earlier jobs with other numbers of processes in this epoch
    gives: bool  # whether other processes may train on some of the batches
    reader: Any = None  # while it runs, once it has a batch
    is_over: bool = False
    has_batch: bool = False

    @property
    def taken(self) -> int | None:
        """How many batches were trained on with this number of processes."""
        return self.before if self.before is None or self.reader is None else self.before + self.reader.trained_on

    def iterate(self, own_iter: Iterate, loader: PreparedLoader) -> Iterator[Any]:
        """Yield a loader's batches as Accelerate's `own_iter` does, in the order to restore."""
        return own_iter(loader) if self.deals else self.order.go_through(own_iter(loader))


_loops: WeakKeyDictionary[Any, _Loop] = WeakKeyDictionary()
_loaded: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # where the next loop resumes


@contextmanager
def recording_loop(
    accelerator: accelerate.Accelerator, loader: PreparedLoader, gives: bool
) -> Iterator[tuple[PreparedLoader, bool, _Loop]]:
    """Wrap a loop over `loader`: record its position, and restore the order of a checkpoint from mid-loop.

    Args:
        accelerator: The accelerator that has prepared it.
        loader: The loader of the loop; possibly the rest of a prepared one.
        gives: Whether other processes may train on some of its batches.

    Returns:
        The loader to iterate over; whether this process has no batch left; the loop.

    Raises:
        JoinError: The loaded state belongs to another process.
    """
    count_once(loader)
    waiting = getattr(loader.base_dataloader, "next_iter_state", None) or {}
    if waiting.get(_MARK, 1) > 1 and not deals_out(loader):
        raise JoinError(
            "accelerator.load_state was called before join_uneven_inputs, so all processes got one process's loader"
            " position. Use accelerate_join.Accelerator, or call load_state inside the context, where each process"
            " gets its own position."
        )
    known = known_as(loader, _compat.loaders(accelerator))
    place = _loaded.pop(known, None) or {"amid": False, "has_no_rest": False, "deals": []}
    resumed = place["amid"] and not place["has_no_rest"]
    order = Order(drawn_from(known), place["order"] if resumed else None)
    deals, before, is_at_end = place["deals"] if resumed else [], skipped_in(loader), place["has_no_rest"]
    if place.get("is_new") and before and accelerator.is_main_process:
        JoinDataWarning.warn(
            f"skip_first_batches({before}) skips batches again: load_state has already moved the loader to the"
            " remaining batches, because a different number of processes wrote the checkpoint. Remove"
            " skip_first_batches, or count from there."
        )
    if deals:
        loader, before = rest_of(accelerator, known, order, place), place["taken"]
    elif not place["amid"] and before and (place.get("is_new") or place["deals"] or length_of(loader) == 0):
        is_at_end = True  # the epoch to skip into has ended: it yields no batch, and its order is not drawn again
    elif resumed and _is_stateful(loader):
        before = place["taken"]
    loop = _loops[known] = _Loop(getattr(known, "iteration", 0), order, before, deals, gives)
    try:
        yield loader, is_at_end, loop
    finally:
        loop.before, loop.reader = loop.taken, None
    loop.is_over = True


def count_once(loader: Any) -> None:
    """Let a stateful loader count once the batches that it reads again to resume; torchdata counts them twice.

    Accelerate calls the wrapped loader's `__iter__` by name. Accelerate 1.5 moves the state of a sharded loader back by
    one batch for each other process, as if the main process dispatched the batches.
    """
    if _is_stateful(loader):
        if issubclass(type(loader), DataLoaderShard):
            vars(loader).setdefault("adjust_state_dict_for_prefetch", dict)  # does nothing
        vars(loader.base_dataloader).setdefault("__iter__", partial(_resumed, loader.base_dataloader))


def _resumed(loader: Any) -> Iterator[Any]:
    own: Any = type(loader)
    with resumed_at([loader], [None], taken=0):
        return own.__iter__(loader)  # type: ignore[no-any-return]


def epochs(accelerator: accelerate.Accelerator) -> list[int]:
    """Return the epoch of each prepared loader."""
    return [int(getattr(loader, "iteration", 0)) for loader in _compat.loaders(accelerator)]


def refuse_unsaved(accelerator: accelerate.Accelerator, loader: PreparedLoader | None) -> None:
    """Raise if a checkpoint would omit the state of `loader`.

    Raises:
        UnsupportedError: It would.
    """
    if _is_stateful(loader) and all(loader is not known for known in _compat.loaders(accelerator)):
        raise UnsupportedError(
            "save_state was called in a loop over a stateful DataLoaderShard that was not prepared, so the checkpoint"
            " would lack its position. Pass the loader to accelerate_join.Accelerator.register_for_checkpointing (which"
            " does not shard it), or remove use_stateful_dataloader=True."
        )


@contextmanager
def saving_places(
    accelerator: accelerate.Accelerator,
    when: When | None = None,
    loader: PreparedLoader | None = None,
    leads: bool = False,
    is_active: bool = True,
) -> Iterator[None]:
    """Wrap `save_state`: this process also writes its positions.

    Args:
        accelerator: The accelerator of the loaders.
        when: The moment of the save; `None` outside of the context.
        loader: The loader that is in the last step of its epoch, if any.
        leads: Whether this is the lowest active process in the context.
        is_active: Whether this process has not joined.
    """
    if vars(accelerator).get("_join_saves", False):  # a nested call
        yield
        return

    loaders = _compat.loaders(accelerator)
    last = None if loader is None else known_as(loader, loaders)
    record = {
        "when": (epochs(accelerator), -1) if when is None else when,
        "world_size": accelerator.num_processes,
        "places": [_place_of(each, each is last) for each in loaders],
        # For loops outside the context, if this rank's folder does not contain Accelerate's file.
        "states": [_state_of(each) if _loops.get(each) is None else None for each in loaders],
    }
    leads = leads if when is not None else accelerator.is_main_process
    on_node = accelerator.project_configuration.save_on_each_node and accelerator.is_local_main_process
    stateful = [*filter(_is_stateful, loaders)]
    for each in stateful:
        each.dl_state_dict[_MARK] = accelerator.num_processes
    writing = accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: write(folder, accelerator.process_index, record)
    )
    with writing, setting(accelerator, _join_saves=True), ExitStack() as stack:
        # It is omitted here: otherwise all processes would write the loader's state to the same file at once.
        for each in stateful if not (leads or (on_node and is_active)) else ():
            stack.enter_context(setting(each, use_stateful_dataloader=False))
        yield


@contextmanager
def loading_places(accelerator: accelerate.Accelerator, load_kwargs: dict[str, Any] | None = None) -> Iterator[None]:
    """Wrap `load_state` on all processes: each restores its positions at the end.

    Raises:
        JoinError: The position of a process is missing, and no other position can replace it.
        UnsupportedError: Another number of processes wrote the checkpoint in the middle of an epoch.
    """
    folders: list[str] = []
    with accelerator.register_load_state_pre_hook(lambda models, folder: folders.append(folder)):
        yield
    records = read_all(folders[-1], accelerator, load_kwargs)
    own = records[accelerator.process_index] if accelerator.process_index < len(records) else None
    for index, state in enumerate((own or {}).get("states", ())):
        if state is not None and not Path(folders[-1], _compat.state_file(index)).exists():
            _compat.loaders(accelerator)[index].load_state_dict(state)
    if any(records):
        _take(accelerator, records)


def read_all(
    folder: str, accelerator: accelerate.Accelerator, load_kwargs: dict[str, Any] | None = None
) -> list[dict[str, Any] | None]:
    """Return, on all processes, the records that each process of the saving job wrote into a checkpoint.

    Files of another save are ignored. All processes call this.
    """
    rank, world, what = accelerator.process_index, accelerator.num_processes, "Where a process was in its loaders"

    def read(rank: int) -> dict[str, Any] | None:
        file = _file(folder, rank)
        return load_file(file, map_location="cpu", **(load_kwargs or {})) if file.exists() else None

    records = gather_objects(read(rank), what, None)
    newest = next((record for record in records if record is not None), None)  # each save includes the main process
    if newest is None:
        return records
    if (writers := newest["world_size"]) != world:  # each process reads some of the files
        found = gather_objects({other: read(other) for other in range(rank, writers, world)}, what, None)
        records = [found[writer % world][writer] for writer in range(writers)]
    shared = ("world_size", "when", "version")
    return [each if each and all(each.get(n) == newest.get(n) for n in shared) else None for each in records]


def write(folder: str, rank: int, record: dict[str, Any]) -> None:
    """Write this process's record into a checkpoint: `when`, its `places` and the `world_size`."""
    torch.save({"version": _VERSION, **record}, _file(folder, rank))


def _take(accelerator: accelerate.Accelerator, records: Sequence[Any]) -> None:
    newest = next(record for record in records if record is not None)
    places = [None if record is None else record["places"] for record in records]
    if "version" not in newest:  # the format of 0.2.0, which the next release will not read
        places = [each and [place and {**NO_MORE, "taken": None, **place} for place in each] for each in places]
    loaders = _compat.loaders(accelerator)
    if newest["world_size"] != accelerator.num_processes:
        if accelerator.distributed_type is DistributedType.NO and any(p and p["amid"] for p in newest["places"]):
            raise UnsupportedError(
                f"The checkpoint was written in the middle of an epoch by {newest['world_size']} processes. To resume"
                " with one process, start it with a launcher (torchrun --nproc-per-node 1), or resume from a"
                " checkpoint written at the end of an epoch."
            )
        if not any(newest["places"]):
            JoinDataWarning.warn(
                f"The checkpoint was written by {newest['world_size']} processes (not this job's number) and does not"
                " contain loader positions. If it was written in the middle of an epoch, this job skips the wrong"
                " samples. Resume from a checkpoint written at the end of an epoch."
            )
        by_loader = [*zip(*(each or newest["places"] for each in places), strict=True)]
        lacks = None in places
        chosen = [dealt_among(each, loader, lacks) for each, loader in zip(by_loader, loaders, strict=True)]
        places = [chosen] * accelerator.num_processes
    lacking = [rank for rank, each in enumerate(places) if each is None]
    own = [not deals_out(loader) for loader in loaders]
    if lacking and any(
        is_own and place is not None and place["state"] is not None
        for is_own, place in zip(own, newest["places"], strict=True)
    ):
        raise JoinError(
            f"The checkpoint has no loader position for rank {', '.join(map(str, lacking))}, because only the main"
            " process called save_state. Call save_state on all processes."
        )
    chosen = places[accelerator.process_index]
    if chosen is None:  # if Accelerate shards, all processes with batches left have the same position
        known = [each for each in places if each is not None]
        chosen = next((each for each in known if not any(place and place["has_no_rest"] for place in each)), known[0])
        chosen = [
            place and {**place, "order": None} if is_own else place for is_own, place in zip(own, chosen, strict=True)
        ]
    for loader, place in zip(loaders, chosen, strict=True):
        if place is not None:
            _go_to(loader, place)


def dealt_among(places: Sequence[dict[str, Any] | None], loader: PreparedLoader, lacks: bool) -> dict[str, Any] | None:
    """Return the position of this job's processes in a loader that another number of processes has read.

    Args:
        places: The saved positions by rank; the main process's in place of a missing one.
        loader: The loader.
        lacks: Whether some positions are missing.

    Raises:
        UnsupportedError: The remaining samples cannot be determined.
    """
    known = [place for place in places if place is not None]
    unfinished = [place for place in known if place["amid"]]
    if not unfinished:
        return {**known[0], "state": None, "is_new": True} if known else None
    why = ""
    if any(place["dealt"] is None for place in known) or dealer_of(loader) is None:
        why = (
            "The remaining samples are known only if Accelerate (not with a stream, split_batches, dispatch_batches"
            " or use_stateful_dataloader) or a sampler with `rank` and `num_replicas` distributes the data"
        )
    elif lacks and (any(place["gives"] for place in unfinished) or not deals_out(loader)):
        why = "With rebalance=True or a custom sampler, all processes must have called save_state"
    if why:
        raise UnsupportedError(
            f"The checkpoint was written in the middle of an epoch by {len(places)} processes, and this job has a"
            f" different number. {why}. Resume with {len(places)} processes, or from the end of an epoch."
        )
    first = next((place for place in unfinished if not place["has_no_rest"]), unfinished[0])
    deal = {"world": len(places), "taken": [place["taken"] for place in known], "batch": first["dealt"]}
    return {**first, "state": None, "taken": 0, "deals": [*first["deals"], deal], "is_new": True}


def rest_of(
    accelerator: accelerate.Accelerator, loader: PreparedLoader, order: Order, place: dict[str, Any]
) -> PreparedLoader:
    """Return a loader over the batches that this process has left of an epoch that other processes started."""
    dealer = dealer_of(loader)
    left = order.rest(dealer, place["deals"], accelerator.num_processes, place.get("is_new", False))
    assert dealer is not None
    return with_rest(loader, dealer, left[place["taken"] * dealer.batch :])


def _place_of(loader: PreparedLoader, is_last: bool) -> dict[str, Any] | None:
    """Return this process's position in `loader`; `None` if it has not looped over it in the context."""
    loop = _loops.get(loader)
    if loop is None:
        return None
    iteration = getattr(loader, "iteration", 0)
    is_in_it = iteration == loop.iteration  # Accelerate does not count an epoch that was resumed
    mid_epoch = is_in_it and not is_last and not loop.is_over
    dealer, taken = dealer_of(loader), loop.taken if mid_epoch else 0
    has_no_rest = mid_epoch and _is_stateful(loader) and (bool(loader.end_of_dataloader) or not loop.has_batch)
    return {
        "iteration": iteration + (is_in_it and not mid_epoch),
        "order": loop.order.place(not mid_epoch or has_no_rest),
        "state": _state_of(loader),
        "amid": mid_epoch,
        "has_no_rest": has_no_rest,
        "taken": taken,
        "deals": loop.deals,
        "dealt": None if dealer is None or taken is None else dealer.batch,
        "gives": loop.gives,
    }


def _state_of(loader: Any) -> dict[str, Any] | None:
    """Return this process's state of a stateful loader."""
    if not _is_stateful(loader):
        return None
    return deepcopy({name: value for name, value in loader.dl_state_dict.items() if name != _MARK})


def _go_to(loader: PreparedLoader, place: dict[str, Any]) -> None:
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(place["iteration"])  # also of its sampler, which skip_first_batches leaves unchanged
    if place["state"] is not None and _is_stateful(loader):
        loader.load_state_dict(deepcopy(place["state"]))
        loader.dl_state_dict = place["state"]  # for a save before its next batch
        if place["has_no_rest"] or not place["amid"]:
            with global_kept():
                loader.base_dataloader.state_dict()  # at the loader's end, this repeats draws that were made before
    if "begun" in (place["order"] or {}):
        set_own(drawn_from(loader), place["order"]["begun"])
    _loaded[loader] = place


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"join_position_{rank}.bin"


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))
