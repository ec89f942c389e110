"""What `compute_loss` and a model's forward change besides: on ranks without a batch too, or named."""

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import TrainingArguments

from accelerate_join.transformers import JoinTrainer
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.run import difference
from tests.support.step_changes import EPOCHS, Student, alone, rows
from tests.support.warned import warned
from tests.support.workers import Workers

Lengths = tuple[int, ...]


class Counting(Student):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Changing(JoinTrainer):
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(dataset)

    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = self.optimizer or self.model.optimizer()
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        self.model.change(self.optimizer.optimizer, self.state.global_step)
        return model(**inputs)


class Early(Changing):
    """Changes it before its forward, whose buffers DDP broadcasts."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.model.change(self.optimizer.optimizer, self.state.global_step)
        return super().training_step(*args, **kwargs)


def train(rank: int, lengths: Lengths, how: str, kind: type[Changing] = Changing) -> tuple[list[Tensor], list[str]]:
    student = Counting(how)
    data = [{"x": row} for step in range(lengths[rank]) for row in rows(rank, step)]
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder, warned("the ranks differ in") as said:
        options: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "max_grad_norm": 0.0}
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=2, num_train_epochs=EPOCHS, save_strategy="no", **options
        )
        trainer = kind(student, arguments, train_dataset=data, own_shards=True)
        trainer.train()
    return student.state(), said


@pytest.mark.parametrize(
    ("lengths", "how"), [((2, 5), "teacher"), ((3, 0), "projected"), ((1, 4, 3), "state"), ((2, 4), "decay")]
)
def test_ranks_without_a_batch_take_it(workers: Workers, lengths: Lengths, how: str) -> None:
    expected = alone(how, lengths)[-1]
    first, *others = workers.run(len(lengths), train, lengths, how)
    for state, _ in (first, *others):
        assert difference(state, expected) < 1e-10
    # A counter is a plain attribute, which nobody hands over.
    assert all(".calls" in text for text in first[1])
    assert first[1]
    assert not any(said for _, said in others)


@pytest.mark.parametrize(("lengths", "how"), [((2, 5), "centre"), ((1, 4, 3), "centre"), ((0, 3), "teacher")])
def test_a_change_before_the_forward_is_not_lost(workers: Workers, lengths: Lengths, how: str) -> None:
    expected = alone(how, lengths)[-1]
    for state, _ in workers.run(len(lengths), train, lengths, how, Early):
        assert difference(state, expected) < 1e-10
