"""Training interrupted in an uneven epoch and resumed with new objects: each sample once per epoch, the same bits."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import webdataset as wds
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import sampler as torchdata

from accelerate_join import Accelerator
from tests.covering import others_long
from tests.support.batches import Drawn
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.workers import Workers

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's
    pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning"),
]
EPOCHS = 5
SHARED = 51  # samples: 9, 9 and 8 batches of two


@dataclass(frozen=True)
class Case:
    """What is read, by how many batches of each rank's own, and how the script goes through it."""

    kind: str
    lengths: tuple[int, ...]
    way: str = "with"  # or `join_batches`
    accumulate: int = 1
    workers: int = 0


class Samples(Dataset[Tensor]):
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.numbers[index])


class Stream(IterableDataset[Tensor]):
    """The same without a length, in another order in each epoch; it has no state."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.epoch = numbers, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(len(self.numbers)):
            yield torch.tensor(self.numbers[(index + self.epoch) % len(self.numbers)])


class Shuffled(Stream):
    """A stream in an order that a generator of its own draws."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.own = numbers, np.random.default_rng(3)

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[Tensor]:
        yield from map(torch.tensor, self.own.permutation(self.numbers))


def tars(numbers: list[int], folder: str, rank: int) -> str:
    """Write two shards of a rank's samples; return their pattern."""
    pattern = f"{folder}/rank{rank}-{{0..1}}.tar"
    for shard in range(2):
        with wds.TarWriter(f"{folder}/rank{rank}-{shard}.tar") as writer:
            for number in numbers[shard::2]:
                buffer = io.BytesIO()
                torch.save(torch.tensor(number), buffer)
                writer.write({"__key__": str(number), "pth": buffer.getvalue()})
    return pattern


def first(row: Any) -> Tensor:
    return row[0]  # type: ignore[no-any-return]


def is_kept(row: Any) -> bool:
    return bool(row["number"] >= 0)


def number_of(rows: Any) -> Tensor:
    return torch.stack([row["number"] for row in rows])


def make_loader(accelerator: Any, case: Case, rank: int, folder: str) -> Any:
    """Return a loader of two samples a batch, of which the last one may be smaller."""
    length = case.lengths[rank]
    numbers = [1000 * rank + index for index in range(2 * length - (length > 1))]
    generator = torch.Generator().manual_seed(rank)
    options: dict[str, Any] = {"batch_size": 2, "num_workers": case.workers}
    data: Any = Samples(numbers)
    if case.kind.startswith("shared"):  # which Accelerate shards
        everything = Samples([*range(SHARED)])
        return accelerator.prepare(DataLoader(everything, 2, shuffle=True, num_workers=case.workers))
    if case.kind == "hf-stream":
        data = datasets.Dataset.from_dict({"number": [-1, -1, *numbers]}).with_format("torch")  # it takes no empty one
        data = data.to_iterable_dataset(num_shards=2).filter(is_kept)  # a buffer that shuffles is lost
        options["collate_fn"] = number_of
    elif case.kind == "webdataset":
        data = wds.WebDataset(tars(numbers, folder, rank), shardshuffle=False, empty_check=False, nodesplitter=iter)
        data = data.decode().to_tuple("pth").map(first)
    elif case.kind == "stream":
        data = Stream(numbers)
    elif "shuffled" in case.kind:
        data = Shuffled(numbers)
    else:
        if case.kind == "hf-map":
            data = datasets.Dataset.from_dict({"number": numbers}).with_format("torch")
            options["collate_fn"] = number_of
        sampler = torchdata.RandomSampler if case.kind == "stateful" else RandomSampler
        if numbers:
            drawn = Drawn(data, rank) if "drawn" in case.kind else sampler(data, generator=generator)
            options["sampler"] = drawn
    options["use_stateful_dataloader"] = "plain" not in case.kind
    loader: Any = DataLoaderShard(data, device=accelerator.device, **options)
    accelerator.register_for_checkpointing(loader)
    return loader


class Progress:
    """How far the script has come."""

    def __init__(self) -> None:
        self.epoch = self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


Seen = list[tuple[int, int, list[int]]]  # epoch, step, samples


