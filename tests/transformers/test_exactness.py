"""`JoinTrainer`: the parameters are those that a plain `Trainer` in one process computes on the unions."""

import pytest
import torch

from tests.core.backward.synced import SyncNorm
from tests.covering import others_long
from tests.support.front_ends.transformers import (
    LOSS_TOLERANCE,
    SMOOTHING,
    Fit,
    Trained,
    by_trainer,
    count_labels,
    in_one_process,
    train,
)
from tests.support.run import TOLERANCE
from tests.support.workers import Workers

PROCESSES = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2}
FITS = {
    "rank 0 first": Fit((2, 5), extra={"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "rank 0 has none": Fit((0, 4), accumulate=2, extra={"label_smoothing_factor": SMOOTHING}),
    "3 ranks": Fit((3, 0, 5), accumulate=3),
    "means": Fit((2, 5), counts=False, accumulate=2),
    "active": Fit((5, 2), counts=False, weighting="active", extra={"max_grad_norm": 0.0}),
    "samples": Fit((2, 5), counts=False, weighting="samples", accumulate=3),
    "sharded by Trainer": Fit(samples=7, batch_size=2),
    "sharded by Trainer, 3 ranks": Fit(samples=20, processes=3, accumulate=2, counts=False, weighting="samples"),
    "streams": Fit((2, 5), iterable=True, accumulate=3, extra={"max_steps": 7}),
    "streams, rank 0 has none": Fit((0, 5), iterable=True, counts=False, extra={"max_steps": 7}),
    "rebalanced": Fit((1, 7), accumulate=2, rebalance=True),
    "rebalanced streams": Fit(
        (0, 4, 1), iterable=True, rebalance=True, counts=False, weighting="samples", extra={"max_steps": 5}
    ),
    "rebalanced by Trainer": Fit(samples=9, rebalance=True),
    "3 ranks smooth labels": Fit((1, 0, 3), extra={"label_smoothing_factor": SMOOTHING}),
    "synced batch norm": Fit((5, 2), batch_size=3, norm=SyncNorm, accumulate=2),
    "synced batch norm, rank 0 has none": Fit((0, 4), batch_size=3, norm=SyncNorm),
    "loaders with processes": Fit((0, 5), accumulate=2, extra=PROCESSES),
    "streams with processes": Fit((2, 5), iterable=True, extra={"max_steps": 7, **PROCESSES}),
    "rebalanced, with processes": Fit((1, 6), rebalance=True, extra=PROCESSES),
    "full batches only": Fit((0, 4), accumulate=2, extra={"dataloader_drop_last": True}),
    "full batches only, sharded by Trainer": Fit(samples=7, processes=3, extra={"dataloader_drop_last": True}),
    "ends in the tail": Fit((2, 5), extra={"max_steps": 3, "remove_unused_columns": True}),
    "ends amid the second tail": Fit((5, 2), accumulate=2, extra={"max_steps": 5}),
    "scaled": Fit((5, 2), scaler=8.0, accumulate=2, extra={"max_grad_norm": 0.0}),
    "scaled means": Fit((0, 4), scaler=8.0, counts=False, weighting="samples", extra={"max_grad_norm": 0.0}),
    "by labels": Fit((2, 6), accumulate=3, counts=False, weighting=count_labels),
    "by labels, in Trainer's place": Fit((0, 4, 1), accumulate=2, weighting=count_labels),
    "by labels, rebalanced": Fit((7, 2), accumulate=2, counts=False, weighting=count_labels, rebalance=True),
    "one batch": Fit((0, 1), epochs=3),
    "even": Fit((3, 3), accumulate=2),
}


SOME = (
    *("rank 0 has none", "3 ranks", "samples", "sharded by Trainer", "streams", "rebalanced streams"),
    *("by labels", "by labels, in Trainer's place", "synced batch norm"),
)


@pytest.mark.parametrize("name", others_long(FITS, *SOME))
def test_these_fits_are_as_one_process(workers: Workers, name: str) -> None:
    check_as_one_process(workers, FITS[name])


def check_as_one_process(workers: Workers, fit: Fit) -> None:
    found: list[Trained] = workers.run(fit.world_size, train, fit)
    for trained in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(trained.parameters, found[0].parameters, strict=True))
        assert trained.steps == found[0].steps
    expected = by_trainer(fit, found)
    assert expected.steps == found[0].steps
    for mine, theirs in zip(found[0].parameters, expected.parameters, strict=True):
        assert (mine - theirs).abs().max() < TOLERANCE
    if fit.norm is SyncNorm:
        for each in (*found[1:], expected):
            assert all((a - b).abs().max() < TOLERANCE for a, b in zip(each.buffers, found[0].buffers, strict=True))
    assert all(each.scaler == expected.scaler for each in found)
    if fit.scaler:  # losses that are infinite leave Trainer's logs, on each rank by itself
        return
    losses = [[log["loss"] for log in each.logs if "loss" in log] for each in (found[0], expected)]
    if fit.weighting != "world" or fit.counts:  # else the mean of the ranks that had a batch is shown
        assert losses[0] == pytest.approx(losses[1], abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("counts", [False, True])
def test_one_process_counts_as_several_do(workers: Workers, counts: bool) -> None:
    fit = Fit((2, 5), accumulate=2, counts=counts, weighting=count_labels)
    found = workers.run(2, train, fit)
    one = in_one_process(fit, found)
    for mine, theirs in zip(found[0].parameters, one.parameters, strict=True):
        assert (mine - theirs).abs().max() < TOLERANCE
