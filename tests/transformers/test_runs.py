"""Whole runs: checkpoints and resuming, two in a row, stopping, failing."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from accelerate_join.transformers import JoinTrainer
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.transformers import Fit, Net, arguments_of, data_of
from tests.support.workers import Workers


def shared_folder() -> Any:
    return tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None


def make(rank: int, fit: Fit, folder: str, **arguments: Any) -> JoinTrainer:
    args = arguments_of(fit, folder, **arguments)
    return JoinTrainer(Net(fit.counts, fit.norm), args, train_dataset=data_of(fit, rank), own_shards=True)


def parameters_of(trainer: Any) -> list[torch.Tensor]:
    return [value.detach().clone() for value in trainer.model.state_dict().values()]


def resume(rank: int, fit: Fit, options: dict[str, Any]) -> tuple[list[Any], list[list[Any]]]:
    with accelerator_of(rank):
        owner = shared_folder()
        names = [owner.name if owner else None]
        dist.broadcast_object_list(names)
        folder: Any = names[0]
        trainer = make(rank, fit, folder, save_strategy="steps", save_steps=1, **options)
        trainer.train()
        whole, found = parameters_of(trainer), []
        dist.barrier()
        for step in range(1, trainer.state.global_step):
            again = make(rank, fit, folder + "/again", **options)
            again.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}")
            found.append(parameters_of(again))
        dist.barrier()
        assert len([*Path(folder).glob("checkpoint-*")]) == trainer.state.global_step
        dist.barrier()
        if owner:
            owner.cleanup()
        return whole, found


@pytest.mark.parametrize(
    ("fit", "options"),
    [
        (Fit((2, 5), accumulate=1), {}),
        (Fit((0, 5), batch_size=3, accumulate=2, counts=False, norm=torch.nn.BatchNorm1d), {}),
        (Fit((5, 1), iterable=True), {"max_steps": 5}),
    ],
)
def test_resuming_at_each_step(workers: Workers, fit: Fit, options: dict[str, Any]) -> None:
    found = workers.run(2, resume, fit, options)
    for whole, again in found:
        assert all(torch.equal(a, b) for a, b in zip(whole, found[0][0], strict=True))
        for one in again:
            assert all(torch.equal(a, b) for a, b in zip(whole, one, strict=True))


def train_twice(rank: int, fit: Fit) -> list[Any]:
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        trainer = make(rank, fit, folder)
        trainer.train()
        trainer.train()
        return parameters_of(trainer)


def test_two_runs_in_a_row(workers: Workers) -> None:
    found = workers.run(2, train_twice, Fit((2, 4)))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))


class StopAt(TrainerCallback):
    def on_step_end(self, _: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        control.should_training_stop = state.global_step == 3


class FailAt(TrainerCallback):
    def on_step_end(self, _: Any, state: TrainerState, __: TrainerControl, **___: Any) -> None:
        if state.global_step == 3 and dist.get_rank() == 1:
            raise ValueError("no such thing")


def stop(rank: int, callback: Any) -> Any:
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        trainer = make(rank, Fit((2, 6)), folder)
        trainer.add_callback(callback)
        trainer.train()
        trainer.remove_callback(callback)
        trainer.args.num_train_epochs = 1
        trainer.train()
        return trainer.state.global_step


def test_stopping_in_the_tail_and_going_on(workers: Workers) -> None:
    assert workers.run(2, stop, StopAt) == [6, 6]


def test_a_rank_that_raises_ends_all(workers: Workers) -> None:
    # The other is in a gather of Trainer's own, which ends with the process that has failed, or by its timeout.
    first, second = workers.outcomes(2, stop, FailAt, timeout=5.0)
    assert "ValueError: no such thing" in second.error
    assert "PeerFailedError: Rank 1 failed" in first.error
    assert "no such thing" in first.error
