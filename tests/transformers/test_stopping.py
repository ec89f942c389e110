"""A callback of one rank that stops: all stop together, at the same step."""

import tempfile
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments

from accelerate_join.transformers import JoinTrainer
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.inside import deadlock_seconds
from tests.support.step_changes import Student, rows
from tests.support.warned import warned
from tests.support.workers import Workers


class Trains(JoinTrainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs)


class Stops(TrainerCallback):
    """Asks at a place of some ranks' for the end of the epoch, or of training."""

    def __init__(self, asks: bool, place: str, flag: str, is_late: bool) -> None:
        self.asks, self.place, self.flag, self.is_late = asks, place, flag, is_late

    def _ask(self, control: Any, asks: bool) -> None:
        if self.asks and asks:
            setattr(control, self.flag, True)

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        if self.is_late and state.global_step == 2:
            time.sleep(1.0)  # the others have answered, and wait for who asks in their next backward
        self._ask(control, self.place == "step" and state.global_step == 2)

        self._ask(control, self.place == "last step" and state.global_step == 5)

    def on_substep_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        self._ask(control, self.place == "substep" and state.global_step == 1)

    def on_evaluate(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        self._ask(control, self.place == "evaluate" and state.global_step == 2)

    def on_epoch_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        self._ask(control, self.place == "epoch" and state.epoch <= 1)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def train(rank: int, asking: tuple[int, ...], place: str, flag: str, streams: bool) -> tuple[int, list[Tensor], int]:
    torch.manual_seed(0)
    student = Student("none")
    data = [{"x": row} for step in range((5, 3, 4)[rank]) for row in rows(rank, step)]
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder, warned("All ranks stop at step") as said:
        options: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        if place == "substep":
            options |= {"gradient_accumulation_steps": 2}
        if place == "evaluate":
            options |= {"eval_strategy": "steps", "eval_steps": 1}
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=2, num_train_epochs=3, max_steps=12 if streams else -1, **options
        )
        trainer = Trains(
            student,
            arguments,
            train_dataset=Stream(data) if streams else data,
            eval_dataset=data,
            own_shards=True,
            callbacks=[Stops(rank in asking, place, flag, is_late=rank == 2)],
        )
        with deadlock_seconds(0.1):
            trainer.train()
    return trainer.state.global_step, student.state(), len(said)


@pytest.mark.parametrize(
    ("asking", "place", "flag", "streams", "steps"),
    [
        ((0,), "step", "should_training_stop", False, 3),
        ((2, 1), "step", "should_training_stop", True, 3),
        ((0, 1, 2), "step", "should_training_stop", False, 2),
        ((1,), "step", "should_epoch_stop", False, 3 + 5 + 5),
        ((1,), "last step", "should_epoch_stop", False, 15),
        ((0,), "substep", "should_training_stop", False, 3),
        ((0, 2), "evaluate", "should_training_stop", False, 3),
        ((2,), "epoch", "should_training_stop", False, 6),
    ],
)
def test_all_ranks_stop_where_some_ask(
    workers: Workers, asking: tuple[int, ...], place: str, flag: str, streams: bool, steps: int
) -> None:
    first, *others = workers.run(3, train, asking, place, flag, streams, deadline=90.0)
    for each in (first, *others):
        assert each[0] == steps
        assert all(torch.equal(a, b) for a, b in zip(each[1], first[1], strict=True))
    assert first[2] == (len(asking) < 3 and place != "last step")
