"""Checkpoints with the place of every rank in its dataloaders, in jobs of another number of ranks."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_join._reading.combined import state_of
from torch_join import JoinDataWarning, UnsupportedError
from torch_join.integration import VERSION, LoaderPlace, keeps_place, place_of_state

KEY = "torch_join"


def record_in(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a loop's state in a checkpoint says of the ranks' places, as this version writes it.

    What 0.2.0 has written, which the next release reads no more, has no version.
    """
    record: dict[str, Any] | None = state.get(KEY)
    if record is None or "version" in record:
        return record
    places = [record["places"].get(rank) for rank in range(record["world_size"])]
    return {**record, "places": places, "max_sent_per_step": record.get("max_sent_per_step", record.get("most_gifts"))}


def as_state(record: dict[str, Any], keeper: Any, over: bool) -> dict[str, Any]:
    """Return what `Resuming.load` takes.

    Args:
        record: What `record_in` returned.
        keeper: What has a place on this rank.
        over: Whether the epoch is.
    """
    known = [_placed(place, keeper) for place in record["places"]]
    known = [place and {**place, "over": over} for place in known]
    return {**_state(record["step"], known, over), "version": record.get("version", VERSION)}


def of_lightning(states: list[Any], keeper: Any, taken: int, world_size: int) -> dict[str, Any]:
    """Return the same for a checkpoint of another strategy, which has the states of rank 0's dataloaders."""
    rank_zero_only(JoinDataWarning.warn)(
        "The checkpoint was written in the middle of an epoch by a strategy that saves the state of rank 0's"
        " dataloaders only. Every rank goes on from that state, so some batches may be trained on twice and"
        " others not at all. Resume from the end of an epoch, or write checkpoints with strategy='ddp_join'."
    )
    old = {"states": states, "cycled": [], "epochs": None, "taken": taken, "skipped": 0, "left": False}
    return _state(taken, [_placed(old, keeper)] * world_size)


def _state(step: int, places: list[LoaderPlace | None], over: bool = False) -> dict[str, Any]:
    return {"version": VERSION, "name": "", "step": step, "over": over, "places": places, "others": {}}


def _placed(place: LoaderPlace | None, keeper: Any) -> LoaderPlace | None:
    if place is None or "refused" in place or place.get("states") == []:
        return None
    if "states" not in place:
        return place
    taken = place["taken"] + place["skipped"]
    state = state_of(keeper, place["states"], place["cycled"]) if keeps_place(keeper) else None
    found = place_of_state(keeper, state, taken, place["epochs"])
    return {**found, "skipped": place["skipped"], "has_left": place["left"]}


def why_unknown(record: dict[str, Any] | None) -> str:
    """Return why some rank's place is not known."""
    places = [] if record is None else record["places"]
    return next((place["refused"] for place in places if place and "refused" in place), "they have no state")


def is_dealt_anew(record: dict[str, Any], world_size: int) -> bool:
    """Whether so many ranks go on with an epoch of which others have made steps, so that its length is no limit."""
    return len(record["places"]) != world_size or any(place and place.get("deals") for place in record["places"])


def load_in_one_process(checkpoint: dict[str, Any], fitting: bool) -> None:
    """Prepare a checkpoint for one process, whose loops are Lightning's own, to go on from if it is `fitting`.

    Raises:
        UnsupportedError: Several ranks have written it in an epoch.
    """
    state = checkpoint.get("loops", {}).get("fit_loop", {})
    record = record_in(state.get("state_dict", {}))
    if not fitting or record is None or len(record["places"]) == 1:
        return
    epochs = state["epoch_progress"]["current"]
    check_world(record, 1, is_over=epochs["ready"] == epochs["processed"], limit=0)
    state["state_dict"].pop("combined_loader", None)


def check_world(record: dict[str, Any], world_size: int, is_over: bool, limit: float) -> None:
    """Raise for a checkpoint of other ranks from the middle of an epoch whose rest cannot be known here.

    Args:
        record: What `record_in` returned.
        world_size: How many ranks there are now.
        is_over: Whether the epoch is over.
        limit: How much is used of the dataloaders.

    Raises:
        UnsupportedError: It is one.
    """
    world, places = len(record["places"]), record["places"]
    if not is_over and record["step"] and world_size > 1:
        return check_limit(limit)
    if not is_over and record["step"]:
        raise UnsupportedError(
            f"The checkpoint was written in the middle of an epoch by {world} ranks, and this job has one process,"
            " whose loops are Lightning's own. Resume with as many ranks, or from a checkpoint of an epoch's end."
        )
    if not all(place and place.get("dealt") for place in places):
        rank_zero_only(JoinDataWarning.warn)(
            f"The checkpoint was written by {world} ranks and this job has {world_size}, so the states of its"
            " dataloaders are left out: the next epoch begins with new ones."
        )
    return None


def check_limit(limit: float) -> None:
    """Raise where the rest of an epoch that other ranks have begun is limited.

    Raises:
        UnsupportedError: So it is.
    """
    if isinstance(limit, int) or limit != 1.0:
        raise UnsupportedError(
            "The checkpoint was written in the middle of an epoch by another number of ranks, and with"
            f" limit_train_batches={limit} nobody can say which batches are left. Resume with limit_train_batches=1.0,"
            " with the same number of ranks, or from a checkpoint of an epoch's end."
        )
