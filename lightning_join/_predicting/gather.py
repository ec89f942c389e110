"""`gather_in_order`: the results of `trainer.predict` on all ranks, in order."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_join._predicting.order import Order, Reading, agree, describe, is_copy, read_indices
from torch_join import JoinError, JoinTypeError, JoinValueError
from torch_join.integration import by_old_name
from torch_join.integration import gather_in_order as gather_batches


def gather_in_order(
    trainer: "pl.Trainer",
    predictions: Any,
    rank: int | None = None,
    *,
    indices: Sequence[Any] | None = None,
    order: Order | None = None,
) -> Any:
    """Return the predictions of all ranks, one per sample, in the dataset's order; all ranks call this.

    ```python
    predictions = trainer.predict(model, loader)
    everything = gather_in_order(trainer, predictions)
    ```

    If a sampler distributes the dataset to the ranks (from Lightning, torch or torch-join, or one with the attributes
    `rank` and `num_replicas`), predictions are in the dataset's order, because Lightning records the indices. Each
    sample occurs once, even if a padding sampler gives it to two ranks. If each rank has its own shard, predictions are
    sorted by rank, then by the order of the shard. If a shard has no indices (a stream, for example), its predictions
    are in the order of its batches.

    Args:
        trainer: The trainer, after `predict` or in a hook at its end.
        predictions: This rank's return value of `predict`, or the same number of other structures: a list with one
            structure per batch; with several dataloaders, a list of such lists. A structure is a tensor with one row
            per sample, a list with one object per sample, or a tuple or mapping of structures.
        rank: The rank that gets the result; by default all do.
        indices: The samples' indices, if Lightning does not record them: like `predictions`, but with a tensor or
            sequence of integers for each batch.
        order: `"dataset"`: indices refer to a dataset that all ranks share. `"shards"`: indices refer to each rank's
            own dataset. By default, the sampler decides; with `indices` it is `"dataset"`.

    Returns:
        One structure of all samples: tensors and lists concatenated, mappings as dictionaries. With several
        dataloaders, a list of these. `None` on ranks other than `rank`, and for a dataloader that has no batch on any
        rank.

    Raises:
        JoinValueError: On all ranks, if some rank's predictions do not have one row per sample, or are not from the
            last `predict`.
        UnsupportedError: On all ranks, if the order is unknown; the message names the argument to pass.
    """
    combined = trainer.predict_loop._combined_loader
    loaders: list[Any] = [] if combined is None else combined.flattened
    batches: list[Sequence[Any]] = []
    known: list[Any] = []
    own: list[Reading] | JoinError
    try:
        batches = _by_loader(trainer, predictions, len(loaders))
        if is_copy(trainer.strategy):
            batches = [[] for _ in loaders]
        if indices is None:
            known = [read_indices(loader, range(len(each))) for loader, each in zip(loaders, batches, strict=True)]
        else:
            known, order = [indices] if len(loaders) == 1 else [*indices], order or "dataset"
        readings = zip(loaders, batches, known, strict=True)
        own = [
            describe(loader, place, len(each), found is not None, order)
            for place, (loader, each, found) in enumerate(readings)
        ]
    except JoinError as error:  # raised on all ranks, which wait in `agree`
        own = error
    except (TypeError, ValueError) as error:
        own = JoinTypeError(
            "Predictions and indices must be a list with one entry per batch; for several dataloaders, a list of such"
            f" lists ({error})."
        )
    found = [
        gather_batches(
            batches[place],
            known[place] if in_order else None,
            rank=rank,
            by_rank=by_rank,
            what="predictions" if len(loaders) == 1 else f"predictions[{place}]",
        )
        for place, (by_rank, in_order) in enumerate(agree(own))
    ]
    return found[0] if len(found) == 1 else found


gather_predictions = by_old_name("gather_predictions", gather_in_order)


def _by_loader(trainer: "pl.Trainer", predictions: Any, count: int) -> list[Sequence[Any]]:
    """Return the predictions of this rank's batches, by dataloader."""
    loop = trainer.predict_loop
    if predictions is None:
        if not loop.return_predictions:
            raise JoinValueError(
                "trainer.predict returned no predictions. Call it with return_predictions=True (not supported by"
                " strategies that spawn or fork), or write predictions with a JoinPredictionWriter."
            )
        return [[] for _ in range(count)]
    found = [predictions] if count == 1 else [*predictions]
    last = [loop.predictions] if count == 1 else [*loop.predictions]
    if [len(each) for each in found] != [len(each) for each in last]:
        raise JoinValueError(
            f"The predictions have {[len(each) for each in found]} batches per dataloader, but the trainer's last"
            f" predict had {[len(each) for each in last]}. Pass the predictions of the last predict, the only one"
            " whose sample indices are known."
        )
    return found
