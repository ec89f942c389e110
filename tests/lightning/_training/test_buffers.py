"""Buffers that the forward uses, amid an accumulation in which rank 0 has joined."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy
from tests.emulator.frameworks import lightning_accelerator
from tests.support.workers import Workers

LENGTHS = (0, 4, 4)
WINDOW = 2


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + step))


class Shifted(pl.LightningModule):
    """Adds a moving mean of its inputs."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(1, 1).double()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def training_step(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.mean())
        return self.linear(x + self.mean.clone()).square().mean()  # type: ignore[no-any-return]

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        return DataLoader([batch(rank, step) for step in range(LENGTHS[rank])], batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Growing(Shifted):
    """Multiplies by a cache that is as long as the longest batch so far, and is made anew for it."""

    def training_step(self, x: Tensor) -> Tensor:
        length = 1 + int(x.shape[0])
        if self.mean.ndim == 0 or len(self.mean) < length:
            self.register_buffer("mean", torch.arange(length) / 4.0, persistent=False)
        return (self.linear(x) * self.mean[:-1, None][: len(x)]).square().mean()  # type: ignore[no-any-return]

    def train_dataloader(self) -> Any:
        lengths = (1, 4, 2) if self.trainer.current_epoch else (4, 1, 0)
        steps = range(lengths[self.trainer.global_rank])
        x = torch.ones(9, 1, dtype=torch.float64)
        return DataLoader([x[: 1 + step + self.trainer.current_epoch] for step in steps], batch_size=None)  # type: ignore[arg-type]


def fitted(model: Shifted, epochs: int) -> Shifted:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        strategy=DDPJoinStrategy(),
        accelerator=lightning_accelerator(),
        devices=len(LENGTHS),
        max_epochs=epochs,
        reload_dataloaders_every_n_epochs=1,
        accumulate_grad_batches=WINDOW,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(model)
    return model


def fit(rank: int) -> list[float]:
    return [p.item() for p in fitted(Shifted(), 1).parameters()]


def grow(rank: int) -> Any:
    model = fitted(Growing(), 2)
    return [p.item() for p in model.parameters()], model.mean.tolist(), "mean" in model.state_dict()


def test_a_buffer_that_grows_is_as_long_on_a_rank_that_has_joined(workers: Workers) -> None:
    found = workers.run(len(LENGTHS), grow)
    assert [cache for _, cache, _ in found] == [[step / 4 for step in range(6)]] * len(LENGTHS)
    assert found == found[:1] * len(LENGTHS)
    assert not found[0][2]


def test_each_rank_keeps_its_own_until_the_next_sync(workers: Workers) -> None:
    model = Shifted()
    optimizer = model.configure_optimizers()
    newest = torch.zeros((), dtype=torch.float64)
    for begin in range(0, max(LENGTHS), WINDOW):
        ends = []
        for rank in (1, 2):
            model.mean.copy_(newest)
            for step in range(begin, begin + WINDOW):
                (model.training_step(batch(rank, step)) / WINDOW / len(LENGTHS)).backward()
            ends.append(model.mean.clone())
        newest = ends[0]
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.tensor([p.item() for p in model.parameters()], dtype=torch.float64)
    for found in workers.run(len(LENGTHS), fit):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-10)
