"""What subclasses of a trainer and callbacks may do, each rank or one alone."""

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from accelerate_join.transformers import JoinTrainer, JoinTrainerMixin
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.transformers import Fit, Net, Samples, arguments_of, data_of, sample
from tests.support.workers import Workers
from torch_join import JoinTypeError

LENGTHS = (3, 8, 1)


def make(
    rank: int, folder: str, kind: type[JoinTrainer] = JoinTrainer, fit: Fit | None = None, **options: Any
) -> JoinTrainer:
    fit = Fit((2, 5), epochs=2) if fit is None else fit
    options = {"train_dataset": data_of(fit, rank), **options}
    arguments = arguments_of(fit, folder)
    evaluated = Samples(5000 + 1000 * rank, LENGTHS[rank])
    return kind(Net(fit.counts), arguments, eval_dataset=evaluated, own_shards=True, weighting=fit.weighting, **options)


def parameters_of(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def alone(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        return function(rank, folder, *args)


def same(found: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for each in found[1:] for a, b in zip(found[0], each, strict=True))


class Unprepared(JoinTrainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=2)


class Prepared(JoinTrainer):
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=2))


class Peeking(TrainerCallback):
    """Looks into the loader on one rank, in the middle of an epoch."""

    def on_step_end(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        if dist.get_rank() == 0:
            next(iter(train_dataloader))
            assert sum(1 for _ in train_dataloader) == 2


class Logging(JoinTrainer):
    """Keeps what it did in a step, and logs on one rank within it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics = list[int]()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self._metrics.append(1)
        if dist.get_rank() == 1:
            self.log({"one": 1.0})
        return super().compute_loss(*args, **kwargs)


CHANGES: dict[str, Any] = {
    "an unprepared loader": (Unprepared, None),
    "a loader prepared by itself": (Prepared, None),
    "a look into the loader": (Unprepared, Peeking()),
}


def train(rank: int, folder: str, kind: type[JoinTrainer], callback: Any, evaluates: bool) -> Any:
    trainer = make(rank, folder, kind, callbacks=[] if callback is None else [callback])
    if evaluates:
        trainer.evaluate()
    trainer.train()
    return parameters_of(trainer), trainer.state.global_step, getattr(trainer, "_metrics", None)


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_nothing(workers: Workers, name: str) -> None:
    kind, callback = CHANGES[name]
    expected = workers.run(2, alone, train, Unprepared, None, False)
    found = workers.run(2, alone, train, kind, callback, True)  # Accelerate takes an evaluated model for wrapped
    assert same([each for each, *_ in (*expected, *found)])
    assert [steps for _, steps, _ in found] == [10, 10]


def test_logging_on_one_rank(workers: Workers) -> None:
    found = workers.run(2, alone, train, Logging, None, False)
    assert same([each for each, *_ in found])
    assert [len(kept) for *_, kept in found] == [10, 10]


class Objects(JoinTrainer):
    """Has boxes of each sample, as object detection does."""

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        return loss, logits, [{"boxes": row[row != -100][:, None]} for row in labels]


class PerSample(JoinTrainer):
    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return inputs["x"].sum(1), *super().prediction_step(model, inputs, *args, **kwargs)[1:]


def count(prediction: Any) -> dict[str, float]:
    return {"boxes": float(sum(len(one["boxes"]) for batch in prediction.label_ids for one in batch))}


def evaluate(rank: int, folder: str, kind: type[JoinTrainer], arguments: dict[str, Any], counts: bool) -> Any:
    trainer = make(rank, folder, kind, compute_metrics=count if counts else None)
    for name, value in arguments.items():
        setattr(trainer.args, name, value)
    return [trainer.evaluate() for _ in range(2)]


def test_objects_are_gathered_once_each(workers: Workers) -> None:
    arguments = {"eval_use_gather_object": True, "eval_do_concat_batches": False}
    numbers = [*range(5000, 5003), *range(6000, 6008)]
    boxes = sum(int((sample(number)["labels"] != -100).sum()) for number in numbers)
    first, second = workers.run(2, alone, evaluate, Objects, arguments, True)
    assert [metrics["eval_boxes"] for metrics in (*first, *second)] == [boxes] * 4
    assert first[0]["eval_loss"] == second[0]["eval_loss"]


def test_a_loss_for_each_sample(workers: Workers) -> None:
    numbers = [*range(5000, 5003), *range(6000, 6008)]
    expected = np.mean([float(sample(number)["x"].sum()) for number in numbers])
    options = {"use_legacy_prediction_loop": True} if hasattr(TrainingArguments, "use_legacy_prediction_loop") else {}
    for metrics in workers.run(2, alone, evaluate, PerSample, options, False):
        assert metrics[0]["eval_loss"] == pytest.approx(expected)


class Numbers(Samples):
    def __getitem__(self, index: int) -> Any:
        return self.numbers[index]


class FromLists(Unprepared):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=2, collate_fn=lambda rows: {"numbers": rows})

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = [sample(number) for number in inputs["numbers"]]
        return super().compute_loss(model, {name: torch.stack([r[name] for r in rows]) for name in rows[0]}, *args)


def from_lists(rank: int, folder: str, kind: type[JoinTrainer]) -> list[torch.Tensor]:
    data = (Numbers if kind is FromLists else Samples)(1000 * rank, LENGTHS[rank])
    trainer = make(rank, folder, kind, Fit(counts=False, weighting="samples"), train_dataset=data)
    trainer.train()
    return parameters_of(trainer)


def test_samples_are_counted_in_lists(workers: Workers) -> None:
    found = [each for kind in (FromLists, Unprepared) for each in workers.run(2, alone, from_lists, kind)]
    assert same(found)


def test_the_mixin_comes_first() -> None:
    with pytest.raises(TypeError, match="Put JoinTrainerMixin before the trainer class"):
        type("Wrong", (Trainer, JoinTrainerMixin), {})


def test_a_misspelt_option_in_a_class_or_a_call_raises() -> None:
    for slip, meant in {"own_shard": "own_shards", "weigthing": "weighting", "placholder": "placeholder"}.items():
        told = f"Mine has no argument '{slip}'. Did you mean '{meant}'?"
        with pytest.raises(JoinTypeError, match=told):
            type("Mine", (JoinTrainer,), {slip: True})
        with pytest.raises(JoinTypeError, match=told):
            type("Mine", (JoinTrainer,), {})(model=None, **{slip: True})
    # A user's own names; some are close to options of `Join` that a trainer does not have.
    type("Mine", (type("Base", (JoinTrainer,), {"weights": 1, "keep": 2}),), {"weights": 3})
    type("Mine", (JoinTrainer,), {"_placeholder": 1, "_weighting": 2, "Monitor": int, "time_out": 3, "unable": 4})


class LoggingItsLoss(JoinTrainer):
    """Logs in its loss, and after the backward."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.log({"mine": loss.detach(), "chart": object()})  # which cannot be sent
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.log({"after": float(loss)})
        return loss


def logged(rank: int, folder: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    fit = Fit(lengths, epochs=1, counts=False)
    trainer = make(rank, folder, LoggingItsLoss, fit)
    trainer.train()
    logs = [{name: log[name] for name in log.keys() - {"chart"}} for log in trainer.state.log_history]
    return [log for log in logs if log.keys() & {"mine", "after"}]


def test_what_is_logged_in_the_tail_comes_to_rank_0(workers: Workers) -> None:
    first, second, third = workers.run(3, alone, logged, (0, 2, 5))
    assert [log["step"] for log in first] == [step for step in range(5) for _ in range(2)]
    assert first == [*second[:4], *third[4:]]  # of the lowest rank that has a batch
    assert first[4:] == second[4:]
