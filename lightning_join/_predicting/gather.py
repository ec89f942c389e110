"""`gather_predictions`: what `trainer.predict` has returned on all ranks, in order."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_join._predicting.order import Order, Reading, agree, describe, is_copy, read_indices
from torch_join import JoinError, JoinTypeError, JoinValueError
from torch_join.integration import gather_in_order


def gather_predictions(
    trainer: "pl.Trainer",
    predictions: Any,
    rank: int | None = None,
    *,
    indices: Sequence[Any] | None = None,
    order: Order | None = None,
) -> Any:
    """Return the predictions of all ranks, one for each sample, in the dataset's order; all ranks call this.

    ```python
    predictions = trainer.predict(model, loader)
    everything = gather_predictions(trainer, predictions)
    ```

    Where a sampler deals the dataset out to the ranks (Lightning's, torch's, ours, or one with the attributes `rank`
    and `num_replicas`) they are in the dataset's order, which Lightning has recorded as it read. Each sample is there
    once, though a sampler that pads gives some to two ranks. Where each rank has a shard of its own they are in the
    order of the ranks, and on each in that of its shard; of a shard that has no indices, such as a stream, in that of
    its batches.

    Args:
        trainer: The trainer, after `predict` or in a hook at its end.
        predictions: What `predict` has returned on this rank, or as many other structures: a list by batch, of several
            dataloaders a list of these. A batch's structure is a tensor with a row for each sample, a list with an
            object for each, or a tuple or a mapping of structures.
        rank: The rank that gets them; by default all do.
        indices: The samples' indices by batch, where they cannot be known otherwise: like `predictions`, but with a
            tensor or a sequence of whole numbers for each batch.
        order: `"dataset"`: indices are of a dataset that all ranks have. `"shards"`: of each rank's own. By default
            this follows from the sampler; with `indices` it is `"dataset"`.

    Returns:
        One structure like a batch's: tensors joined along their first dimension, lists end to end; mappings as
        dictionaries. Of several dataloaders a list of these. `None` on other ranks than `rank`, and for a dataloader
        in which no rank has a batch.

    Raises:
        JoinValueError: On all ranks, if something in the predictions of one has no row for each sample, or they are not
            those of the last `predict`.
        UnsupportedError: On all ranks, if the order is not known; the message says what to pass.
    """
    combined = trainer.predict_loop._combined_loader
    loaders: list[Any] = [] if combined is None else combined.flattened
    batches: list[Sequence[Any]] = []
    known: list[Any] = []
    mine: list[Reading] | JoinError
    try:
        batches = _by_loader(trainer, predictions, len(loaders))
        if is_copy(trainer.strategy):
            batches = [[] for _ in loaders]
        if indices is None:
            known = [read_indices(loader, range(len(each))) for loader, each in zip(loaders, batches, strict=True)]
        else:
            known, order = [indices] if len(loaders) == 1 else [*indices], order or "dataset"
        readings = zip(loaders, batches, known, strict=True)
        mine = [
            describe(loader, place, len(each), found is not None, order)
            for place, (loader, each, found) in enumerate(readings)
        ]
    except JoinError as error:  # the others wait
        mine = error
    except (TypeError, ValueError) as error:
        mine = JoinTypeError(
            "Predictions, and indices, are a list with one entry for each batch, and of several dataloaders a list of"
            f" such lists ({error})."
        )
    found = [
        gather_in_order(
            batches[place],
            known[place] if in_order else None,
            rank=rank,
            by_rank=by_rank,
            what="predictions" if len(loaders) == 1 else f"predictions[{place}]",
        )
        for place, (by_rank, in_order) in enumerate(agree(mine))
    ]
    return found[0] if len(found) == 1 else found


def _by_loader(trainer: "pl.Trainer", predictions: Any, count: int) -> list[Sequence[Any]]:
    """Return the batches' predictions by dataloader."""
    loop = trainer.predict_loop
    if predictions is None:
        if not loop.return_predictions:
            raise JoinValueError(
                "trainer.predict has returned no predictions. Call it with return_predictions=True (strategies that"
                " spawn or fork cannot), or write them with a JoinPredictionWriter."
            )
        return [[] for _ in range(count)]
    found = [predictions] if count == 1 else [*predictions]
    last = [loop.predictions] if count == 1 else [*loop.predictions]
    if [len(each) for each in found] != [len(each) for each in last]:
        raise JoinValueError(
            f"There are predictions of {[len(each) for each in found]} batches, by dataloader, and the trainer's last"
            f" predict had {[len(each) for each in last]}: of which samples they are is known for that one only."
        )
    return found
