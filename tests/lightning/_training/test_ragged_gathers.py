"""`self.all_gather` where no sample is repeated to make the ranks' shares equal."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.covering import others_long
from tests.support.front_ends.lightning import Fit, build_trainer
from tests.support.inside import asked_shapes
from tests.support.workers import Workers

FUNCTIONS = {
    "test_step": "test",
    "on_test_epoch_end": "test",
    "predict_step": "predict",
    "on_predict_epoch_end": "predict",
    "on_validation_end": "validate",
}


class Gathers(pl.LightningModule):
    """Gathers in one of its hooks: the step's batch, or all that the rank has had in the epoch."""

    def __init__(self, where: str, rows: bool) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.where, self.rows = where, rows
        self.had: dict[str, list[Tensor]] = {}
        self.gathered: list[list[float]] = []
        self.asked = 0

    def at(self, where: str, batch: Tensor | None = None) -> None:
        stage = where.removeprefix("on_").split("_")[0]
        stage = {"training": "train", "fit": "train"}.get(stage, stage)
        if batch is not None and where.endswith("_step"):
            self.had.setdefault(stage, []).append(batch)
        if where != self.where:
            return
        mine = torch.cat(self.had[stage]) if batch is None else batch
        strategy: Any = self.trainer.strategy
        with asked_shapes(strategy) as asked:
            found = strategy.gather_rows(mine) if self.rows else self.all_gather(mine)
        self.asked += len(asked)
        self.gathered.append(found.flatten().tolist())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.at("training_step", batch)
        return self.net(batch[:, None]).pow(2).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.at("validation_step", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.at("test_step", batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> None:
        self.at("predict_step", batch)

    def on_train_batch_end(self, _: Any, batch: Tensor, batch_idx: int) -> None:
        self.at("on_train_batch_end", batch)

    def on_validation_batch_end(self, _: Any, batch: Tensor, batch_idx: int) -> None:
        self.at("on_validation_batch_end", batch)

    def on_train_epoch_end(self) -> None:
        self.at("on_train_epoch_end")

    def on_validation_epoch_end(self) -> None:
        self.at("on_validation_epoch_end")

    def on_validation_end(self) -> None:
        self.at("on_validation_end")

    def on_test_epoch_end(self) -> None:
        self.at("on_test_epoch_end")

    def on_predict_epoch_end(self) -> None:
        self.at("on_predict_epoch_end")

    def on_fit_end(self) -> None:
        self.at("on_fit_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gather(rank: int, where: str, samples: int, rows: bool, batch_size: int = 2) -> tuple[list[list[float]], int]:
    module = Gathers(where, rows)
    trainer = build_trainer(
        Fit((1,) * dist.get_world_size(), epochs=1), use_distributed_sampler=True, num_sanity_val_steps=0
    )
    data: Any = torch.arange(1.0, samples + 1)
    loader = DataLoader(data, batch_size=batch_size)
    function = FUNCTIONS.get(where, "fit")
    loaders = [loader, loader] if function == "fit" else [loader]
    getattr(trainer, function)(module, *loaders)
    return module.gathered, module.asked


HOOKS = [
    *("training_step", "on_train_batch_end", "on_train_epoch_end", "on_fit_end"),
    *("validation_step", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
    *("test_step", "on_test_epoch_end", "predict_step", "on_predict_epoch_end"),
]


# With seven samples the second batch of rank 1 is one short.
@pytest.mark.parametrize("where", others_long(HOOKS, *HOOKS[::3]))
def test_tensors_of_different_shapes_raise_on_all_ranks(workers: Workers, where: str) -> None:
    in_steps = where.endswith(("_step", "batch_end"))
    said = "(2,) on rank 0, (1,) on rank 1" if in_steps else "(4,) on rank 0, (3,) on rank 1"
    for outcome in workers.outcomes(2, gather, where, 7, False):
        assert f"the shapes differ between ranks: {said}" in outcome.error, outcome.trace
        assert "gather_rows" in outcome.error


@pytest.mark.parametrize("where", HOOKS)
def test_rows_of_all_ranks(workers: Workers, where: str) -> None:
    in_steps = where.endswith(("_step", "batch_end"))
    (first, _), (second, _) = workers.run(2, gather, where, 7, True)
    assert first == second
    assert [len(rows) for rows in first] == ([4, 3] if in_steps else [7])
    assert sorted(row for rows in first for row in rows) == [*range(1, 8)]  # Lightning shuffles in training


def test_rows_in_the_tail_are_those_of_the_ranks_that_have_a_batch(workers: Workers) -> None:
    (first, _), (second, _), _ = workers.run(3, gather, "training_step", 8, True, 1)
    assert first == second
    assert [len(rows) for rows in first] == [3, 3, 2]
    assert sorted(row for rows in first for row in rows) == [*range(1, 9)]


@pytest.mark.parametrize("where", others_long(HOOKS, *HOOKS[1::3]))
def test_shapes_are_exchanged_only_where_they_may_differ(workers: Workers, where: str) -> None:
    """In a step of batches that are all full, nothing is said that was not said before."""
    in_steps = where.endswith(("_step", "batch_end")) and not where.startswith("predict")
    for gathered, asked in workers.run(2, gather, where, 8, False):
        assert asked == (0 if in_steps else len(gathered))
        assert len(gathered[0]) == (4 if where.endswith(("_step", "batch_end")) else 8)
