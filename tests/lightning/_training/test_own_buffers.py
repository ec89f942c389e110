"""Buffers that a module keeps alike itself, where nobody broadcasts them: new on ranks without a batch as well."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy, ModelParallelJoinStrategy
from tests.emulator.frameworks import lightning_accelerator
from tests.support.workers import Workers

EPOCHS = ((1, 4, 2), (2, 2, 3), (3, 1, 1))
EMPTY = ((0, 3, 2), (2, 2, 2), (3, 1, 1))
ALONE = ((0, 0, 3), (2, 2, 2))  # one rank alone has trained: nobody can tell


def batch(epoch: int, rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * epoch + 100 * rank + step)).double()


class Codes(pl.LightningModule):
    """Subtracts a moving average over all ranks' outputs, kept alike by a collective in its step."""

    centre: Tensor

    def __init__(self, epochs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.epochs = epochs
        self.body = nn.Linear(4, 4).double()
        self.register_buffer("centre", torch.zeros(4).double())
        self.norm = nn.BatchNorm1d(4, affine=False).double()
        self.statistics: list[Any] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelJoinStrategy):
            from torch.distributed.fsdp import fully_shard  # it takes long to import

            fully_shard(self.body, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, x: Tensor) -> Tensor:
        z = self.body(x)
        self.norm(x)
        before = self.centre.clone()
        total = z.detach().sum(0)
        dist.all_reduce(total)
        self.centre.mul_(0.9).add_(total, alpha=0.1)
        return (z - before).square().mean()  # type: ignore[no-any-return]

    def on_train_epoch_end(self) -> None:
        self.statistics.append(self.norm.running_mean.tolist())  # type: ignore[union-attr, operator]

    def train_dataloader(self) -> Any:
        epoch, rank = self.trainer.current_epoch, self.trainer.global_rank
        steps = range(self.epochs[epoch][rank])
        return DataLoader([batch(epoch, rank, step) for step in steps], batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def alone(epochs: Any) -> tuple[Tensor, Tensor]:
    body = Codes(epochs).body
    centre = torch.zeros(4).double()
    optimizer = torch.optim.SGD(body.parameters(), 0.1)
    for epoch, lengths in enumerate(epochs):
        for step in range(max(lengths)):
            there = [body(batch(epoch, rank, step)) for rank, length in enumerate(lengths) if step < length]
            optimizer.zero_grad()
            sum((z - centre).square().mean() / len(lengths) for z in there).backward()  # type: ignore[union-attr]
            centre = 0.9 * centre + 0.1 * torch.stack([z.detach().sum(0) for z in there]).sum(0)
            optimizer.step()
    return body.weight.detach(), centre


def fit(rank: int, kind: str, epochs: Any, options: dict[str, Any]) -> Any:
    model = Codes(epochs)
    ddp = kind == "ddp"
    strategy: Any = (
        DDPJoinStrategy(broadcast_buffers=False, **options) if ddp else ModelParallelJoinStrategy(3, 1, **options)
    )
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator=lightning_accelerator(),
            devices=len(epochs[0]),
            max_epochs=len(epochs),
            reload_dataloaders_every_n_epochs=1,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            **quiet,
        )
        trainer.fit(model)
    texts = [str(one.message) for one in said if "the ranks differ" in str(one.message)]
    weight: Any = model.body.weight.detach()
    return weight if ddp else weight.full_tensor(), model.centre, model.statistics, texts


@pytest.mark.parametrize(("kind", "epochs"), [("ddp", EPOCHS), ("ddp", EMPTY), ("sharded", EPOCHS)])
def test_what_the_module_keeps_alike(workers: Workers, kind: str, epochs: Any) -> None:
    expected = alone(epochs)
    found = workers.run(3, fit, kind, epochs, {})
    for weight, centre, _, said in found:
        assert (weight - expected[0]).abs().max() < 1e-10
        assert (centre - expected[1]).abs().max() < 1e-10
        assert said == []
    assert found[0][2][0] != found[1][2][0]  # a norm's statistics stay each rank's own


def test_what_nobody_can_tell_is_named_and_may_be_said(workers: Workers) -> None:
    (*_, said), (*_, nothing), _ = workers.run(3, fit, "ddp", ALONE, {})
    assert nothing == []
    assert len(said) == 1
    assert "centre" in said[0]
    assert "norm" not in said[0]
    assert "hand_over_buffers=True" in said[0]
    expected = alone(ALONE)
    for weight, centre, _, said in workers.run(3, fit, "ddp", ALONE, {"hand_over_buffers": True}):
        assert (weight - expected[0]).abs().max() < 1e-10
        assert (centre - expected[1]).abs().max() < 1e-10
        assert said == []
    assert [said for *_, said in workers.run(3, fit, "ddp", ALONE, {"hand_over_buffers": False})] == [[]] * 3
