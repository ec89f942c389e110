"""What raises, on all ranks; and the monitor's numbers."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from accelerate_join.transformers import JoinMonitor, JoinTrainer
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.transformers import Fit, Net, arguments_of, data_of
from tests.support.report import summary_of
from tests.support.workers import Workers


class Twice(JoinTrainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        super().training_step(model, dict(inputs), *args, **kwargs)
        return super().training_step(model, dict(inputs), *args, **kwargs)


class ByItself(JoinTrainer):
    def training_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        loss = model(**inputs)["loss"]
        loss.backward()
        return loss.detach()


class Rebatching(JoinTrainer):
    def get_batch_samples(self, *args: Any) -> Any:
        batches, items = super().get_batch_samples(*args)
        return [dict(batch) for batch in batches], items


class Unwrapping(JoinTrainer):
    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model.module, *args, **kwargs)


class Varying:
    """Batches of other sizes than the sampler says: a round whose last one is smaller would be left out."""

    batch_size, drop_last = 2, False

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2], [3, 4], [5, 6]])

    def __len__(self) -> int:
        return 4


class FromVarying(JoinTrainer):
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=Varying()))


class GRPOTrainer(JoinTrainer):
    """Is refused by its name."""


class Gathering(JoinTrainer):
    """Does things with other ranks before, in and after the loss, and after the backward."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        ones = torch.ones(())
        dist.all_reduce(ones)
        loss = super().training_step(*args, **kwargs)
        dist.all_reduce(ones)
        self.found.append(int(ones))  # type: ignore[has-type]
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = self.accelerator.gather(inputs["x"][:, 0])
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        assert len(rows) >= len(inputs["x"])
        means = self.accelerator.reduce(torch.ones(1), "mean")
        assert float(means) == 1
        return loss


def run(rank: int, kind: type[JoinTrainer], fit: Fit, options: dict[str, Any], monitor: Any = None) -> Any:
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        args = arguments_of(fit, folder)
        callbacks = [] if monitor is None else [monitor]
        data = data_of(fit, rank)
        trainer = kind(
            Net(fit.counts), args, train_dataset=data, callbacks=callbacks, **{"own_shards": True, **options}
        )
        trainer.found = []  # type: ignore[attr-defined]
        trainer.train()
        monitors = [each for each in trainer.callback_handler.callbacks if isinstance(each, JoinMonitor)]
        return trainer.found, [each.epochs for each in monitors], trainer.state.log_history  # type: ignore[attr-defined]


UNEVEN = Fit((2, 5))
REFUSED: dict[str, tuple[type[JoinTrainer], Fit, dict[str, Any], str]] = {
    "twice": (Twice, UNEVEN, {}, "calls compute_loss twice"),
    "unwrapping": (Unwrapping, UNEVEN, {}, "Use self.accelerator.unwrap_model(model)"),
    "by itself": (ByItself, UNEVEN, {}, "called compute_loss 0 times"),
    "other batches": (Rebatching, UNEVEN, {}, "that its dataloader did not yield"),
    "generating": (GRPOTrainer, UNEVEN, {}, "generates and scores"),
    "weighting": (JoinTrainer, UNEVEN, {"weighting": "samples"}, "Use weighting='world'"),
    "termination": (JoinTrainer, UNEVEN, {"throw_on_early_termination": True}, "exhausted"),
    "varying": (
        FromVarying,
        Fit((4, 4)),
        {"own_shards": False},
        "but its batch 1, which is not the last one, has a different size",
    ),
    "batch size": (JoinTrainer, Fit((2, 5), extra={"auto_find_batch_size": True}), {}, "auto_find_batch_size"),
}
if hasattr(TrainingArguments, "train_sampling_strategy"):
    fit = Fit((2, 5), extra={"train_sampling_strategy": "batch_rebalance"})
    REFUSED["dealt out"] = JoinTrainer, fit, {}, "each rank has its own dataset"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks(workers: Workers, name: str) -> None:
    kind, fit, options, message = REFUSED[name]
    for outcome in workers.outcomes(2, run, kind, fit, options):
        assert message in outcome.error


def test_what_a_step_does_with_others_is_mirrored(workers: Workers) -> None:
    found = workers.run(2, run, Gathering, Fit((2, 5), epochs=1), {})
    assert [steps for steps, *_ in found] == [[4, 4], [4, 4, 1, 1, 1]]


def test_the_monitor(workers: Workers, tmp_path: Path) -> None:
    monitor = JoinMonitor(tmp_path / "report.html")
    found = workers.run(2, run, JoinTrainer, Fit((2, 5), epochs=2), {}, monitor)
    assert summary_of(tmp_path / "report.html") == "2 ranks, 2 epochs, 14 batches"
    for _, (epochs,), logs in found:
        assert [[rank.batches for rank in epoch.ranks] for epoch in epochs] == [[2, 5], [2, 5]]
        assert [[rank.shadow_steps for rank in epoch.ranks] for epoch in epochs] == [[3, 0], [3, 0]]
        assert sum("join/idle_share" in log for log in logs) == 2
