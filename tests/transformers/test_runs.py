"""Whole runs: checkpoints and resuming, two in a row, stopping, failing."""

import tempfile
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from accelerate_join.transformers import JoinTrainer
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.transformers import Fit, Net, arguments_of, data_of
from tests.support.workers import Workers


def make(rank: int, fit: Fit, folder: str, **arguments: Any) -> JoinTrainer:
    args = arguments_of(fit, folder, **arguments)
    return JoinTrainer(Net(fit.counts, fit.norm), args, train_dataset=data_of(fit, rank), own_shards=True)


def parameters_of(trainer: Any) -> list[torch.Tensor]:
    return [value.detach().clone() for value in trainer.model.state_dict().values()]


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