def train(rank: int, case: Case, folder: str, place: str | None, saves: bool) -> tuple[Seen, list[Any]]:
    """Train, from a `place` or from the begin; save in each step, after a `break`, and after each loop."""
    config = DataLoaderConfiguration(
        use_stateful_dataloader=case.kind != "shared-plain", use_seedable_sampler=case.kind == "shared-seedable"
    )
    options = {"gradient_accumulation_steps": case.accumulate, "dataloader_config": config}
    with accelerator_of(rank, Accelerator, **options) as accelerator:
        torch.manual_seed(7)
        np.random.seed(rank)
        net = torch.nn.Linear(1, 2, dtype=torch.float64)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        model, optimizer = accelerator.prepare(net, optimizer)
        loader, progress = make_loader(accelerator, case, rank, folder), Progress()
        accelerator.register_for_checkpointing(progress)
        if place is not None:
            accelerator.load_state(f"{folder}/{place}")
        seen: Seen = []

        def save(name: str) -> None:
            if saves:
                accelerator.save_state(f"{folder}/{name}", safe_serialization=False)

        def run(epoch: int, join: Callable[[Any], Any]) -> None:
            batches, done = loader, progress.step if epoch == progress.epoch else 0
            if "plain" in case.kind and done:
                batches = accelerator.skip_first_batches(loader, done)
                # Of a rank that has fewer than are skipped, too.
                assert "shuffled" in case.kind or case.way != "with" or len(batches) >= 0
            for step, numbers in enumerate(join(batches), start=done):
                seen.append((epoch, step, numbers.tolist()))
                with accelerator.accumulate(model):
                    x = (numbers[:, None].double() / 1000).sin()
                    accelerator.backward((model(x) - x).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                progress.epoch, progress.step = epoch, step + 1
                save(f"in-{epoch}-{step}")
                if saves and place is None and (epoch, step) == (3, 1):
                    break
            if epoch == 3:
                save("left")
            save(f"after-{epoch}")

        if case.way == "with":
            with accelerator.join_uneven_inputs():
                for epoch in range(loader.iteration, EPOCHS):
                    run(epoch, lambda batches: batches)
        else:
            for epoch in range(loader.iteration, EPOCHS):
                run(epoch, accelerator.join_batches)
        state = optimizer.state_dict()["state"].values()
        return seen, [p.detach().clone() for p in net.parameters()] + [v for one in state for v in one.values()]


def whole_and_resumed(rank: int, case: Case, folder: str, places: list[str]) -> list[Any]:
    return [
        train(rank, case, folder, None, False),
        train(rank, case, folder, None, True),
        *(train(rank, case, folder, place, False) for place in places),
    ]


KINDS = ["hf-map", "hf-stream", "webdataset", "stateful", "map", "stream", "plain"]
KINDS += ["drawn", "plain-drawn", "plain-shuffled"]
KINDS += ["shared", "shared-seedable", "shared-plain"]
PLACES = ["in-0-1", "in-0-3", "in-0-5", "in-0-8", "in-1-0", "in-1-3", "in-1-6", "in-1-8", "after-0", "after-1"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", ["with", "join_batches"])
@pytest.mark.parametrize("half", [0, 1])  # of the places
@pytest.mark.parametrize("lengths", [(0, 4, 9), (9, 0, 4), (4, 9, 0)], ids=str)
@pytest.mark.parametrize(
    "kind", others_long(KINDS, "map", "stateful", "stream", "drawn", "plain", "plain-shuffled", "shared")
)
def test_what_was_left(
    workers: Workers, kind: str, lengths: tuple[int, ...], half: int, way: str, accumulate: int, tmp_path: Path
) -> None:
    case = Case(kind, lengths, way, accumulate)
    check(workers, case, str(tmp_path), PLACES[half::2])


def check(workers: Workers, case: Case, folder: str, places: list[str]) -> None:
    results = workers.run(len(case.lengths), whole_and_resumed, case, folder, places, deadline=120.0)
    for epoch in range(EPOCHS):
        samples = [n for found in results for e, _, numbers in found[0][0] if e == epoch for n in numbers]
        own = 2 * sum(case.lengths) - sum(length > 1 for length in case.lengths)
        assert len(samples) == len({*samples}) == (SHARED if case.kind.startswith("shared") else own)
    wrong = []
    for number, place in enumerate(places, start=2):
        where, epoch_, *step = place.split("-")
        at = (int(epoch_), int(step[0]) + 1) if where == "in" else (int(epoch_) + 1, 0)
        for rank, found in enumerate(results):
            (whole, state), (seen, state_then) = found[0], found[number]
            if seen != [it for it in whole if it[:2] >= at]:
                wrong.append(f"{place}: rank {rank} {[it for it in whole if it[:2] >= at][:9]} {seen[:9]}")
            apart = max(float((a - b).abs().max()) for a, b in zip(state, state_then, strict=True))
            # Gradients of a window that has begun are in no checkpoint of Accelerate's.
            is_whole = where == "after" or case.accumulate == 1 or int(step[0]) % 2 == 1 or int(step[0]) == 8
            if apart > 1e-12 and is_whole:
                wrong.append(f"{place}: rank {rank} {apart}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_in_new_processes(workers: Workers, kind: str, tmp_path: Path) -> None:
    case, others = Case(kind, (0, 4, 9), "join_batches", 1), Workers(3)
    whole, _ = (workers.run(3, train, case, str(tmp_path), None, saves) for saves in (False, True))
    try:
        for (seen, _), (then, _) in zip(whole, others.run(3, train, case, str(tmp_path), "in-1-2", False), strict=True):
            assert then == [it for it in seen if it[:2] >= (1, 3)]
    finally:
        others.close()
