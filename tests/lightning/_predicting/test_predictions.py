"""Predictions on uneven dataloaders, gathered and written: one for each sample, in the order of one process."""

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from lightning_join import (
    JoinCallback,
    JoinPredictionWriter,
    gather_in_order,
    read_predictions,
)
from tests.support.front_ends.lightning import Fit, build_trainer
from tests.support.many import check_each, seeds
from tests.support.rows import assert_same
from tests.support.workers import Workers
from torch_join import JoinError, UnpaddedDistributedSampler, UnsupportedError

DATASET = ("injected", "padded", "unpadded", "batches")  # of which all ranks have one dataset
SHARDS = ("shards", "stream")


class Numbers(Dataset[int]):
    """Samples that are numbers, from one on."""

    def __init__(self, first: int, samples: int) -> None:
        self.first, self.samples = first, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return self.first + range(self.samples)[index]


class Stream(IterableDataset[int]):
    def __init__(self, first: int, samples: int) -> None:
        self.numbers = range(first + samples, first, -1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


class Bucketed(Sampler[list[int]]):
    """Deals out batches of different sizes, in any order."""

    def __init__(self, samples: int, rank: int, num_replicas: int) -> None:
        self.rank, self.num_replicas = rank, num_replicas
        r, self.batches, order = random.Random(samples), [], [*range(samples)]
        r.shuffle(order)
        while order:
            self.batches.append([order.pop() for _ in range(min(len(order), r.randint(1, 4)))])

    def __len__(self) -> int:
        return len(self.batches[self.rank :: self.num_replicas])

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches[self.rank :: self.num_replicas])


@dataclass(frozen=True)
class Loader:
    """One dataloader, by the number of its samples: in all, or on each rank."""

    kind: str = "injected"
    samples: int | tuple[int, ...] = 7
    batch: int = 2
    shuffle: bool = False
    workers: int = 0

    def make(self, rank: int, world_size: int, first: int) -> DataLoader[Any]:
        options: dict[str, Any] = {"batch_size": self.batch, "num_workers": self.workers}
        if isinstance(self.samples, tuple):
            kind = Stream if self.kind == "stream" else Numbers
            shuffle = self.shuffle and self.kind != "stream" and self.samples[rank] > 0
            return DataLoader(kind(first + 1000 * rank, self.samples[rank]), shuffle=shuffle, **options)
        data = Numbers(first, self.samples)
        if self.kind == "batches":
            return DataLoader(data, batch_sampler=Bucketed(self.samples, rank, world_size), num_workers=self.workers)
        if self.kind == "padded":
            return DataLoader(data, sampler=DistributedSampler(data, world_size, rank, self.shuffle), **options)
        if self.kind == "unpadded":
            own = UnpaddedDistributedSampler(data, world_size, rank, self.shuffle)
            return DataLoader(data, sampler=own, **options)
        return DataLoader(data, shuffle=self.shuffle, **options)

    def expected(self, seen: Sequence[Sequence[int]], first: int, is_whole: bool) -> list[int]:
        """Return the samples in order, of which each rank has seen some."""
        if self.kind == "stream":
            return [number for rank in seen for number in rank]
        if self.kind == "shards":
            return [number for rank in seen for number in sorted(rank)]
        found = sorted({number for rank in seen for number in rank})
        assert isinstance(self.samples, int)
        if is_whole:
            assert found == [*range(first, first + self.samples)]
        return found


@dataclass(frozen=True)
class Case:
    world_size: int = 2
    loaders: tuple[Loader, ...] = (Loader(),)
    limit: int | float = 1.0
    to: int | None = None
    rows: str = "nested"
    order: Any = None
    folder: str = ""
    seed: int = field(default=0, compare=False)

    @property
    def injects(self) -> bool:
        return any(loader.kind == "injected" for loader in self.loaders)


