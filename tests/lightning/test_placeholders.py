"""A finished rank runs `training_step` itself: experts are those of one process, and what is logged is of batches."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_join import DDPJoinStrategy
from tests.support import experts
from tests.support.experts import Case
from tests.support.front_ends.experts import batches_of
from tests.support.front_ends.experts_lightning import Module
from tests.support.workers import WorkerError, Workers


class Evaluated(Module):
    """Logs what it evaluates; a prediction is of a batch's rows."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.val_rows, self.gathered = MeanMetric(), list[list[int]]()

    def validation_step(self, batch: experts.Batch, index: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val_mean", torch.tensor(float(len(x))), batch_size=1, sync_dist=True)
        loss = experts.loss_of(self.case, self.net(x), y, self.net)
        self.log("val_loss", loss, batch_size=len(x), sync_dist=True)
        self.val_rows.update(float(len(x)))
        self.log("val_rows", self.val_rows)
        gathered = self.all_gather(torch.tensor(len(x)))
        if not self.trainer.strategy.joined:  # type: ignore[attr-defined]
            self.gathered.append(gathered.flatten().tolist())

    def predict_step(self, batch: experts.Batch, index: int) -> Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]


def evaluate(rank: int, case: Case, streams: bool, several: bool, fits: bool) -> tuple[Any, ...]:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=len(case.lengths),
        strategy=DDPJoinStrategy(weighting=case.weighting, placeholder=case.placeholder),  # type: ignore[arg-type]
        max_epochs=1,
        logger=False,
        num_sanity_val_steps=2,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches: Any = case.batches(rank)
    module, own = Evaluated(case), DataLoader(batches_of(case, rank, streams), batch_size=None)
    loaders = [own, DataLoader([batches[-1]] * rank, batch_size=None)] if several else own
    if fits:
        trainer.fit(module, own, loaders)
        found = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    else:
        (found, *_) = trainer.validate(module, loaders, verbose=False)
    predicted = trainer.predict(module, own)
    assert predicted is not None
    return module.part.place, found, module.gathered, predicted, module.part.parameters


@pytest.mark.parametrize(
    ("case", "streams", "several", "fits"),
    [
        (Case((0, 4)), True, False, False),
        (Case((1, 3), placeholder="rows", balance=""), False, True, False),
        (Case((3, 1, 0, 2), ranks_per_model=4), False, False, True),
    ],
)
def test_an_evaluation_is_of_all_batches(
    workers: Workers, case: Case, streams: bool, several: bool, fits: bool
) -> None:
    ranks = workers.run(len(case.lengths), evaluate, case, streams, several, fits, deadline=60.0)
    net = experts.alone(case) if fits else experts.make(case)
    if fits:
        experts.check(case, [(rank, parameters) for rank, *_, parameters in ranks])
    steps = [[case.batch(r, s) for r, n in enumerate(case.lengths) if s < n] for s in range(max(case.lengths))]
    batches = [batch for step in steps for batch in step]
    with torch.no_grad():
        losses = [experts.loss_of(case, net(x), y, net).item() * len(x) for x, y in batches]
        outputs = {rank: [net(x) for x, _ in case.batches(rank)] for rank in range(len(case.lengths))}
    counts = [len(x) for x, _ in batches]
    for rank, found, gathered, predicted, _ in ranks:
        suffix = "/dataloader_idx_0" if several else ""
        assert found[f"val_mean{suffix}"] == pytest.approx(sum(counts) / len(counts))
        assert found[f"val_loss{suffix}"] == pytest.approx(sum(losses) / sum(counts))
        if not several:
            assert found["val_rows"] == pytest.approx(sum(counts) / len(counts))
            told = gathered[-case.lengths[rank] :] if case.lengths[rank] else []
            assert told == [[len(x) for x, _ in step] for step in steps[: case.lengths[rank]]]
        assert len(predicted) == case.lengths[rank]
        for mine, expected in zip(predicted, outputs[rank], strict=True):
            assert (mine - expected).abs().max() < 1e-10


def fit_none(rank: int) -> None:
    class Nothing(Module):
        def training_step(self, batch: experts.Batch, index: int) -> Tensor | None:
            loss = super().training_step(batch, index)
            return None if (index, self.global_rank) == (1, 1) else loss

    case = Case((1, 3))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPJoinStrategy(placeholder="last"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Nothing(case).double(), DataLoader(case.batches(rank), batch_size=None))  # type: ignore[arg-type]


def test_a_step_without_a_loss_is_refused(workers: Workers) -> None:
    with pytest.raises(WorkerError, match="training_step returned None, but with placeholder="):
        workers.run(2, fit_none, deadline=60.0)
