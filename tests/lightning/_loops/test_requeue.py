"""SLURM's signal before its time limit: all ranks save at the end of one step, and the next job goes on there."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from tests.lightning.reading import Reader, Reading, build
from tests.support.front_ends.lightning import Fit, Result, assert_same_bits, result_of
from tests.support.run import Batch
from tests.support.workers import Workers

Seen = list[tuple[int, ...]]


class Signalled(Reader):
    """Ranks get the signal in training steps, or in a validation; by rank, where."""

    places: dict[int, tuple[int, ...]]
    on_train_batch_start = pl.LightningModule.on_train_batch_start  # so that ranks need not wait after a step

    def setup(self, stage: str) -> None:
        self.validated: Seen = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.signal((self.trainer.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        place = self.trainer.current_epoch, self.trainer.fit_loop.batch_idx
        self.validated += [place] if batch_idx == 0 else []
        self.signal((*place, batch_idx))

    def signal(self, place: tuple[int, ...]) -> None:
        if place == self.places.get(self.trainer.global_rank):
            os.kill(os.getpid(), signal.SIGUSR2)


def fit_in_slurm(rank: int, run: Reading, folder: str, places: dict[int, tuple[int, ...]]) -> tuple[Result, Seen, Seen]:
    job = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": str(rank), "LOCALID": str(rank), "NODEID": "0"}
    job |= {"JOB_ID": "4711", "JOB_NAME": "job"}
    variables = {f"SLURM_{name}": value for name, value in job.items()} | {"PATH": f"{folder}:{os.environ['PATH']}"}
    module = Signalled(run)
    module.places = places
    with mock.patch.dict(os.environ, variables):
        environment = SLURMEnvironment(requeue_signal=signal.SIGUSR2)
        trainer = build(run, plugins=[environment], default_root_dir=folder)
        trainer.fit(module)  # from the checkpoint that the job before has left, if one has
        steps: Any = trainer.fit_loop.epoch_loop._batches_that_stepped  # what loggers call steps
        return replace(result_of(trainer, module), noted=[steps]), module.seen, module.validated


PLAIN = Reading(Fit((4, 6), epochs=2, scheduler="step", optimizer="adam"))
STEPS = [(epoch, step) for epoch in range(2) for step in range(6)]


@pytest.mark.parametrize(
    ("run", "places", "saved"),
    [
        # Where all have a batch, others hear of it in the next step; all save at the end of the one after.
        (PLAIN, {1: (0, 0)}, (0, 2)),
        (PLAIN, {1: (0, 3)}, (0, 4)),
        (PLAIN, {1: (0, 5)}, (1, 0)),
        (PLAIN, {1: (1, 3)}, (1, 4)),
        (replace(PLAIN, case=replace(PLAIN.case, lengths=(0, 6))), {1: (0, 1)}, (0, 2)),
        (PLAIN, {0: (0, 0), 1: (0, 4)}, (0, 2)),  # and the second signal asks for nothing
        (replace(PLAIN, case=replace(PLAIN.case, accumulate=4)), {1: (0, 0)}, (0, 3)),  # not amid an accumulation
        # Nor before a validation, after every other step here: at its end.
        (replace(PLAIN, validates=True), {1: (0, 1)}, (0, 1)),
        (replace(PLAIN, validates=True), {1: (0, 2)}, (0, 3)),
        (replace(PLAIN, validates=True), {1: (0, 4)}, (0, 5)),
        (replace(PLAIN, validates=True), {1: (0, 3, 1)}, (0, 4)),
    ],
)
def test_the_next_job_goes_on_where_all_ranks_have_saved(
    workers: Workers, tmp_path: Path, run: Reading, places: dict[int, tuple[int, ...]], saved: tuple[int, int]
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    scontrol.chmod(0o755)
    whole = workers.run(2, fit_in_slurm, run, str(tmp_path), places)
    assert (tmp_path / "said").read_text() == "requeue 4711\n"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    resumed = workers.run(2, fit_in_slurm, run, str(tmp_path), {})
    left = STEPS[STEPS.index(saved) + 1 :]
    for (result, everything, validated), (again, seen, validated_again) in zip(whole, resumed, strict=True):
        assert seen == [it for it in everything if it[:2] in left]
        assert validated_again == [it for it in validated if it in left]
        assert_same_bits([result, again])
        assert result.noted == again.noted
    assert len(whole[1][1]) == len(STEPS)
    assert len(whole[1][2]) == (6 if run.validates else 0)


def test_a_fit_that_ends_is_not_requeued(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, fit_in_slurm, PLAIN, str(tmp_path), {1: (1, 5)})
    assert not [*tmp_path.glob("*.ckpt")]
