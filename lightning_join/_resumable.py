"""What dataloaders of other libraries need around an epoch that is resumed in its middle.

Told by their attributes: none of these libraries is imported. Seen in torchdata 0.11, litdata 0.2.76 and datasets 5.2.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_join._compat import Stateful
from torch_join import UnsupportedError


@contextmanager
def at_their_place(loaders: Sequence[Any]) -> Iterator[None]:
    """Put around what makes iterators of loaders that have just been given a state.

    `torchdata.nodes.Loader` begins anew if its state is that of the end, where this rank has no batch in the rest of
    the epoch.
    """
    restarting = [each for each in loaders if getattr(each, "restart_on_stop_iteration", False)]
    for loader in restarting:
        loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        for loader in restarting:
            loader.restart_on_stop_iteration = True


def epochs_of(loaders: Sequence[Any]) -> list[Any]:
    """Return the epoch of each loader whose dataset applies the state it was given to all of one epoch's iterators.

    Streams of Hugging Face's `datasets` do. In a worker process that ends with the epoch the state is gone.
    """
    datasets = [getattr(loader, "dataset", None) for loader in loaders]
    bound = [isinstance(each, Stateful) and callable(getattr(each, "set_epoch", None)) for each in datasets]
    lasts = [getattr(each, "persistent_workers", True) or getattr(each, "num_workers", 0) == 0 for each in loaders]
    return [
        getattr(dataset, "epoch", None) if is_bound and last else None
        for dataset, is_bound, last in zip(datasets, bound, lasts, strict=True)
    ]


def begin_anew(loaders: Sequence[Any], resumed_in: Sequence[Any]) -> None:
    """Prepare for the first epoch after one that was resumed.

    Args:
        loaders: The dataloaders.
        resumed_in: What `epochs_of` said in the resumed epoch.

    Raises:
        UnsupportedError: A dataset would go on from the resumed place once more.
    """
    for loader, before, now in zip(loaders, resumed_in, epochs_of(loaders), strict=True):
        if now is not None and now == before:
            name = type(loader.dataset).__name__
            raise UnsupportedError(
                f"The {name} of a train dataloader was resumed in the middle of an epoch, and would begin in the next"
                f" one where it was resumed, since its own epoch is still {now}. Call `set_epoch(self.current_epoch)`"
                " of the dataset in `on_train_epoch_start`, or resume from a checkpoint of an epoch's end."
            )
        if type(loader).__module__.partition(".")[0] == "litdata":
            # It learns that the epoch is over by being read past its end, which a loader with a length is not.
            loader.restore = False
