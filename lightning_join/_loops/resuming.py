"""Checkpoints with every rank's position in its dataloaders, also for jobs with a different number of ranks."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_join._reading.combined import state_of
from torch_join import JoinDataWarning, UnsupportedError
from torch_join.integration import VERSION, LoaderPlace, keeps_place, place_of_state

KEY = "torch_join"


def record_in(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the ranks' positions in a loop's state in a checkpoint, in the format of this version.

    The format of 0.2.0, which the next release no longer reads, has no version.
    """
    record: dict[str, Any] | None = state.get(KEY)
    if record is None or "version" in record:
        return record
    places = [record["places"].get(rank) for rank in range(record["world_size"])]
    most = record.get("max_sent_per_step", record.get("most_gifts"))
    return {**record, "version": VERSION, "places": places, "max_sent_per_step": most}


def as_state(record: dict[str, Any], keeper: Any, over: bool) -> dict[str, Any]:
    """Return the state for `Resuming.load`.

    Args:
        record: The return value of `record_in`.
        keeper: The object that has a position on this rank.
        over: Whether the epoch is over.
    """
    known = [_placed(place, keeper) for place in record["places"]]
    return {**record, "over": over, "places": [place and {**place, "over": over} for place in known]}


def of_lightning(states: list[Any], keeper: Any, taken: int, world_size: int) -> dict[str, Any]:
    """Return such a state for another strategy's checkpoint, which has the states of rank 0's dataloaders."""
    rank_zero_only(JoinDataWarning.warn)(
        "This checkpoint was written in the middle of an epoch, by a strategy that saves only rank 0's dataloaders."
        " Every rank resumes from rank 0's state, so some batches may be trained on twice and others never. Resume"
        " from the end of an epoch, or write checkpoints with strategy='ddp_join'."
    )
    old = {"states": states, "cycled": [], "epochs": None, "taken": taken, "skipped": 0, "left": False}
    return {"version": VERSION, "step": taken, "over": False, "places": [_placed(old, keeper)] * world_size}


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
    """Return why some rank's position is not known."""
    places = [] if record is None else record["places"]
    return next((place["refused"] for place in places if place and "refused" in place), "they have no state")


def is_dealt_anew(record: dict[str, Any], world_size: int) -> bool:
    """Whether a different number of ranks has run steps of the resumed epoch, so that its length is no limit."""
    return len(record["places"]) != world_size or any(place and place.get("deals") for place in record["places"])


def load_in_one_process(checkpoint: dict[str, Any]) -> None:
    """Prepare a checkpoint for a fit in a single process, with Lightning's own loops.

    Raises:
        UnsupportedError: Several ranks have written it in the middle of an epoch.
    """
    state = checkpoint.get("loops", {}).get("fit_loop", {})
    record = record_in(state.get("state_dict", {}))
    if record is None or len(record["places"]) == 1:
        return
    epochs = state["epoch_progress"]["current"]
    if epochs["ready"] != epochs["processed"] and record["step"]:
        raise UnsupportedError(
            f"The checkpoint was written in the middle of an epoch by {len(record['places'])} ranks, but this job has"
            " one process, which runs Lightning's own loops. Resume with as many ranks, or from a checkpoint written at"
            " the end of an epoch."
        )
    warn_of_other_ranks(record, 1)
    state["state_dict"].pop("combined_loader", None)


def warn_of_other_ranks(record: dict[str, Any], world_size: int) -> None:
    """Warn if the positions at an epoch's end cannot be used, because a different number of ranks wrote them."""
    if not all(place and place.get("dealt") for place in record["places"]):
        rank_zero_only(JoinDataWarning.warn)(
            f"The checkpoint was written by {len(record['places'])} ranks and this job has {world_size}, so the states"
            " of its dataloaders are ignored, and the next epoch starts from the beginning."
        )


def check_limit(limit: float) -> None:
    """Raise if a limit applies to the rest of an epoch that a different number of ranks has started.

    Raises:
        UnsupportedError: A limit applies.
    """
    if isinstance(limit, int) or limit != 1.0:
        raise UnsupportedError(
            "The checkpoint was written in the middle of an epoch by a different number of ranks, and with"
            f" limit_train_batches={limit} the remaining batches are unknown. Resume with limit_train_batches=1.0,"
            " with the same number of ranks, or from a checkpoint written at the end of an epoch."
        )
