"""A finished rank runs `training_step` itself: experts are those of one process, and what is logged is of batches."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from lightning_join import DDPJoinStrategy, ModelParallelJoinStrategy
from tests.support import experts
from tests.support.experts import Case
from tests.support.workers import WorkerError, Workers


class Log(Logger):
    """Keeps what is logged."""

    name = version = "log"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []
        self.epochs: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.steps += [metrics["mean_step"]] if "mean_step" in metrics else []
        self.epochs += [metrics] if "mean_epoch" in metrics else []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Module(pl.LightningModule):
    """Experts over all ranks; logs of each batch how many rows it has."""

    def __init__(self, case: Case, manual: bool) -> None:
        super().__init__()
        self.case, self.automatic_optimization = case, not manual
        self.rows = MeanMetric()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            rank = dist.get_rank()
            self.net = experts.make(dist.group.WORLD, rank)
            if self.case.wrap == "fsdp":
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"], ignored_params={self.net.experts.weight})
            else:
                ignored = ["net.experts.weight"]
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ignored)

    def training_step(self, batch: experts.Batch, index: int) -> Tensor | None:
        x, y = batch
        value = torch.tensor(float(len(x)))
        self.log("mean", value, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        self.log("most", value, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.rows.update(value)
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        loss = experts.loss_of(self.case, self.net(x), y, self.net)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.on_after_backward_of_own()
        optimizer.step()
        return None

    def on_after_backward_of_own(self) -> None:
        self.net.experts.weight.grad /= self.trainer.world_size  # type: ignore[operator]

    def on_after_backward(self) -> None:
        if self.automatic_optimization:
            self.on_after_backward_of_own()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return experts.make_optimizer(self.net.parameters())


def fit(rank: int, case: Case, manual: bool) -> tuple[int, list[Tensor], list[float], dict[str, float], list[int]]:
    log, hooks = Log(), list[int]()

    class Noting(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            hooks.append(index)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=len(case.lengths),
        strategy=STRATEGIES[case.wrap](weighting=case.weighting, placeholder=case.placeholder),
        max_epochs=1,
        logger=log,
        log_every_n_steps=1,
        callbacks=[Noting()],
        accumulate_grad_batches=1 if manual else case.window,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, data = Module(case, manual), DataLoader(case.batches(rank), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, data)
    epoch = log.epochs[0] if rank == 0 else {}
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.net.parameters()]
    return rank, [p.detach().clone() for p in parameters], log.steps, epoch, hooks


STRATEGIES: dict[str, Any] = {"ddp": DDPJoinStrategy, "fsdp": partial(ModelParallelJoinStrategy, 2, 1)}
CASES = {
    "fully_shard": (Case((3, 1), "fsdp", weighting="samples"), False),
    "rows": (Case((1, 4), placeholder="rows", weighting="active"), False),
    "last": (Case((0, 2, 5, 3), weighting="samples", ranks_per_model=4), False),
    "manual": (Case((1, 3), weighting="active"), True),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_are_those_of_one_process(workers: Workers, name: str) -> None:
    case, manual = CASES[name]
    ranks = workers.run(len(case.lengths), fit, case, manual, deadline=60.0)
    experts.check(case, [each[:2] for each in ranks])
    rows = [[len(case.batch(r, s)[0]) for r, n in enumerate(case.lengths) if s < n] for s in range(max(case.lengths))]
    everything = [count for step in rows for count in step]
    _, _, steps, epoch, _ = ranks[0]
    assert steps == pytest.approx([sum(step) / len(step) for step in rows])
    assert epoch["mean_epoch"] == pytest.approx(sum(everything) / len(everything))
    assert epoch["most"] == max(everything)
    assert epoch["rows"] == pytest.approx(sum(everything) / len(everything))
    assert all(each[4] == [*range(max(case.lengths))] for each in ranks)


class Evaluated(Module):
    """Logs what it evaluates; a prediction is of a batch's rows."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, False)
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


class Endless(IterableDataset[Any]):
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


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
    data = Endless(batches) if streams else batches
    module, own = Evaluated(case), DataLoader(data, batch_size=None)
    loaders = [own, DataLoader([batches[-1]] * rank, batch_size=None)] if several else own
    if fits:
        trainer.fit(module, own, loaders)
        found = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    else:
        (found, *_) = trainer.validate(module, loaders, verbose=False)
    predicted = trainer.predict(module, own)
    assert predicted is not None
    return rank, found, module.gathered, predicted, [p.detach().clone() for p in module.net.parameters()]


@pytest.mark.parametrize(
    ("case", "streams", "several", "fits"),
    [
        (Case((0, 4)), True, False, False),
        (Case((1, 3), placeholder="rows", balance=False), False, True, False),
        (Case((3, 1, 0, 2), ranks_per_model=4), False, False, True),
    ],
)
def test_an_evaluation_is_of_all_batches(
    workers: Workers, case: Case, streams: bool, several: bool, fits: bool
) -> None:
    ranks = workers.run(len(case.lengths), evaluate, case, streams, several, fits, deadline=60.0)
    net = experts.reference(case) if fits else experts.make()
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
    trainer.fit(Nothing(case, False).double(), DataLoader(case.batches(rank), batch_size=None))  # type: ignore[arg-type]


def test_a_step_without_a_loss_is_refused(workers: Workers) -> None:
    with pytest.raises(WorkerError, match="training_step returned None, but with placeholder="):
        workers.run(2, fit_none, deadline=60.0)
