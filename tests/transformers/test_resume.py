"""Trainings interrupted in an uneven epoch and resumed by new trainers: each sample once per epoch, the same bits."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import TrainingArguments

import tests.support.front_ends.transformers  # noqa: F401  without it, version 4 does not resume on CPUs
from accelerate_join.transformers import JoinTrainer
from tests.covering import others_long
from tests.support.batches import Drawn
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.workers import Workers

EPOCHS = 5
SHARED = 51  # samples: 9, 9 and 8 batches of two


@dataclass(frozen=True)
class Case:
    kind: str
    lengths: tuple[int, ...]
    accumulate: int = 1


class Samples(Dataset[dict[str, Any]]):
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": self.numbers[index]}


class Stream(IterableDataset[dict[str, Any]]):
    """The same without a length, in another order in each epoch."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.epoch = numbers, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self.numbers)):
            yield {"number": self.numbers[(index + self.epoch) % len(self.numbers)]}


class Shuffled(Stream):
    """A stream in an order that a generator of its own draws."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.own = numbers, np.random.default_rng(3)

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in self.own.permutation(self.numbers).tolist():
            yield {"number": number}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(1, 2).double()

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        x = (number[:, None].double() / 1000).sin()
        return {"loss": (self.layer(x) - x).pow(2).mean()}


class Noting(JoinTrainer):
    """Notes what it has trained on, by optimizer step."""

    case: Case
    seen: list[tuple[int, list[int]]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((self.state.global_step, inputs["number"].tolist()))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        if self.case.kind not in ("loader", "drawn"):
            return super().get_train_dataloader()
        data: Any = self.train_dataset
        if not len(data):
            return DataLoader(data, 2)
        if self.case.kind == "drawn":
            return DataLoader(data, 2, sampler=Drawn(data, self.args.process_index, eagerly=True))
        return DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(self.args.process_index))


def data_of(case: Case, rank: int) -> Any:
    if case.kind.startswith("shared"):
        return Samples([*range(SHARED)])
    length = case.lengths[rank]
    numbers = [1000 * rank + index for index in range(2 * length - (length > 1))]
    if case.kind == "hf-map":
        return datasets.Dataset.from_dict({"number": numbers})
    if case.kind == "hf-stream":
        data = datasets.Dataset.from_dict({"number": [-1, -1, *numbers]}).to_iterable_dataset(num_shards=2)
        return data.filter(lambda row: row["number"] >= 0)
    if case.kind == "shuffled-stream":
        return Shuffled(numbers)
    return Stream(numbers) if case.kind == "stream" else Samples(numbers)


def train(rank: int, case: Case, folder: str, step: int = 0, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    if case.kind.endswith("stream"):
        options["max_steps"] = EPOCHS * 9 // case.accumulate
    if case.kind.endswith("unseeded"):
        options["accelerator_config"] = {"use_seedable_sampler": False}
    args = TrainingArguments(
        folder if not step else folder + "/again",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=case.accumulate,
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        **{"save_strategy": "no", **options},
    )
    trainer = Noting(Net(), args, train_dataset=data_of(case, rank), own_shards=not case.kind.startswith("shared"))
    trainer.case, trainer.seen = case, []
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}" if step else None)
    return trainer.seen, [value.detach().clone() for value in trainer.model.state_dict().values()]


def whole_and_resumed(rank: int, case: Case, steps: list[int]) -> list[Any]:
    with accelerator_of(rank):
        owner = tempfile.TemporaryDirectory() if rank == 0 else None
        names = [owner.name if owner else None]
        dist.broadcast_object_list(names)
        folder: Any = names[0]
        found = [train(rank, case, folder, save_strategy="steps", save_steps=1)]
        dist.barrier()
        found += [train(rank, case, folder, step) for step in steps]
        dist.barrier()
        if owner:
            owner.cleanup()
        return found


KINDS = ["map", "hf-map", "loader", "drawn", "unseeded", "stream", "shuffled-stream", "hf-stream", "shared"]
KINDS += ["shared-unseeded"]
STEPS = [1, 4, 7, 9, 10, 13, 17, 18, 23]


@pytest.mark.covering(1)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("half", [0, 1])  # of the places
@pytest.mark.parametrize("lengths", [(0, 4, 9), (9, 0, 4), (4, 9, 0)], ids=str)
@pytest.mark.parametrize("kind", others_long(KINDS, "map", "loader", "unseeded", "stream", "shared"))
def test_what_was_left(workers: Workers, kind: str, lengths: tuple[int, ...], half: int, accumulate: int) -> None:
    case = Case(kind, lengths, accumulate)
    steps = sorted({step // accumulate for step in STEPS[half::2]} - {0})
    results = workers.run(3, whole_and_resumed, case, steps, deadline=120.0)
    per_epoch = 9 // accumulate
    for epoch in range(EPOCHS):
        samples = [n for found in results for at, ns in found[0][0] if at // per_epoch == epoch for n in ns]
        own = 2 * sum(lengths) - sum(length > 1 for length in lengths)
        assert len(samples) == len({*samples}) == (SHARED if case.kind.startswith("shared") else own)
    wrong = []
    for number, step in enumerate(steps, start=1):
        for rank, found in enumerate(results):
            (whole, state), (seen, state_then) = found[0], found[number]
            left = [it for it in whole if it[0] >= step]
            if seen != left:
                wrong.append(f"{step}: rank {rank} {left[:9]} {seen[:9]} {len(left)} {len(seen)}")
            apart = max(float((a - b).abs().max()) for a, b in zip(state, state_then, strict=True))
            if apart > 1e-12:
                wrong.append(f"{step}: rank {rank} {apart}")
    assert not wrong, "\n".join(wrong)


def train_in(rank: int, case: Case, folder: str, step: int) -> Any:
    with accelerator_of(rank):
        return train(rank, case, folder, step, **({} if step else {"save_strategy": "steps", "save_steps": 4}))[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["map", "hf-map", "loader", "unseeded", "stream", "shared"])
def test_it_goes_on_in_new_processes(workers: Workers, kind: str, tmp_path: Path) -> None:
    case, others = Case(kind, (0, 4, 9)), Workers(3)
    whole = workers.run(3, train_in, case, str(tmp_path), 0, deadline=120.0)
    try:
        found = others.run(3, train_in, case, str(tmp_path), 12, deadline=120.0)
    finally:
        others.close()
    assert found == [[it for it in seen if it[0] >= 12] for seen in whole]


def resume_with_more(rank: int) -> None:
    with accelerator_of(rank), tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        train(rank, Case("map", (4, 9)), names[0], save_strategy="steps", save_steps=3)
        dist.barrier()
        more = Case("map", (5, 10))
        train(rank, more, names[0], 9)  # an epoch's end
        train(rank, more, names[0], 3, ignore_data_skip=True)
        train(rank, more, names[0], 3)


def test_more_data_amid_an_epoch_is_refused_with_a_remedy(workers: Workers) -> None:
    for outcome in workers.outcomes(2, resume_with_more):
        assert "The state was written in a loop over another loader" in outcome.error
        assert "Or resume from a checkpoint of an epoch's end, or with ignore_data_skip=True." in outcome.error
