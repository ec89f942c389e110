"""Where each process is in its loaders, in a checkpoint: Accelerate writes the place of one process, for all of them.

Beside Accelerate's own files each process writes one of its own, `join_position_<rank>.bin`. As with the random states,
that needs no other process: a script may have the main process alone save.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import accelerate
import torch
from accelerate.utils import load as load_file

from accelerate_join import _compat
from accelerate_join._loaders import Iterate, deals_out, drawn_from, known_as
from accelerate_join._prepared import PreparedLoader
from torch_join import JoinError, UnsupportedError
from torch_join.integration import Order, gather_objects, global_kept, resumed_at, set_own, setting

_MARK = "join_world_size"  # in a loader's state that one process has written for all
# Where a save was made: the epochs of all loaders, and the step within the current loop. It is alike on all processes.
When = tuple[list[int], int]


@dataclass
class _Begun:
    """A loop over a loader: its epoch and its order, whether it is over, and whether this process has had a batch."""

    iteration: int
    order: Order
    is_over: bool = False
    has_batch: bool = False


_begun: WeakKeyDictionary[Any, _Begun] = WeakKeyDictionary()
_loaded: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # where the next loop goes on


@contextmanager
def going_through(
    accelerator: accelerate.Accelerator, loader: PreparedLoader, own_iter: Iterate
) -> Iterator[tuple[Iterate, bool, Callable[[], None]]]:
    """Put around a loop over `loader`; it is in the order that it had where a checkpoint was written in its middle.

    Args:
        accelerator: That has prepared it.
        loader: What is gone through; the rest of a prepared one, maybe.
        own_iter: What Accelerate goes through it with.

    Returns:
        What takes the place of `own_iter`; whether this process has no batch left; what to call with each batch.

    Raises:
        JoinError: The state that was loaded is another process's.
    """
    count_once(loader)
    waiting = getattr(loader.base_dataloader, "next_iter_state", None) or {}
    if waiting.get(_MARK, 1) > 1 and not deals_out(loader):
        raise JoinError(
            "accelerator.load_state was called before join_uneven_inputs, and gave all processes the place of one of"
            " them in their loader. Use accelerate_join.Accelerator, or call load_state in the context, where each"
            " process gets its own."
        )
    known = known_as(loader, _compat.loaders(accelerator))
    place = _loaded.pop(known, None) or {"amid": False, "has_no_rest": False}
    order = Order(drawn_from(loader), place["order"] if place["amid"] and not place["has_no_rest"] else None)
    loop = _begun[known] = _Begun(getattr(known, "iteration", 0), order)

    def note_batch() -> None:
        loop.has_batch = True

    yield lambda loader: order.go_through(own_iter(loader)), place["has_no_rest"], note_batch
    loop.is_over = True


def count_once(loader: Any) -> None:
    """Have a stateful loader count once what it reads again where it resumes, which torchdata's own counts twice.

    Accelerate calls the `__iter__` of the loader that it has wrapped by name.
    """
    if _is_stateful(loader):
        vars(loader.base_dataloader).setdefault("__iter__", partial(_resumed, loader.base_dataloader))


def _resumed(loader: Any) -> Iterator[Any]:
    own: Any = type(loader)
    with resumed_at([loader], [None], taken=0):
        return own.__iter__(loader)  # type: ignore[no-any-return]


def epochs(accelerator: accelerate.Accelerator) -> list[int]:
    """Return the epoch of each prepared loader."""
    return [int(getattr(loader, "iteration", 0)) for loader in _compat.loaders(accelerator)]


def refuse_unsaved(accelerator: accelerate.Accelerator, loader: PreparedLoader | None) -> None:
    """Raise if `loader` has a state, and a checkpoint would leave it out.

    Raises:
        UnsupportedError: It would.
    """
    if _is_stateful(loader) and all(loader is not known for known in _compat.loaders(accelerator)):
        raise UnsupportedError(
            "save_state in a loop over a stateful DataLoaderShard that was not prepared: the checkpoint would not hold"
            " where it is. Give it to accelerate_join.Accelerator.register_for_checkpointing, which shards nothing, or"
            " leave out use_stateful_dataloader=True."
        )


@contextmanager
def saved(
    accelerator: accelerate.Accelerator,
    when: When | None = None,
    loader: PreparedLoader | None = None,
    leads: bool = False,
    goes_on: bool = True,
) -> Iterator[None]:
    """Put around `save_state`: this process writes its places, too.

    Args:
        accelerator: Whose loaders they are.
        when: Where this is; `None` outside of the context.
        loader: The one that is in the last step of its epoch, if any is.
        leads: Whether this is the lowest active process in the context.
        goes_on: Whether this process has not joined.
    """
    if vars(accelerator).get("_join_saves", False):  # in an override within
        yield
        return

    loaders = _compat.loaders(accelerator)
    last = None if loader is None else known_as(loader, loaders)
    record = {
        "when": (epochs(accelerator), -1) if when is None else when,
        "world_size": accelerator.num_processes,
        "places": [_place_of(each, each is last) for each in loaders],
        # Of a loop outside of the context, for a rank that has a folder of its own, without Accelerate's file.
        "states": [_state_of(each) if _begun.get(each) is None else None for each in loaders],
    }
    leads = leads if when is not None else accelerator.is_main_process
    on_node = accelerator.project_configuration.save_on_each_node and accelerator.is_local_main_process
    stateful = [*filter(_is_stateful, loaders)]
    for each in stateful:
        each.dl_state_dict[_MARK] = accelerator.num_processes
    hook = accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: torch.save(record, _file(folder, accelerator.process_index))
    )
    try:
        with ExitStack() as stack:
            stack.enter_context(setting(accelerator, _join_saves=True))
            # All processes would write the state of a loader to Accelerate's one file, at once.
            for each in stateful if not (leads or (on_node and goes_on)) else ():
                stack.enter_context(_compat.unsaved(each))
            yield
    finally:
        hook.remove()


@contextmanager
def loaded(accelerator: accelerate.Accelerator, load_kwargs: dict[str, Any] | None = None) -> Iterator[None]:
    """Put around `load_state`, on all processes: each gets its own places in the end.

    Raises:
        JoinError: The place of a process is not there, and no other's can stand for it.
        UnsupportedError: Another number of processes has written the checkpoint amid an epoch.
    """
    folders: list[str] = []
    hook = accelerator.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
    try:
        yield
    finally:
        hook.remove()
    file = _file(folders[-1], accelerator.process_index)
    mine = load_file(file, map_location="cpu", **(load_kwargs or {})) if file.exists() else None
    for index, state in enumerate((mine or {}).get("states", ())):
        if state is not None and not Path(folders[-1], _compat.state_file(index)).exists():
            _compat.loaders(accelerator)[index].load_state_dict(state)
    everyone = gather_objects(mine, "Where a process was in its loaders", None)
    if any(everyone):
        _take(accelerator, everyone)


def _take(accelerator: accelerate.Accelerator, everyone: Sequence[Any]) -> None:
    newest = next(record for record in everyone if record is not None)  # the main process is in every save
    places = [None if record is None or record["when"] != newest["when"] else record["places"] for record in everyone]
    loaders = _compat.loaders(accelerator)
    if newest["world_size"] != accelerator.num_processes:
        if any(place is not None and place["amid"] for place in newest["places"]):
            raise UnsupportedError(
                f"The checkpoint was written in the middle of an epoch by {newest['world_size']} processes, each in a"
                f" place of its own, and this job has {accelerator.num_processes}. Resume with"
                f" {newest['world_size']} processes, or from a checkpoint of an epoch's end."
            )
        places = [[place and {**place, "state": None} for place in newest["places"]]] * len(everyone)
    lacking = [rank for rank, each in enumerate(places) if each is None]
    own = [not deals_out(loader) for loader in loaders]
    if lacking and any(
        is_own and place is not None and place["state"] is not None
        for is_own, place in zip(own, newest["places"], strict=True)
    ):
        raise JoinError(
            f"The checkpoint does not hold where rank {', '.join(map(str, lacking))} was in the loader of its own: the"
            " main process alone has saved it. Have all processes call save_state."
        )
    mine = places[accelerator.process_index]
    if mine is None:  # where Accelerate shards, one that goes on stands for all that do
        known = [each for each in places if each is not None]
        mine = next((each for each in known if not any(place and place["has_no_rest"] for place in each)), known[0])
        mine = [
            place and {**place, "order": None} if is_own else place for is_own, place in zip(own, mine, strict=True)
        ]
    for loader, place in zip(loaders, mine, strict=True):
        if place is not None:
            _go_to(loader, place)


def _place_of(loader: PreparedLoader, is_last: bool) -> dict[str, Any] | None:
    """Return where this process is in `loader`; `None` if it has not gone through it in the context."""
    begun = _begun.get(loader)
    if begun is None:
        return None
    iteration = getattr(loader, "iteration", 0)
    is_in_it = iteration == begun.iteration  # Accelerate counts no epoch whose rest was gone through
    amid = is_in_it and not is_last and not begun.is_over
    has_no_rest = amid and _is_stateful(loader) and (bool(loader.end_of_dataloader) or not begun.has_batch)
    return {
        "iteration": iteration + (is_in_it and not amid),
        "order": begun.order.place(not amid or has_no_rest),
        "state": _state_of(loader),
        "amid": amid,
        "has_no_rest": has_no_rest,
    }


def _state_of(loader: Any) -> dict[str, Any] | None:
    """Return this process's state of a stateful loader."""
    if not _is_stateful(loader):
        return None
    return deepcopy({name: value for name, value in loader.dl_state_dict.items() if name != _MARK})


def _go_to(loader: PreparedLoader, place: dict[str, Any]) -> None:
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(place["iteration"])  # of its sampler too, which skip_first_batches does not tell
    if place["state"] is not None and _is_stateful(loader):
        loader.load_state_dict(deepcopy(place["state"]))
        loader.dl_state_dict = place["state"]  # for a save before its next batch
        if place["has_no_rest"] or not place["amid"]:
            with global_kept():
                loader.base_dataloader.state_dict()  # draws, as it comes to its end, what has been drawn already
    if "begun" in (place["order"] or {}):
        set_own(drawn_from(loader), place["order"]["begun"])
    _loaded[loader] = place


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"join_position_{rank}.bin"


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))