def rows_of(kind: str, numbers: Sequence[int]) -> Any:
    """What is predicted for samples."""
    at = torch.tensor([*numbers], dtype=torch.int64)
    if kind == "tensor":
        return at.double().sqrt()
    if kind == "objects":
        return [str(number) * (number % 3) for number in numbers]
    return {"x": at[:, None] * torch.ones(3), "deep": (at.half() > 3, [{"at": n} for n in numbers], at.short())}


class Predicting(pl.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.case = case
        self.seen: list[list[int]] = [[] for _ in case.loaders]

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.seen[dataloader_idx] += batch.tolist()
        return rows_of(self.case.rows, batch.tolist())


def predict(rank: int, case: Case) -> tuple[list[list[int]], Any, Any]:
    """Return what this rank has seen, what it has gathered, and what is in the file."""
    torch.manual_seed(rank)
    module = Predicting(case)
    path = Path(case.folder) / f"predictions-{case.seed}"
    trainer = build_trainer(
        Fit((1,) * case.world_size),
        use_distributed_sampler=case.injects,
        limit_predict_batches=case.limit,
        callbacks=[JoinPredictionWriter(path, case.order)],
    )
    loaders = [each.make(rank, case.world_size, 100 * place) for place, each in enumerate(case.loaders)]
    # A daemon, as these workers are, may have no processes of its own, and a loader may.
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        predictions = trainer.predict(module, loaders if len(loaders) > 1 else loaders[0], return_predictions=True)
    gathered = gather_in_order(trainer, predictions, case.to, order=case.order)
    assert sorted(Path(case.folder).glob("*rank*")) == [] or rank > 0  # rank 0 is the last to come out of the end
    written = read_predictions(path) if path.exists() else None
    if written is None:
        return module.seen, gathered, None
    return module.seen, gathered, [each[:] for each in written] if isinstance(written, list) else written[:]


def check(case: Case, found: Sequence[tuple[list[list[int]], Any, Any]]) -> None:
    expected = []
    for place, loader in enumerate(case.loaders):
        seen = [each[0][place] for each in found]
        numbers = loader.expected(seen, 100 * place, isinstance(case.limit, float))
        expected.append(rows_of(case.rows, numbers) if any(seen) else None)
    for rank, (_, gathered, written) in enumerate(found):
        takes = case.to is None or rank == case.to
        whole = [each if takes else None for each in expected]
        assert_same(gathered, whole[0] if len(whole) == 1 else whole)
        if any(each is not None for each in expected):
            assert_same(written, expected[0] if len(expected) == 1 else expected)
        else:
            assert written in (None, [None] * len(expected))


CASES = {
    "injected": Case(3, (Loader(samples=8, shuffle=True),)),
    "fewer samples than ranks": Case(3, (Loader(samples=2),), rows="objects"),
    "padded": Case(3, (Loader("padded", 7, shuffle=True),), to=1, rows="tensor"),
    "batches of any size": Case(2, (Loader("batches", 23, workers=2),)),
    "shards": Case(3, (Loader("shards", (3, 0, 6), shuffle=True),)),
    "streams": Case(2, (Loader("stream", (0, 5)),), rows="tensor"),
    "several": Case(
        2, (Loader("unpadded", 5), Loader("stream", (4, 1)), Loader("shards", (0, 0)), Loader("batches", 9))
    ),
    "limit": Case(3, (Loader("injected", 30, shuffle=True), Loader("stream", (5, 0, 9))), limit=2, to=0),
    "nothing": Case(2, (Loader(samples=0),)),
    "one process": Case(1, (Loader(samples=7, shuffle=True), Loader("stream", (3,)))),
}


@pytest.mark.parametrize("name", CASES)
def test_each_sample_once_in_the_order_of_one_process(workers: Workers, name: str, tmp_path: Path) -> None:
    case = Case(**{**vars(CASES[name]), "folder": str(tmp_path)})
    check(case, workers.run(case.world_size, predict, case))


# ---------------------------------------------------------------- many random ones


def draw(seed: int, world_size: int, folder: str) -> Case:
    r = random.Random(seed)
    injects = r.random() < 0.4
    kinds = ("injected", "padded", "stream") if injects else ("padded", "unpadded", "batches", "shards", "stream")

    def loader() -> Loader:
        kind = r.choice(kinds)
        of_ranks = tuple(r.choice((0, r.randint(0, 12))) for _ in range(world_size))
        samples = of_ranks if kind in SHARDS else r.randint(1 if kind == "padded" else 0, 25)
        # A stream in workers yields what each of them has.
        workers = r.choice((0, 0, 0, 0, 0, 1, 2)) if kind != "stream" else 0
        return Loader(kind, samples, r.randint(1, 5), r.random() < 0.5 and samples != 0, workers)

    return Case(
        world_size,
        tuple(loader() for _ in range(r.choice((1, 1, 2, 3)))),
        limit=r.choice((1.0, 1.0, 1.0, 1, 2, 3)),
        to=r.choice((None, None, *range(world_size))),
        rows=r.choice(("nested", "tensor", "objects")),
        folder=folder,
        seed=seed,
    )


@seeds(range(1), of=10)
def test_random_predictions(workers: Workers, seed: int, tmp_path: Path) -> None:
    size = 2 + seed % 2
    runs = [draw(10 * seed + number, size, str(tmp_path)) for number in range(10)]
    check_each(workers, predict, runs, check, deadline=180.0)


# ---------------------------------------------------------------- other ways to say which samples there were


class WithIndices(Predicting):
    """Predicts, of streams, which samples these are."""

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"index": batch, "rows": super().predict_step(batch, batch_idx, dataloader_idx)}


