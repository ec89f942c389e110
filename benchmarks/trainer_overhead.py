"""Measure what `accelerate_join.transformers` costs in a script with `transformers.Trainer`, against plain Trainer.

    python -m benchmarks.trainer_overhead [--seconds 200] [--world-size 2] [--only TEXT] [--json PATH] [--quick]

As in `join_overhead`.
"""

import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from accelerate_join.transformers import JoinTrainer
from benchmarks._launch import main
from benchmarks._paired import Case
from benchmarks.accelerate_overhead import first
from benchmarks.join_overhead import cases_in_pairs
from benchmarks.step_overhead import WARM_UP, Batches, Workload


class Way:
    """A trainer, by its class."""

    def __init__(self, name: str, kind: type[Trainer]) -> None:
        self.name, self.kind = name, kind


PLAIN, OURS = Way("Trainer", Trainer), Way("JoinTrainer", JoinTrainer)


class WithLoss(nn.Module):
    """Returns the loss too, as Trainer wants it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.network(images), labels)}


class Named(Dataset[Any]):
    """The same batches, as dictionaries."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        images, labels = self.batches[index]
        return {"images": images, "labels": labels}


class Clock(TrainerCallback):
    """Notes when steps begin."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.starts.append(time.perf_counter())


def even_step(way: Way, workload: Workload) -> float:
    """Return what a step takes where all ranks have as many batches, from one step's begin to the next, in ms."""
    logging.set_verbosity_error()
    length = (WARM_UP + workload.steps + 1) * dist.get_world_size()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=1,  # each "sample" is a batch
            num_train_epochs=1,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        data = Named(Batches(workload.batch, length))
        trainer = way.kind(WithLoss(workload.network), args, train_dataset=data, data_collator=first, callbacks=[clock])
        dist.barrier()
        trainer.train()
        trainer.accelerator.free_memory()
    return statistics.median([1000 * (after - before) for before, after in pairwise(clock.starts)][WARM_UP:])


def cases_of(workload: Workload) -> list[Case]:
    target = {15: 1.01}.get(int(workload.milliseconds))
    return cases_in_pairs(workload, [("even", even_step, PLAIN, OURS, target)])


if __name__ == "__main__":
    main("benchmarks.trainer_overhead", __doc__, cases_of)
