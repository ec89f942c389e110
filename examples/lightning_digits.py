"""Train on handwritten digits with three processes whose shards hold 70, 20 and 10 percent of the images.

    python examples/lightning_digits.py             # map-style shards
    python examples/lightning_digits.py --iterable  # shards without a length

Ends with the largest difference of the parameters from those of one process on the same schedule.
"""

import argparse
import copy
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

import lightning_join
from torch_join import UnpaddedDistributedSampler

WORLD_SIZE = 3
SHARES = (0.7, 0.2, 0.1)
EPOCHS = 6
BATCH_SIZE = 20
CLIP = 1.0
SEED = 7
TOLERANCE = 1e-10


class Images(IterableDataset[Any]):
    """A dataset that has an order but no length."""

    def __init__(self, dataset: Subset[Any]) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self._dataset[index] for index in range(len(self._dataset)))


class Digits(pl.LightningDataModule):
    def __init__(self, iterable: bool) -> None:
        super().__init__()
        self.iterable = iterable
        digits = load_digits()
        # In float64, so that the comparison at the end is sharp.
        dataset = TensorDataset(torch.tensor(digits.data / 16), torch.tensor(digits.target))
        generator = torch.Generator().manual_seed(SEED)
        train, self.validation, self.test = random_split(dataset, (0.7, 0.1, 0.2), generator)
        self.shards = random_split(train, SHARES, generator)

    def shard(self, rank: int, epoch: int) -> Subset[Any]:
        """Return the images of one rank in the order that they have in one epoch."""
        shard = self.shards[rank]
        order = torch.randperm(len(shard), generator=torch.Generator().manual_seed(SEED + epoch))
        return Subset(shard, order.tolist())

    def longest(self) -> int:
        """Return the number of batches of the rank that has the most."""
        return max(-(-len(shard) // BATCH_SIZE) for shard in self.shards)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        shard = self.shard(self.trainer.global_rank, self.trainer.current_epoch)
        return DataLoader(Images(shard) if self.iterable else shard, BATCH_SIZE)

    def val_dataloader(self) -> DataLoader[Any]:
        return _unpadded_loader(self.validation)

    def test_dataloader(self) -> DataLoader[Any]:
        return _unpadded_loader(self.test)


def _unpadded_loader(dataset: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH_SIZE, sampler=UnpaddedDistributedSampler(dataset, shuffle=False))


class Classifier(pl.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Any) -> None:
        self._log_accuracy("val_accuracy", batch, prog_bar=True)

    def test_step(self, batch: Any) -> None:
        self._log_accuracy("test_accuracy", batch)

    def _log_accuracy(self, name: str, batch: Any, **kwargs: Any) -> None:
        images, labels = batch
        accuracy = (self.network(images).argmax(dim=1) == labels).double().mean()
        self.log(name, accuracy, sync_dist=True, batch_size=len(labels), **kwargs)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer, scheduler = optimizer_and_scheduler(self.network)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def optimizer_and_scheduler(network: nn.Module) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.StepLR]:
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.8)


class CountSteps(Callback):
    """Count this rank's steps with a batch and its shadow steps."""

    def __init__(self) -> None:
        self.batches = self.shadow_steps = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, lightning_join.DDPJoinStrategy)
        if trainer.strategy.joined:
            self.shadow_steps += 1
        else:
            self.batches += 1


def train_in_one_process(network: nn.Module, digits: Digits) -> None:
    """Do what the ranks do together: sum the mean losses of those that have a batch, over the world size."""
    optimizer, scheduler = optimizer_and_scheduler(network)
    for epoch in range(EPOCHS):
        loaders = [iter(DataLoader(digits.shard(rank, epoch), BATCH_SIZE)) for rank in range(WORLD_SIZE)]
        while batches := [batch for loader in loaders if (batch := next(loader, None)) is not None]:
            optimizer.zero_grad()
            for images, labels in batches:
                loss = cross_entropy(network(images), labels) / WORLD_SIZE
                loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimizer.step()
            scheduler.step()


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    difference = nn.utils.parameters_to_vector(one.parameters()) - nn.utils.parameters_to_vector(other.parameters())
    return difference.abs().max().item()


def table_of_steps(rows: list[Any]) -> Table:
    table = Table(title="What each rank did")
    for column in ("rank", "images", "batches trained", "steps only followed", "optimizer steps"):
        table.add_column(column, justify="right")
    for rank, row in enumerate(rows):
        table.add_row(*map(str, (rank, *row)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterable", action="store_true", help="train on datasets without a length")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    pl.seed_everything(SEED, verbose=False)
    digits = Digits(arguments.iterable)
    network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).double()
    reference = copy.deepcopy(network)
    counts = CountSteps()
    with tempfile.TemporaryDirectory() as folder:  # checkpoints go to rank 0's
        trainer = pl.Trainer(
            strategy="ddp_join",
            accelerator="cpu",
            devices=WORLD_SIZE,
            max_epochs=EPOCHS,
            gradient_clip_val=CLIP,
            val_check_interval=digits.longest() // 2 if arguments.iterable else 0.5,
            use_distributed_sampler=False,  # the shards are what each rank trains on
            reload_dataloaders_every_n_epochs=1,  # each epoch has an order of its own
            callbacks=[
                counts,
                ModelCheckpoint(folder, monitor="val_accuracy", mode="max"),
                *([TQDMProgressBar(refresh_rate=15)] if sys.stdout.isatty() else []),
            ],
            enable_progress_bar=sys.stdout.isatty(),
            logger=False,
            enable_model_summary=False,
        )
        model = Classifier(network)
        trainer.fit(model, digits)
        steps = trainer.global_step
        trained = copy.deepcopy(network)
        (metrics,) = trainer.test(model, digits, ckpt_path="best", verbose=False)

    mine = (len(digits.shards[trainer.global_rank]), counts.batches, counts.shadow_steps, steps)
    rows: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(rows, mine)
    if trainer.is_global_zero:
        train_in_one_process(reference, digits)
        difference = largest_difference(trained, reference)
        console = Console()
        console.print(table_of_steps(rows))
        console.print("A rank that has no batch left follows the others' steps, so all end with the same parameters.")
        console.print(f'weighting="world": a step sums the gradients of its ranks and divides by {WORLD_SIZE}.')
        total = nn.utils.parameters_to_vector(trained.parameters()).sum().item()
        console.print(f"Sum of all parameters: {total:.12f}")
        console.print(f"Test accuracy of the best checkpoint: {metrics['test_accuracy']:.1%}")
        console.print(f"Largest difference of a parameter from one process on the same schedule: {difference:.1e}")
        if not difference <= TOLERANCE:  # NaN neither
            sys.exit(f"The parameters differ from those of one process by {difference:.1e}, more than {TOLERANCE:.0e}.")


if __name__ == "__main__":
    main()