def predict_with_indices(rank: int) -> Any:
    case = Case(2, (Loader("stream", (3, 4)), Loader("stream", (2, 0))))
    module, trainer = WithIndices(case), build_trainer(Fit((1, 1)))
    loaders = [each.make(rank, 2, 0) for each in case.loaders]
    found: Any = trainer.predict(module, loaders, return_predictions=True)
    rows = [[each["rows"] for each in batches] for batches in found]
    return gather_in_order(trainer, rows, indices=[[-each["index"] for each in batches] for batches in found])


def test_indices_of_the_users_own(workers: Workers) -> None:
    backwards = [1004, 1003, 1002, 1001, 3, 2, 1], [2, 1]
    for found in workers.run(2, predict_with_indices):
        assert_same(found, [rows_of("nested", numbers) for numbers in backwards])


class AtTheEnd(Predicting):
    def on_predict_epoch_end(self) -> None:
        self.gathered = gather_in_order(self.trainer, self.trainer.predict_loop.predictions)


def predict_by_callback(rank: int) -> Any:
    case = Case(2, (Loader(samples=5, shuffle=True),))
    module = AtTheEnd(case)
    trainer = build_trainer(
        Fit((1, 1)), strategy=DDPStrategy(), callbacks=[JoinCallback()], use_distributed_sampler=True
    )
    predictions = trainer.predict(module, case.loaders[0].make(rank, 2, 0), return_predictions=True)
    return module.gathered, gather_in_order(trainer, predictions)


def test_in_a_hook_and_with_a_plain_strategy(workers: Workers) -> None:
    for in_hook, after in workers.run(2, predict_by_callback):
        assert_same(in_hook, rows_of("nested", range(5)))
        assert_same(after, in_hook)


# ---------------------------------------------------------------- what raises


class Iterating(Predicting):
    def predict_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, place = next(dataloader_iter)
        return super().predict_step(batch, batch_idx, place)


def predict_iterating(rank: int) -> list[list[int]]:
    module = Iterating(Case(2, (Loader(), Loader())))
    loaders = [DataLoader(range(10 * place, 10 * place + 3 + rank), batch_size=2) for place in range(2)]  # type: ignore[arg-type]
    build_trainer(Fit((1, 1)), use_distributed_sampler=False).predict(module, loaders)
    return module.seen


