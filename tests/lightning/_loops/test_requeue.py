"""SLURM's signal before its time limit: all ranks save at the end of one step, and the next job goes on there."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from tests.lightning._loops.test_resume import Reader, Reading, build
from tests.support.front_ends.lightning import Fit, Result, assert_same_bits, result_of
from tests.support.run import Batch
from tests.support.workers import Workers

Seen = list[tuple[int, ...]]


class Signalled(Reader):
    """Rank 1 gets the signal in a training step, or in a validation."""

    place: tuple[int, ...] = ()
    on_train_batch_start = pl.LightningModule.on_train_batch_start  # so that ranks need not wait after a step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.signal((self.trainer.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.signal((self.trainer.current_epoch, self.trainer.fit_loop.batch_idx, batch_idx))

    def signal(self, place: tuple[int, ...]) -> None:
        if place == self.place and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)


def fit_in_slurm(rank: int, run: Reading, folder: str, place: tuple[int, ...]) -> tuple[Result, Seen]:
    job = {
        "NTASKS_PER_NODE": "2",
        "PROCID": str(rank),
        "LOCALID": str(rank),
        "NODEID": "0",
        "NTASKS": "2",
        "JOB_ID": "4711",
        "JOB_NAME": "job",
    }
    variables = {f"SLURM_{name}": value for name, value in job.items()} | {"PATH": f"{folder}:{os.environ['PATH']}"}
    module = Signalled(run)
    module.place = place
    with mock.patch.dict(os.environ, variables):
        environment = SLURMEnvironment(requeue_signal=signal.SIGUSR2)
        trainer = build(run, plugins=[environment], default_root_dir=folder)
        trainer.fit(module)  # from the checkpoint that the job before has left, if one has
        return result_of(trainer, module), module.seen


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (0, 3), (0, 5), (1, 4), (1, 5), (0, 3, 1)])
def test_the_next_job_goes_on_where_all_ranks_have_saved(
    workers: Workers, tmp_path: Path, place: tuple[int, ...]
) -> None:
    run = Reading(Fit((4, 6), epochs=2, scheduler="step", optimizer="adam"), validates=len(place) > 2)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    scontrol.chmod(0o755)
    whole = workers.run(2, fit_in_slurm, run, str(tmp_path), place)
    assert (tmp_path / "said").read_text() == "requeue 4711\n"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    resumed = workers.run(2, fit_in_slurm, run, str(tmp_path), ())
    steps = [(epoch, step) for epoch in range(2) for step in range(6)]
    # Where all have a batch, others hear of it in the next step.
    at = steps.index(place[:2]) + 1 + (place[:2] in steps[:2])
    for (result, everything), (again, seen) in zip(whole, resumed, strict=True):
        assert seen == [it for it in everything if it[:2] in steps[at:]]
        assert_same_bits([result, again])
    assert len(whole[1][1]) == 12
