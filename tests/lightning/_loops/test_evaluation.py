"""Validate, test and predict on uneven dataloaders of every kind: nothing twice, nothing lost, collectives served."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchmetrics.aggregation import CatMetric

from tests.support.front_ends.lightning import Fit, Module, build_trainer
from tests.support.run import Batch
from tests.support.workers import Workers

Sizes = tuple[tuple[int, ...], ...]  # numbers of batches, by dataloader and rank
TWO: Sizes = ((0, 3, 1), (4, 1, 0))
SIDE: Sizes = ((1, 3, 2), (4, 2, 1))


def number(loader: int, rank: int, index: int) -> Tensor:
    return torch.tensor(100.0 * loader + 10 * rank + index + 1, dtype=torch.float64)


def make_loaders(sizes: Sizes, rank: int, streams: str) -> list[DataLoader[Any]]:
    data = [[number(i, rank, k) for k in range(by_rank[rank])] for i, by_rank in enumerate(sizes)]
    return [
        DataLoader(Endless(each) if streams[i] == "s" else each, batch_size=None)  # type: ignore[arg-type]
        for i, each in enumerate(data)
    ]


def flatten(batch: Any) -> list[float]:
    parts = batch if isinstance(batch, (list, tuple)) else [batch]
    return [x for part in parts if part is not None for x in part.flatten().tolist()]


class Endless(IterableDataset[Tensor]):
    def __init__(self, data: list[Tensor]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


class Evaluated(pl.LightningModule):
    """Issues collectives of every kind in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.all = CatMetric(dist_sync_on_step=True).set_dtype(torch.float64)
        self.seen: list[tuple[int, list[float]]] = []
        self.together: list[tuple[float, list[float], float]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        found = flatten(batch)
        self.seen.append((dataloader_idx, found))
        total = torch.tensor(found[0])
        dist.all_reduce(total)
        gathered = self.trainer.strategy.all_gather(torch.tensor(found[0])).flatten().tolist()
        stepped = self.all(torch.tensor([found[0]]))
        assert sorted(stepped.flatten().tolist()) == sorted(gathered)
        self.log("mean", found[0], on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        self.together.append((float(total), gathered, float(self.trainer.strategy.reduce(torch.tensor(found[0])))))

    def test_step(self, *args: Any) -> None:
        self.validation_step(*args)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> tuple[list[float], list[float]]:
        found = flatten(batch)
        return found, self.trainer.strategy.all_gather(torch.tensor(found[0])).flatten().tolist()


SETTINGS: dict[str, tuple[str, Sizes, str, dict[str, Any]]] = {
    "sequential": ("sequential", TWO, "dd", {}),
    "sequential streams": ("sequential", TWO, "ds", {}),
    "limit": ("sequential", TWO, "dd", {"limit_val_batches": 2}),
    "limit streams": ("sequential", TWO, "ss", {"limit_val_batches": 3}),
    "share": ("sequential", ((2, 4, 2), (6, 2, 0)), "dd", {"limit_val_batches": 0.5}),
    "cycle": ("max_size_cycle", SIDE, "dd", {}),
    "cycle streams": ("max_size_cycle", SIDE, "sd", {"limit_val_batches": 3}),
    "min": ("min_size", SIDE, "dd", {}),
    "min streams": ("min_size", SIDE, "ds", {"limit_val_batches": 1}),
    "min empty": ("min_size", TWO, "dd", {}),
    "max": ("max_size", TWO, "dd", {}),
    "max streams": ("max_size", SIDE, "ss", {}),
}


def plain(setting: str, rank: int) -> list[tuple[int, list[float]]]:
    """What a loop over this rank's loaders alone would see."""
    mode, sizes, _, options = SETTINGS[setting]
    limit = options.get("limit_val_batches")
    loaders = make_loaders(sizes, rank, "dd")
    counts = [by_rank[rank] for by_rank in sizes]
    if limit is not None:
        counts = [min(n, limit) if isinstance(limit, int) else int(n * limit) for n in counts]
    if mode == "sequential":
        return [(i, flatten(x)) for i, part in enumerate(loaders) for k, x in enumerate(part) if k < counts[i]]
    steps = min(counts) if mode == "min_size" else max(counts)
    cycles = mode == "max_size_cycle"
    sizes_here = [by_rank[rank] for by_rank in sizes]
    return [
        (0, [float(number(i, rank, k % n)) for i, n in enumerate(sizes_here) if cycles or k < n]) for k in range(steps)
    ]


def evaluate(rank: int) -> dict[str, tuple[list[Any], list[Any], list[dict[str, float]]]]:
    results = {}
    for setting, (mode, sizes, streams, options) in SETTINGS.items():
        module = Evaluated()
        loaders: Any = make_loaders(sizes, rank, streams)
        if mode != "sequential":
            loaders = CombinedLoader(loaders, mode)  # type: ignore[arg-type]
        trainer = build_trainer(Fit((1, 1, 1)), **options)
        found = trainer.validate(module, loaders, verbose=False)
        results[setting] = module.seen, module.together, [dict(each) for each in found]
    return results


def test_validation_of_every_kind_of_loader(workers: Workers) -> None:
    results = workers.run(3, evaluate)
    for setting, (mode, *_) in SETTINGS.items():
        expected = [plain(setting, rank) for rank in range(3)]
        for rank in range(3):
            seen, together, found = results[rank][setting]
            assert seen == expected[rank], setting
            assert found == results[0][setting][2]
            for loader in range(2 if mode == "sequential" else 1):
                mine = [these for (i, _), these in zip(seen, together, strict=True) if i == loader]
                rounds = [[x[0] for i, x in expected[r] if i == loader] for r in range(3)]
                for step, (total, gathered, mean) in enumerate(mine):
                    values = [values[step] for values in rounds if step < len(values)]
                    assert total == sum(values), (setting, rank, step)
                    assert gathered == values
                    assert mean == pytest.approx(sum(values) / len(values))
                values = [value for values in rounds for value in values]
                suffix = f"/dataloader_idx_{loader}" if mode == "sequential" else ""
                if values:
                    assert found[loader][f"mean_epoch{suffix}"] == pytest.approx(sum(values) / len(values))


# ---------------------------------------------------------------- what cannot work


class Lying(Sampler[int]):
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(range(2))


def validate_badly(rank: int, kind: str) -> None:
    dataset: Any = [number(0, rank, k) for k in range(5)]
    loaders: Any = DataLoader(dataset, batch_size=None, sampler=Lying() if rank == 1 else None)
    if kind == "cycle":
        loaders = CombinedLoader(make_loaders(((3, 3), (2, 0)), rank, "dd"), "max_size_cycle")
    build_trainer(Fit((1, 1))).validate(Evaluated(), loaders, verbose=False)


def test_a_dataloader_that_is_shorter_than_it_said(workers: Workers) -> None:
    first, second = workers.outcomes(2, validate_badly, "lying")
    assert "Dataloader 0 of rank 1 reported 5 batches but yielded 2" in second.error, second.trace
    assert "PeerFailedError: Rank 1 failed" in first.error, first.trace


def test_an_empty_dataloader_cannot_be_cycled(workers: Workers) -> None:
    for outcome in workers.outcomes(2, validate_badly, "cycle"):
        assert "DataloaderError: The dataloaders of rank 1 cannot be used" in outcome.error, outcome.trace
        assert "Use mode='max_size'" in outcome.error


# ---------------------------------------------------------------- within the tail of a fit


class ValidatesInTail(Module):
    """Ranks that have joined in training are active in the validation, and the other way round."""

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.sums: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.sums.append(self.count())
        return super().training_step(batch, batch_idx)

    def validation_step(self, *_: Any) -> None:
        self.sums.append(self.count())
        self.sums.append(self.count())

    def count(self) -> float:
        one = torch.ones(())
        dist.all_reduce(one)
        return float(one)

    def val_dataloader(self) -> Any:
        return make_loaders(((3, 1, 0), (0, 2, 5)), self.trainer.global_rank, "dd")


def fit_in_tail(rank: int) -> list[float]:
    module = ValidatesInTail(Fit((0, 7, 2), epochs=2))
    module.validation_step = lambda batch, batch_idx, dataloader_idx: ValidatesInTail.validation_step(module)  # type: ignore[method-assign,misc]
    build_trainer(module.case, num_sanity_val_steps=1, val_check_interval=3).fit(module)
    return module.sums


def test_validation_within_the_tail_of_training(workers: Workers) -> None:
    lengths, loaders = (0, 7, 2), ((3, 1, 0), (0, 2, 5))
    for rank, sums in enumerate(workers.run(3, fit_in_tail)):
        training, *validations = [
            [float(sum(n > step for n in by_rank)) for step in range(by_rank[rank])] for by_rank in (lengths, *loaders)
        ]
        sanity = [n for counts in validations for n in counts[:1] for _ in "ab"]
        validation = [n for counts in validations for n in counts for _ in "ab"]
        epoch = training[:3] + validation + training[3:6] + validation + training[6:]
        assert sums == sanity + epoch * 2