def test_a_step_that_reads_its_own_batches_goes_through_all_dataloaders(workers: Workers) -> None:
    assert workers.run(2, predict_iterating) == [[[0, 1, 2], [10, 11, 12]], [[0, 1, 2, 3], [10, 11, 12, 13]]]


class Unrecorded(UnpaddedDistributedSampler):
    def __iter__(self) -> Any:
        return (str(index) for index in super().__iter__())


class ByName(Numbers):
    def __getitem__(self, index: Any) -> int:
        return super().__getitem__(int(index))


def unknown(rank: int, kind: str) -> Any:
    data = ByName(0, 5)
    own = UnpaddedDistributedSampler(data, 2, rank)
    if kind == "one by one":
        return DataLoader(data, batch_size=None, sampler=own)
    if kind == "names":
        return DataLoader(data, batch_size=2, sampler=Unrecorded(data, 2, rank))
    if kind == "any order":
        return DataLoader(data, batch_size=2, sampler=own, num_workers=1, in_order=False)
    if kind == "mixed":
        return DataLoader(data, batch_size=2, sampler=own if rank else None)
    if kind == "own shards":
        return DataLoader(Numbers(0, 4 + rank), batch_size=2)
    return Loader("stream", (2, 2)).make(rank, 2, 0)


class OneByOne(Predicting):
    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return torch.as_tensor(batch).reshape(-1)


UNKNOWN: dict[str, tuple[Any, str]] = {
    "one by one": (None, "with batch_size=None the indices from its sampler are not recorded"),
    "names": (None, "its sampler yields objects that are not integers"),
    "any order": (None, "with in_order=False its batches do not arrive in its sampler's order"),
    "mixed": (
        None,
        "Dataloader 0 reads its own dataset on rank 0, while on other ranks a sampler distributes a shared",
    ),
    "own shards": (None, "have different lengths (4 to 5), and a sampler shards each of them"),
    "stream": ("dataset", "its dataset is iterable. Return the samples' indices from predict_step and pass them"),
}


def predict_unknown(rank: int, kind: str, folder: str) -> tuple[str, str, int, bool]:
    order = UNKNOWN[kind][0]
    injects = kind == "own shards"
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        trainer = build_trainer(Fit((1, 1)), use_distributed_sampler=injects)
        predictions = trainer.predict(OneByOne(Case()), unknown(rank, kind), return_predictions=True)
        with pytest.raises(UnsupportedError, match="order") as gathering:
            gather_in_order(trainer, predictions, order=order)
        rows = len(gather_in_order(trainer, predictions, order="shards"))
        writer = JoinPredictionWriter(f"{folder}/rows", order)
        with pytest.raises(UnsupportedError, match="order") as writing:
            build_trainer(Fit((1, 1)), use_distributed_sampler=injects, callbacks=[writer]).predict(
                OneByOne(Case()), unknown(rank, kind)
            )
    return str(gathering.value), str(writing.value), rows, any(Path(folder).glob(f"*rank{rank}"))


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_order_that_is_not_known_raises_on_all_ranks(workers: Workers, kind: str, tmp_path: Path) -> None:
    for gathering, writing, rows, is_left in workers.run(2, predict_unknown, kind, str(tmp_path)):
        assert UNKNOWN[kind][1] in gathering
        assert "order='shards'" in gathering
        assert writing == gathering
        assert rows == {"mixed": 7, "stream": 4, "own shards": 4}.get(kind, 5)
        assert not is_left


