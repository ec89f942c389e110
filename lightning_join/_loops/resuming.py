"""Checkpoints with the place of every rank in its dataloaders, in jobs of another number of ranks."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from torch_join import UnsupportedError

KEY = "torch_join"


def goes_on_in_order(record: dict[str, Any] | None) -> bool:
    """Whether all ranks' orders are known, as of dataloaders without a state."""
    places = [] if record is None else record["places"].values()
    return bool(places) and all(place is not None and isinstance(place.get("order"), dict) for place in places)


def is_dealt_anew(record: dict[str, Any] | None, world_size: int) -> bool:
    """Whether so many ranks go on with an epoch of which others have made steps, so that its length is no limit."""
    if record is None or record["world_size"] != world_size:
        return record is not None
    return goes_on_in_order(record) and any(place["order"]["deals"] for place in record["places"].values())


def load_in_one_process(checkpoint: dict[str, Any], fitting: bool) -> None:
    """Prepare a checkpoint for one process, whose loops are Lightning's own, to go on from if it is `fitting`.

    Raises:
        UnsupportedError: Several ranks have written it in an epoch.
    """
    state = checkpoint.get("loops", {}).get("fit_loop", {})
    record = state.get("state_dict", {}).get(KEY)
    if not fitting or record is None or record["world_size"] == 1:
        return
    epochs = state["epoch_progress"]["current"]
    check_world(record["world_size"], 1, is_over=epochs["ready"] == epochs["processed"])
    state["state_dict"].pop("combined_loader", None)


def check_world(ranks: int, world_size: int, is_over: bool) -> None:
    """Raise for a checkpoint from the middle of an epoch that other ranks have written.

    Raises:
        UnsupportedError: It is one.
    """
    if not is_over:
        raise UnsupportedError(
            f"The checkpoint was written in the middle of an epoch by {ranks} ranks, and this job has {world_size}."
            " What is left is known with two ranks or more, one DataLoader without a state whose sampler deals out one"
            " order to all ranks (Lightning's, or one that says its `rank` and `num_replicas`), and"
            f" limit_train_batches=1.0. Resume with {ranks} ranks, or from a checkpoint of an epoch's end."
        )
    rank_zero_warn(
        f"The checkpoint was written by {ranks} ranks and this job has {world_size}, so the states of its"
        " dataloaders are left out: the next epoch begins with new ones."
    )
