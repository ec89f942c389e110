"""Evaluation and prediction: of each sample once, and the same on all ranks."""

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer

from accelerate_join.transformers import JoinTrainer
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.transformers import Fit, Net, Samples, Stream, arguments_of, data_of, sample
from tests.support.workers import Workers


def metrics_of(prediction: Any) -> dict[str, float]:
    labels, guesses = prediction.label_ids, prediction.predictions.argmax(-1)
    valid = labels != -100
    return {"right": float((guesses == labels)[valid].mean()), "rows": float(len(labels))}


class Batchwise:
    """Metrics that are computed batch by batch."""

    def __init__(self) -> None:
        self.right = self.valid = 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        labels, guesses = prediction.label_ids, prediction.predictions.argmax(-1)
        self.right += int((guesses == labels)[labels != -100].sum())
        self.valid += int((labels != -100).sum())
        return {"right": self.right / self.valid} if compute_result else {}


def evaluation_data(lengths: tuple[int, ...], rank: int, stream: bool) -> Any:
    data = Samples(5000 + 1000 * rank, lengths[rank])
    return Stream(data, len(data)) if stream else data


def evaluate(
    rank: int, lengths: tuple[int, ...], stream: bool, shared: int, arguments: dict[str, Any], counts: bool = True
) -> tuple[Any, Any]:
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        data = Samples(5000, shared) if shared else evaluation_data(lengths, rank, stream)
        args = arguments_of(Fit(), folder, per_device_eval_batch_size=2, **arguments)
        counted = Batchwise() if arguments.get("batch_eval_metrics") else metrics_of
        trainer = JoinTrainer(Net(counts), args, eval_dataset=data, compute_metrics=counted, own_shards=not shared)
        return trainer.evaluate(), trainer.predict(data) if not arguments else None


def loss_of_unions(ranges: list[range], counts: bool) -> float:
    """Return the mean over samples of the loss of the batches that all ranks have at the same time."""
    net, total = Net(counts), 0.0
    for step in range(max(-(-len(numbers) // 2) for numbers in ranges)):
        rows = [sample(number) for numbers in ranges for number in numbers[2 * step : 2 * step + 2]]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        items = (batch["labels"] != -100).sum() if counts else None
        total += len(rows) * float(net(**batch, num_items_in_batch=items)["loss"].detach())
    return total / sum(map(len, ranges))


def expected(numbers: list[range]) -> tuple[Any, Any]:
    data = Samples(0, 0)
    data.numbers = [number for part in numbers for number in part]  # type: ignore[assignment]
    with accelerator_of(0), tempfile.TemporaryDirectory() as folder:
        args = arguments_of(Fit(), folder, per_device_eval_batch_size=2)
        trainer = Trainer(Net(True), args, eval_dataset=data, compute_metrics=metrics_of)
        return trainer.evaluate(), trainer.predict(data)


@pytest.mark.parametrize(
    ("lengths", "stream", "shared"),
    [((3, 8), False, 0), ((0, 5), True, 0), ((6, 1, 3), False, 0), ((0, 0, 0), False, 7), ((5, 0), True, 0)],
)
def test_each_sample_counts_once(workers: Workers, lengths: tuple[int, ...], stream: bool, shared: int) -> None:
    counts = sum(lengths) % 2 == 0
    found = workers.run(len(lengths), evaluate, lengths, stream, shared, {}, counts)
    ranges: Any = [range(5000 + 1000 * rank, 5000 + 1000 * rank + n) for rank, n in enumerate(lengths)]
    if shared:
        batches = [range(5000 + first, min(5000 + shared, 5002 + first)) for first in range(0, shared, 2)]
        ranges = [[n for batch in batches[rank :: len(lengths)] for n in batch] for rank in range(len(lengths))]
    metrics, prediction = expected([range(5000, 5000 + shared)] if shared else ranges)
    for mine, predicted in found:
        assert mine["eval_loss"] == pytest.approx(loss_of_unions(ranges, counts), abs=1e-12)
        for name in ("eval_right", "eval_rows"):
            assert mine[name] == pytest.approx(metrics[name], abs=1e-12)
        assert mine["eval_samples_per_second"] > 0
        # In the dataset's order, or by rank, as the samples of one process are here.
        assert np.allclose(predicted.predictions, prediction.predictions, atol=1e-12)
        assert np.array_equal(predicted.label_ids, prediction.label_ids)
        assert predicted.metrics["test_loss"] == mine["eval_loss"]


@pytest.mark.parametrize("arguments", [{"batch_eval_metrics": True}, {"eval_accumulation_steps": 2}])
def test_metrics_batch_by_batch(workers: Workers, arguments: dict[str, Any]) -> None:
    lengths = (3, 8)
    found = workers.run(2, evaluate, lengths, False, 0, arguments)
    metrics, _ = expected([range(5000, 5003), range(6000, 6008)])
    assert [mine["eval_right"] for mine, _ in found] == pytest.approx([metrics["eval_right"]] * 2)


def fit(rank: int, arguments: dict[str, Any]) -> tuple[Any, ...]:
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        plan = Fit((2, 5), epochs=3)
        shared = [folder]
        torch.distributed.broadcast_object_list(shared)
        args = arguments_of(plan, shared[0], per_device_eval_batch_size=2, **arguments)
        trainer = JoinTrainer(
            Net(True, torch.nn.BatchNorm1d),
            args,
            train_dataset=data_of(plan, rank),
            eval_dataset=evaluation_data((1, 6), rank, False),
            compute_metrics=metrics_of,
            callbacks=[EarlyStoppingCallback(2)],
            own_shards=True,
        )
        trainer.train()
        torch.distributed.barrier()
        losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        return losses, trainer.state.global_step, [p.detach() for p in trainer.model.state_dict().values()]


def test_evaluation_in_the_tail_and_the_best_model(workers: Workers) -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.5}
    found = workers.run(2, fit, arguments)
    assert len(found[0][0]) == found[0][1]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))


def evaluate_sets(rank: int, names: dict[int, list[str]]) -> Any:
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        data = {name: Samples(5000 + 100 * "ab".index(name) + 10 * rank, 3) for name in names[rank]}
        trainer = JoinTrainer(Net(True), arguments_of(Fit(), folder), eval_dataset=data, own_shards=True)
        metrics = trainer.evaluate()
        return {f"eval_{name}_loss": trainer.evaluate(data[name])["eval_loss"] for name in "ab"}, metrics


def test_sets_in_another_order_are_evaluated_in_one(workers: Workers) -> None:
    for apart, metrics in workers.run(2, evaluate_sets, {0: ["a", "b"], 1: ["b", "a"]}):
        assert {name: metrics[name] for name in apart} == apart
        assert apart["eval_a_loss"] != apart["eval_b_loss"]


def test_sets_of_other_names_are_refused(workers: Workers) -> None:
    for outcome in workers.outcomes(2, evaluate_sets, {0: ["a"], 1: ["a", "b"]}):
        assert "evaluation datasets differ between ranks (rank 0: a; rank 1: a, b)" in outcome.error