def gather_badly(rank: int) -> list[str]:
    trainer = build_trainer(Fit((1, 1)))
    loader = Loader("unpadded", 7).make(rank, 2, 0)
    module, said = Predicting(Case()), []
    predictions: Any = trainer.predict(module, loader, return_predictions=True)
    without = build_trainer(Fit((1, 1)))
    without.predict(module, loader, return_predictions=False)
    numbers = [[0] for _ in predictions]
    tries: list[tuple[Any, Any, Any]] = [
        (trainer, predictions[rank:], None),  # what others lack is said on all ranks
        (without, None, None),
        (trainer, [{**each, "loss": torch.tensor(1.0)} for each in predictions], None),
        (trainer, [each["x"][:1] for each in predictions], None),
        (trainer, predictions, numbers),
        (trainer, 3, None),
    ]
    for one, given, indices in tries:
        with pytest.raises(JoinError) as error:
            gather_in_order(one, given, indices=indices)
        said.append(str(error.value))
    return said


def test_what_is_no_prediction_of_the_last_run_raises_on_all_ranks(workers: Workers) -> None:
    first, second = workers.run(2, gather_badly)
    assert first == second
    texts = [
        "Rank 1: The predictions have [1] batches per dataloader",
        "Call it with return_predictions=True",
        "The predictions of rank 0 cannot be gathered. Batch 0: predictions['loss'] is a 0-dimensional tensor",
        "Batch 0: predictions has 1 rows, but its batch has 2",
        "Batch 0: predictions['x'] has 2 rows, but its batch has 1",
        "a list with one entry per batch",
    ]
    for text, said in zip(texts, first, strict=True):
        assert text in said


class Failing(Predicting):
    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise ValueError("no")
        return {"loss": batch.sum()} if self.case.rows == "loss" else batch


def write_badly(rank: int, rows: str, folder: str) -> None:
    trainer = build_trainer(Fit((1, 1)), callbacks=[JoinPredictionWriter(f"{folder}/new/rows")])
    trainer.predict(Failing(Case(rows=rows)), Loader("unpadded", 7).make(rank, 2, 0), return_predictions=False)


@pytest.mark.parametrize(("rows", "text"), [("loss", "predictions['loss'] is a 0-dimensional"), ("tensor", "no")])
def test_a_writer_that_fails_leaves_nothing(workers: Workers, rows: str, text: str, tmp_path: Path) -> None:
    outcomes = workers.outcomes(2, write_badly, rows, str(tmp_path))
    assert text in outcomes[1].error
    assert "PeerFailedError" in outcomes[0].error or text in outcomes[0].error
    assert [*(tmp_path / "new").iterdir()] == []


# ---------------------------------------------------------------- memory

MEGABYTE = 1 << 20


class Large(pl.LightningModule):
    """Predicts a megabyte for each sample."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch[:, None].expand(len(batch), MEGABYTE // 8).double()


def highest() -> int:
    """Return the highest memory of this process, in bytes, since the last call."""
    lines = Path("/proc/self/status").read_text().splitlines()
    Path("/proc/self/clear_refs").write_text("5")  # begins anew
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def write_much(rank: int, samples: tuple[int, ...], folder: str) -> list[int]:
    path, grown = f"{folder}/rows", []
    for numbers in ((1, 1), samples):  # first what is imported and kept
        trainer = build_trainer(Fit((1, 1)), callbacks=[JoinPredictionWriter(path)])
        loader = Loader("shards", numbers, batch=4).make(rank, 2, 0)
        highest()
        before = highest()
        trainer.predict(Large(), loader, return_predictions=False)
        grown.append(highest() - before)
    if rank == 0:
        rows: Any = read_predictions(path)
        numbers = [int(row[0]) for row in rows]
        assert numbers == [*range(samples[0]), *range(1000, 1000 + samples[1])]
        grown.append(highest() - before)
    return grown


@pytest.mark.long
def test_the_writers_memory_is_flat_at_a_gigabyte(workers: Workers, tmp_path: Path) -> None:
    for grown in workers.run(2, write_much, (200, 824), str(tmp_path), deadline=300.0):
        assert max(grown) < 150 * MEGABYTE, [size // MEGABYTE for size in grown]
    assert (tmp_path / "rows").stat().st_size > 1024 * MEGABYTE
