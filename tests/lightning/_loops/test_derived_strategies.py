"""Strategies that are derived from ours, and do more with dataloaders and batches than it does."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy
from tests.support.front_ends.lightning import Fit, Module, Result, assert_exact, build_trainer, result_of
from tests.support.run import Batch
from tests.support.workers import Workers


class Around:
    """Reads another dataloader."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Derived(DDPJoinStrategy):
    """Asks for a length before all dataloaders are there; what it does to a batch is wrong if it is done twice."""

    def process_dataloader(self, dataloader: object) -> Around:
        loader = Around(super().process_dataloader(dataloader))
        self.lightning_module.noted.append(len(loader))  # type: ignore[union-attr]
        return loader

    def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().batch_to_device(*args, **kwargs)
        assert isinstance(batch, (list, tuple))
        return {"batch": batch}


class Validated(Module):
    def val_dataloader(self) -> list[DataLoader[Batch]]:
        return [self.train_dataloader(), self.train_dataloader()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["batch"], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.noted.append((dataloader_idx, batch_idx, *batch))


def fit_derived(rank: int, case: Fit) -> Result:
    module = Validated(case)
    trainer = build_trainer(case, strategy=Derived(), num_sanity_val_steps=0)
    trainer.fit(module)
    assert "batch_to_device" not in vars(trainer.strategy)
    return result_of(trainer, module)


@pytest.mark.parametrize("lengths", [(2, 5), (3, 0)])
def test_a_derived_strategy_gets_this_ranks_dataloaders_and_batches(workers: Workers, lengths: Any) -> None:
    case = Fit(lengths, epochs=2)
    results = workers.run(2, fit_derived, case)
    assert_exact(case, results)
    for length, result in zip(lengths, results, strict=True):
        validation = [(place, batch, "batch") for place in range(2) for batch in range(length)]
        assert result.noted == [length] * 3 + validation * 2
