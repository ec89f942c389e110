"""What dataloaders and datasets with a state need in an epoch that is resumed in its middle, and in the next one.

Those of other libraries are recognized by their attributes and modules, so that none of these is imported. Seen in
torchdata 0.11, litdata 0.2.76 and datasets 5.2.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from lightning_join._compat import CombinedLoader, Stateful
from torch_join import UnsupportedError


@contextmanager
def at_place(loader: CombinedLoader, place: dict[str, Any]) -> Iterator[None]:
    """Put around what makes the iterator of `loader`, so that each part begins at its state, and none begins anew."""
    loader._load_state_dicts(deepcopy(place["states"]))  # they may go on changing it
    for part, epoch in zip(loader.flattened, place["epochs"], strict=True):
        if epoch is not None:
            # Lightning leaves `on_train_epoch_start`, where it is set as a rule, out of an epoch that is resumed.
            part.dataset.set_epoch(epoch)
        if _is_litdata(part) and place["taken"] > 0:
            part.restore = True  # it takes the end of an epoch for the begin of the next
    # `torchdata.nodes.Loader` begins anew at its end, where this rank has no batch in the rest of the epoch.
    restarting = [part for part in loader.flattened if getattr(part, "restart_on_stop_iteration", False)]
    for part in restarting:
        part.restart_on_stop_iteration = False
    try:
        yield
    finally:
        for part in restarting:
            part.restart_on_stop_iteration = True
        for part in loader.flattened:
            if getattr(part, "next_iter_state", None) is not None:
                part.next_iter_state = None  # else torchdata's, which ended before it, goes on from it next time too


def epochs_of(loaders: Sequence[Any]) -> list[Any]:
    """Return the epochs of datasets that apply a state in the epoch that it is from, and in all iterators of it.

    Streams of Hugging Face's `datasets` do.
    """
    datasets = [getattr(loader, "dataset", None) for loader in loaders]
    bound = [isinstance(each, Stateful) and callable(getattr(each, "set_epoch", None)) for each in datasets]
    return [getattr(each, "epoch", None) if is_bound else None for each, is_bound in zip(datasets, bound, strict=True)]


def begin_anew(loaders: Sequence[Any], epochs: Sequence[Any]) -> None:
    """Prepare for the first epoch after one that was resumed with states of `epochs`.

    Raises:
        UnsupportedError: A dataset would begin at the state once more.
    """
    for loader, saved, now in zip(loaders, epochs, epochs_of(loaders), strict=False):
        if _is_litdata(loader):
            # It learns that the epoch is over by being read past its end, which a loader with a length is not.
            loader.restore = False
        # The state of a copy in a worker ends with that.
        in_worker = getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "persistent_workers", False)
        if now is not None and now == saved and not in_worker:
            raise UnsupportedError(
                f"The {type(loader.dataset).__name__} of a train dataloader was resumed inside of an epoch, and would"
                f" begin there in the next epoch too, since its own is still {now}. Call"
                " `set_epoch(self.current_epoch)` of the dataset in `on_train_start` and in `on_train_epoch_start`, or"
                " resume from a checkpoint of an epoch's end."
            )


def _is_litdata(loader: Any) -> bool:
    return type(loader).__module__.partition(".")[0] == "litdata"
