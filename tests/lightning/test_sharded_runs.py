"""Sharded models: logging, evaluation, callbacks, and a trainer's plain strategy under a JoinCallback."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_join import JoinCallback, JoinMonitor
from tests.support import sharded_fits as sharded
from tests.support.front_ends.lightning import Fit, Result, assert_exact
from tests.support.run import Batch, Net, loss_of, reference
from tests.support.sharded_fits import KINDS, ShardedModule, build_sharded, build_strategy, on_cpus
from tests.support.workers import Workers


class Logs(ShardedModule):
    """Validates, tests and predicts on as many batches as another rank trains on."""

    def batches(self) -> list[Batch]:
        rank = self.trainer.global_rank
        return [self.case.batch(rank, 9, index) for index in range(self.case.lengths_in(0)[-1 - rank])]

    def val_dataloader(self) -> Any:
        return DataLoader(self.batches(), batch_size=None)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = loss_of(self.net, batch)  # another way through the model than a fit's first step, where it turns
        self.log("val", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test", loss_of(self.net, batch), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        out: Tensor = self.net(batch[0])
        return out


class Counts(Callback):
    def __init__(self) -> None:
        self.steps, self.joined = 0, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps += 1
        self.joined += trainer.strategy.joined

    def on_validation_epoch_end(self, trainer: Any, *_: Any) -> None:
        # Whole parameters, in a hook, which all ranks run.
        self.whole = sharded.whole(trainer, trainer.lightning_module)


@dataclass
class Seen:
    """What a run has shown on one rank."""

    result: Result
    steps: tuple[int, int]
    whole: dict[str, Tensor]
    test: float
    predictions: list[Tensor]


def plain_strategy(kind: str, case: Fit) -> Any:
    """Return a strategy as a user gives it, and that Lightning does not refuse for want of a GPU."""
    strategy = build_strategy(kind, case)
    strategy.__class__ = type("Plain", (FSDPStrategy if kind == "fsdp" else ModelParallelStrategy,), {})
    for name in ("options", "joinables", "start_method"):
        vars(strategy).pop(name, None)
    return strategy


def run(rank: int, kind: str, case: Fit, folder: str, with_callback: bool) -> Seen:
    counts = Counts()
    callbacks: list[Any] = [counts, JoinMonitor(), LearningRateMonitor()]
    callbacks += [JoinCallback(weighting=case.weighting)] if with_callback else []
    strategy = plain_strategy(kind, case) if with_callback else None
    logger = CSVLogger(folder, name="", version="")
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "num_sanity_val_steps": 1}
    with on_cpus():
        module = Logs(case)
        trainer = build_sharded(kind, case, strategy=strategy, callbacks=callbacks, **options)
        if with_callback:
            trainer.strategy.__class__ = plain = type(strategy).__mro__[1]
        before = sorted(vars(trainer.strategy))
        trainer.fit(module)
        if with_callback:
            assert type(trainer.strategy) is plain
            assert sorted(vars(trainer.strategy)) == before
        result = sharded.result_of(trainer, module)
        trainer.test(module, verbose=False)
        test = float(trainer.callback_metrics["test"])
        predictions = trainer.predict(module) or []
        return Seen(result, (counts.steps, counts.joined), counts.whole, test, predictions)


def mean_loss(net: Net, rows: list[list[Batch]]) -> float:
    losses = [(float(loss_of(net, batch)), len(batch[0])) for mine in rows for batch in mine]
    return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)


CASES = {
    "first": Fit((2, 5), scheduler="step", weighting="samples", ragged=True),
    "empty": Fit((4, 2, 0), model="turns", optimizer="adamw"),
    "empty-first": Fit((0, 3), epochs=2),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("with_callback", [False, True], ids=["strategy", "callback"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run(workers: Workers, kind: str, name: str, with_callback: bool, tmp_path: Path) -> None:
    if with_callback and name != "first":
        pytest.skip("one case is enough")
    case = CASES[name]
    seen = workers.run(case.world_size, run, kind, case, str(tmp_path), with_callback, deadline=180)
    assert_exact(case, [each.result for each in seen])
    expected = reference(case)
    everyone = range(case.world_size)
    with torch.no_grad():
        rows = [[case.batch(r, 9, i) for i in range(case.lengths_in(0)[-1 - r])] for r in everyone]
        loss = mean_loss(expected.net, rows)
        for rank, each in enumerate(seen):
            assert abs(each.test - loss) < 1e-6
            assert abs(float(each.result.metrics["val_epoch"]) - loss) < 1e-6
            steps = sum(case.length(epoch) for epoch in range(case.epochs))
            assert each.steps == (steps, steps - case.epochs * case.lengths_in(0)[rank])
            for key, value in expected.net.state_dict().items():
                assert (each.whole[key] - value).abs().max() < 1e-10
            assert len(each.predictions) == len(rows[rank])
            for ours, (x, _) in zip(each.predictions, rows[rank], strict=True):
                assert (ours - expected.net(x)).abs().max() < 1e-10
    assert len({float(each.result.metrics["loss_epoch"]) for each in seen}) == 1
    logged = (tmp_path / "metrics.csv").read_text().splitlines()
    column = logged[0].split(",").index("loss_step")
    assert len([line for line in logged[1:] if line.split(",")[column]]) == seen[0].steps[0]


class HooksOfBackward(ShardedModule):
    """What all ranks do together right before and after each backward."""

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.seen: list[float] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.together("before")

    def on_after_backward(self) -> None:
        self.together("after")
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen.append(sum(float(g.full_tensor().sum()) for g in gradients if isinstance(g, DTensor)))

    def together(self, key: str) -> None:
        value = torch.tensor(float(self.trainer.global_rank))
        self.log(key, value, sync_dist=True, on_step=True)
        self.seen += [float(self.trainer.strategy.reduce(value)), float(self.all_gather(value).sum())]


def hooks_of_backward(rank: int, kind: str, case: Fit) -> tuple[Result, list[float]]:
    with on_cpus():
        module = HooksOfBackward(case)
        trainer = build_sharded(kind, case)
        trainer.fit(module)
        return sharded.result_of(trainer, module), module.seen


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_a_backward_may_talk(workers: Workers, kind: str) -> None:
    case = Fit((2, 5), epochs=2)
    (first, seen), (second, others) = workers.run(2, hooks_of_backward, kind, case, deadline=180)
    assert_exact(case, [first, second])
    assert seen == others
    assert len(seen) == 10 * 5
    assert seen[0::5] == seen[2::5] == [0.5] * 10
