"""Samplers that are injected show every sample once; the user's own sampler is left alone."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from tests.support.front_ends.lightning import Fit, build_trainer
from tests.support.workers import Workers


class Seen(pl.LightningModule):
    """Writes down which samples it is given."""

    def __init__(self, size: int, sampler: str, batch_size: int) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.size, self.sampler, self.batch_size = size, sampler, batch_size
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": []}

    def loader(self) -> DataLoader[Any]:
        dataset: Any = [torch.tensor([float(i)]) for i in range(self.size)]
        samplers: dict[str, Any] = {
            "shuffle": lambda: RandomSampler(dataset),
            "in order": lambda: SequentialSampler(dataset),
            "own": lambda: WeightedRandomSampler([1.0] * self.size, self.size, replacement=False),
            "own distributed": lambda: DistributedSampler(dataset, shuffle=False),
        }
        return DataLoader(dataset, batch_size=self.batch_size, sampler=samplers[self.sampler]())

    train_dataloader = val_dataloader = loader

    def on_train_epoch_start(self) -> None:
        self.seen["train"].append([])

    def on_validation_epoch_start(self) -> None:
        self.seen["val"].append([])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.seen["train"][-1] += batch.flatten().int().tolist()
        return self.net(batch).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, _: int) -> None:
        self.seen["val"][-1] += batch.flatten().int().tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_seen(rank: int, world_size: int, size: int, sampler: str, batch_size: int) -> dict[str, list[list[int]]]:
    torch.manual_seed(1)  # the weighted sampler draws from the global generator, like any user's
    module = Seen(size, sampler, batch_size)
    case = Fit((1,) * world_size, epochs=2)
    build_trainer(case, use_distributed_sampler=True, num_sanity_val_steps=0).fit(module)
    return module.seen


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampler", ["shuffle", "in order", "own"])
@pytest.mark.parametrize(("world_size", "size", "batch_size"), [(3, 13, 2), (2, 12, 4), (3, 2, 1)])
def test_injected_samplers_show_every_sample_once(
    workers: Workers, sampler: str, world_size: int, size: int, batch_size: int
) -> None:
    results = workers.run(world_size, fit_seen, world_size, size, sampler, batch_size)
    for kind in ("train", "val"):
        for epoch in range(2):
            seen = [index for result in results for index in result[kind][epoch]]
            assert sorted(seen) == list(range(size))
    if sampler == "shuffle":
        for rank, result in enumerate(results):
            dataset: Any = range(size)
            theirs = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=0)
            for epoch, seen in enumerate(result["train"]):
                theirs.set_epoch(epoch)
                assert list(theirs)[: len(seen)] == seen


class OwnLoader(DataLoader[Any]):
    """Lightning can make it a second time only from the arguments that it has kept."""

    def __init__(self, size: int, flavour: str, **options: Any) -> None:
        self.flavour = flavour
        super().__init__([torch.tensor([float(i)]) for i in range(size)], **options)  # type: ignore[arg-type]


class SeenByOwnLoader(Seen):
    def loader(self) -> DataLoader[Any]:
        return OwnLoader(self.size, "vanilla", batch_size=self.batch_size)

    train_dataloader = val_dataloader = loader


def fit_own_loader(rank: int) -> dict[str, list[list[int]]]:
    module = SeenByOwnLoader(7, "", 2)
    build_trainer(Fit((1, 1), epochs=2), use_distributed_sampler=True, num_sanity_val_steps=0).fit(module)
    return module.seen


def test_a_loader_of_a_class_of_the_users_own(workers: Workers) -> None:
    results = workers.run(2, fit_own_loader)
    for kind in ("train", "val"):
        assert sorted(index for result in results for index in result[kind][1]) == list(range(7))


def test_the_users_own_distributed_sampler_is_left_alone(workers: Workers) -> None:
    results = workers.run(3, fit_seen, 3, 13, "own distributed", 2)
    assert sorted(index for result in results for index in result["train"][0]) == sorted([*range(13), 0, 1])


class OwnShards(Seen):
    """Each rank has a dataset of its own."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(0, "in order", 1)
        self.sizes = sizes

    def train_dataloader(self) -> DataLoader[Any]:
        self.size = self.sizes[self.trainer.global_rank]
        return self.loader()

    val_dataloader = predict_dataloader = train_dataloader

    def predict_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


def run_own_shards(rank: int, sizes: tuple[int, ...], injects: bool) -> tuple[list[str], list[str], list[int]]:
    module, told = OwnShards(sizes), []
    for run in ("fit", "predict"):
        trainer = build_trainer(Fit((1, 1), epochs=2), use_distributed_sampler=injects, num_sanity_val_steps=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(trainer, run)(module)
        told.append([str(each.message) for each in caught if "have different lengths" in str(each.message)])
    return told[0], told[1], module.seen["train"][0]


@pytest.mark.parametrize(
    ("sizes", "injects", "times"), [((6, 10), True, 1), ((6, 10), False, 0), ((8, 8), True, 0), ((0, 4), True, 1)]
)
def test_shards_that_lightning_deals_out_again_get_a_warning(
    workers: Workers, sizes: tuple[int, ...], injects: bool, times: int
) -> None:
    results = workers.run(2, run_own_shards, sizes, injects)
    fitting, predicting, _ = results[0]
    assert (len(fitting), len(predicting)) == (2 * times, times)  # of the train and of the validation dataloader
    for text in fitting + predicting:
        assert f"datasets of dataloader 0 have different lengths ({min(sizes)} to {max(sizes)})" in text
        assert "only 1 of every 2 samples in its shard. Pass own_shards=True to the strategy" in text
    shares = [(size + 1 - rank) // 2 if injects else size for rank, size in enumerate(sizes)]
    assert [len(seen) for *_, seen in results] == shares
