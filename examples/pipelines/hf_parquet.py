"""Stream parquet shards with Hugging Face's `datasets`, in Lightning's Trainer.

    python examples/pipelines/hf_parquet.py   # starts three processes

Seven shards do not divide by three ranks, so `split_dataset_by_node` gives each rank every third sample; and the
number of samples does not divide either.
"""

import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from datasets import Dataset, load_dataset
from datasets.distributed import split_dataset_by_node
from one_process import BATCH_SIZE, EPOCHS, WORLD_SIZE, check_digits, digits, model_and_optimizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy

SAMPLES = 3 * 6 * BATCH_SIZE + 1  # of which rank 0 has one more, a batch of its own
SHARDS = 7


class Shards(pl.LightningDataModule):
    folder: str | None = None

    def prepare_data(self) -> None:  # on one process
        images, labels = digits(SAMPLES)
        self.folder = tempfile.mkdtemp()
        columns = {"id": list(range(SAMPLES)), "image": images.tolist(), "label": labels.tolist()}
        for number in range(SHARDS):
            shard = Dataset.from_dict(columns).shard(SHARDS, number)
            shard.to_parquet(Path(self.folder) / f"{number}.parquet")

    def setup(self, stage: str) -> None:
        self.folder = self.trainer.strategy.broadcast(self.folder)

    def train_dataloader(self) -> DataLoader[Any]:
        stream = load_dataset("parquet", data_files=f"{self.folder}/*.parquet", split="train", streaming=True)
        mine = split_dataset_by_node(stream, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(mine.with_format("torch"), BATCH_SIZE)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.optimizer = model_and_optimizer()
        self.trained: list[list[list[int]]] = [[] for _ in range(EPOCHS)]

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.trained[self.current_epoch].append(batch["id"].tolist())
        return cross_entropy(self.model(batch["image"].double()), batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    def on_train_end(self) -> None:
        check_digits(self.trained, self.model, range(SAMPLES))


def main() -> None:
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        strategy=DDPJoinStrategy(weighting="samples"),
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), Shards())


if __name__ == "__main__":
    main()
