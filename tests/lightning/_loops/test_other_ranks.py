"""A fit that goes on with another number of ranks; see tests/support/other_ranks.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy
from tests.support.front_ends.lightning import ANY_CHECKPOINT, lightning_accelerator
from tests.support.many import seeds
from tests.support.other_ranks import EPOCHS, Chain, Samples, check, drawn, loader_of, loss, network, seen_in
from tests.support.workers import Workers


class Module(pl.LightningModule):
    """Notes what it has trained on, and saves where it is stopped."""

    def __init__(self, chain: Chain, job: int, folder: str, first: int) -> None:
        super().__init__()
        self.chain, self.job, self.folder, self.first = chain, job, folder, first
        self.net, self.step = network(), 0  # of the epoch, in this job
        self.seen: list[tuple[int, int, list[int]]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> Any:
        if self.chain.kind == "injected":
            return DataLoader(Samples(self.chain.count), self.chain.size, shuffle=self.chain.shuffle)
        return loader_of(self.chain, self.trainer.global_rank, self.trainer.world_size)

    def on_train_epoch_start(self) -> None:
        loader = self.trainer.train_dataloader
        if self.chain.kind == "buckets":  # Lightning tells samplers alone
            loader.batch_sampler.set_epoch(self.current_epoch)
        self.step = 0

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.seen.append((self.current_epoch, self.step, seen_in(batch)))
        return loss(self.net, batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        # Lightning itself, in one process too, makes an epoch twice where a job that has gone on at an epoch's last
        # step has saved in a later one.
        ends = self.trainer.is_last_batch and self.job + 2 < len(self.chain.worlds)
        if (self.current_epoch, self.step) == self.chain.stop(self.job, self.first) and not ends:
            Path(self.folder, str(self.job)).write_text(str(self.current_epoch))
            self.trainer.save_checkpoint(f"{self.folder}/{self.job}.ckpt")
        self.step += 1


def trainer_of(chain: Chain, job: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator=lightning_accelerator(),
        devices=chain.worlds[job],
        strategy=DDPJoinStrategy(**chain.options, rebalance=chain.rebalances[job]),
        max_epochs=EPOCHS,
        use_distributed_sampler=chain.kind == "injected",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(rank: int, chain: Chain, job: int, folder: str, resumes: bool) -> Any:
    first = int(Path(folder, str(job - 1)).read_text()) if resumes else 0
    module = Module(chain, job, folder, first)
    trainer_of(chain, job).fit(module, ckpt_path=f"{folder}/{job - 1}.ckpt" if resumes else None, **ANY_CHECKPOINT)
    return module.seen, [p.detach().clone() for p in module.net.parameters()]


CHAINS = {
    "what Lightning deals out": Chain(
        (3, 2, 4), (2, 1), 61, "injected", options={"weighting": "samples"}, later=(1, 0)
    ),
    "in order, in the tail": Chain((2, 3), (5,), 23, "injected", shuffle=False),
    "unequal shares": Chain((2, 3, 3), (4, 0), 41, "shares"),
    "drawn": Chain((4, 3, 3), (1, 0), 50, "drawn", later=(1, 0)),
    "with a state": Chain((3, 2, 4), (2, 1), 53, "stateful", later=(1, 0)),
    "whole batches": Chain((3, 2, 2), (0, 0), 31, "buckets"),
    "rebalanced": Chain((3, 2, 3), (6, 1), 50, "shares", rebalances=(True, True, True)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_each_sample_is_trained_on_once(workers: Workers, name: str, tmp_path: Path) -> None:
    check(workers, CHAINS[name], tmp_path, train)


class SavesAtOnce(Module):
    def on_train_start(self) -> None:
        self.trainer.save_checkpoint(f"{self.folder}/{self.job}.ckpt")
        Path(self.folder, str(self.job)).write_text("0")


def save_at_once(rank: int, chain: Chain, folder: str) -> None:
    """Go on with another number of ranks, and save before the first step."""
    module = SavesAtOnce(replace(chain, stops=()), 1, folder, 0)
    trainer_of(chain, 1).fit(module, ckpt_path=f"{folder}/0.ckpt", **ANY_CHECKPOINT)


def test_a_checkpoint_from_before_the_resumed_epoch_has_begun(workers: Workers, tmp_path: Path) -> None:
    chain = Chain((4, 2, 3), (1, 0), 47)
    seen = workers.run(4, train, chain, 0, str(tmp_path), False)
    workers.run(2, save_at_once, chain, str(tmp_path))
    after = workers.run(3, train, chain, 2, str(tmp_path), True)
    first = [
        number for mine, _ in seen for epoch, step, numbers in mine if (epoch, step) <= (0, 1) for number in numbers
    ]
    rest = [number for mine, _ in after for epoch, _, numbers in mine if epoch == 0 for number in numbers]
    assert sorted(first + rest) == [*range(47)]


@seeds(range(0), 100)
def test_any_chain_of_jobs(workers: Workers, seed: int, tmp_path: Path) -> None:
    kinds = (
        ("injected", "unpadded", "shares", "drawn") if seed % 3 == 0 else ("stateful", "injected", "shares", "drawn")
    )
    check(workers, drawn(seed, kinds, fewest=2, rebalances=[seed % 3 == 0] * 3), tmp_path, train)
