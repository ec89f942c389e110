"""A `Run` by Lightning's Trainer."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

import lightning_join
from tests.emulator.frameworks import lightning_accelerator
from tests.needs import known
from tests.support.batches import Batches, Stream
from tests.support.run import (
    TOLERANCE,
    Batch,
    Run,
    difference,
    flatten,
    reference,
    same_bits,
    whole_state,
)

# Where Lightning has no such argument it reads any file.
ANY_CHECKPOINT = known(pl.Trainer.fit, weights_only=False)


@dataclass(frozen=True)
class Fit(Run):
    """A run, and what only Lightning does; `scheduler` may be "onecycle-setup", for the steps that `setup` sees."""

    reload: int = 0

    def said(self, lengths: list[int]) -> list[int | None] | None:
        # Of a stream with one batch or none Lightning knows it: it reads one ahead.
        said = super().said(lengths)
        return said and [one if length > 1 else length for one, length in zip(said, lengths, strict=True)]


class EpochSampler(Sampler[tuple[int, int]]):
    """Its length may change with the epoch."""

    def __init__(self, case: Fit, rank: int) -> None:
        self.case, self.rank, self.epoch = case, rank, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.case.lengths_in(min(self.epoch, self.case.epochs - 1))[self.rank]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(self.epoch, index) for index in range(len(self))])


class Module(pl.LightningModule):
    """Trains a `Fit` and notes what happens."""

    noted: Any  # what else a test wants to know of its rank

    def __init__(self, case: Fit) -> None:
        super().__init__()
        self.case = case
        self.net = case.build()
        self.trained: list[tuple[int, int]] = []
        self.noted = []
        self.steps_seen_in_setup: float | None = None

    def setup(self, stage: str) -> None:
        if self.case.scheduler == "onecycle-setup":
            self.steps_seen_in_setup = self.trainer.estimated_stepping_batches

    def train_dataloader(self) -> DataLoader[Batch]:
        rank = self.trainer.global_rank
        if self.case.iterable:
            return DataLoader(Stream(Batches(self.case, rank), lambda: self.trainer.current_epoch), batch_size=None)
        return DataLoader(Batches(self.case, rank), batch_size=None, sampler=EpochSampler(self.case, rank))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.trained.append((self.trainer.current_epoch, batch_idx))
        return self.loss_of(batch, batch_idx)

    @property
    def data_rank(self) -> int:
        """This rank's among those that have batches of their own."""
        return self.trainer.global_rank // getattr(self.case, "peers", 1)

    def loss_of(self, batch: Batch, batch_idx: int) -> Tensor:
        (loss,) = self.case.losses(self.net, batch, self.data_rank, self.trainer.current_epoch, batch_idx)
        return loss  # type: ignore[no-any-return]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none="zeros" not in self.case.clear)

    def configure_optimizers(self) -> Any:
        (optimizer,) = self.case.optimizers(self.whole, sharded=True)
        steps = self.steps_seen_in_setup
        if steps is None and self.case.scheduler == "onecycle":
            steps = self.trainer.estimated_stepping_batches
        scheduler = self.case.make_scheduler(optimizer, steps=steps or 0)
        if scheduler is None:
            return optimizer
        interval = "epoch" if self.case.scheduler == "epoch" else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    @property
    def whole(self) -> Any:
        """What has the parameters that are trained."""
        return self.net


@dataclass
class Result:
    """What one rank holds after training."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    optimizer: Any
    lr: float
    trained: list[tuple[int, int]]
    global_step: int
    epoch: int
    batches: float
    metrics: dict[str, Tensor]
    noted: Any
    warned: str = ""


def build_trainer(case: Run, **overrides: Any) -> pl.Trainer:
    strategy = overrides.pop("strategy", None) or lightning_join.DDPJoinStrategy(
        weighting=case.option, rebalance=case.rebalance, placeholder=case.placeholder, **case.ddp
    )
    options = {
        "accelerator": lightning_accelerator(),
        "devices": case.world_size * getattr(case, "peers", 1),
        "strategy": strategy,
        "max_epochs": case.epochs,
        "max_steps": case.max_steps,
        "accumulate_grad_batches": case.accumulate,
        "gradient_clip_val": case.clip or None,
        "gradient_clip_algorithm": case.clip_by if case.clip else None,
        "reload_dataloaders_every_n_epochs": getattr(case, "reload", 0),
        "limit_train_batches": case.stops or case.limit,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**options, **overrides})


def result_of(trainer: pl.Trainer, module: Module) -> Result:
    return Result(
        parameters=[p.detach().clone() for p in module.net.parameters()],
        buffers=[b.detach().clone() for b in module.net.buffers()],
        optimizer=whole_state(trainer.global_rank, trainer.optimizers[0]),
        **progress_of(trainer, module),
    )


def progress_of(trainer: pl.Trainer, module: Module) -> dict[str, Any]:
    """The part of a result that no rank holds a share of only."""
    return {
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "trained": module.trained,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.num_training_batches,
        "metrics": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "noted": module.noted,
    }


def fit(
    rank: int,
    case: Fit,
    make: Callable[[Fit], Module] = Module,
    given: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
) -> Result:
    """Fit a module with some attributes, by a trainer with some options, perhaps from a checkpoint's path on."""
    module = make(case)
    for name, value in (given or {}).items():
        setattr(module, name, value)
    trainer = build_trainer(case, **(options or {}))
    model: Any = torch.compile(module, backend="eager") if case.compiled else module
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, ckpt_path=path, **ANY_CHECKPOINT)
    return replace(result_of(trainer, module), warned="\n".join(str(one.message) for one in caught))


# ---------------------------------------------------------------- comparing


def assert_same_bits(results: Sequence[Result]) -> None:
    first = results[0]
    for other in results[1:]:
        assert same_bits(first.parameters, other.parameters)
        assert same_bits(flatten(first.optimizer), flatten(other.optimizer))
        assert first.lr == other.lr
        assert (first.global_step, first.epoch, first.batches) == (other.global_step, other.epoch, other.batches)


def assert_exact(case: Fit, results: Sequence[Result]) -> None:
    """Parameters, learning rate and counters are the reference's, the same bits on all ranks."""
    expected = reference(case)
    assert_same_bits(results)
    for rank, result in enumerate(results):
        assert difference(result.parameters, expected.parameters) < TOLERANCE
        assert result.lr == expected.lr
        assert result.global_step == expected.steps
        once = [(e, i) for e in range(case.epochs) for i, row in enumerate(case.rows(e)) if rank in row]
        assert result.trained == [place for place in once if expected.last is None or place <= expected.last]


def parameters(rank: int, run: Run) -> list[Tensor]:
    """Do a run on one rank; return the parameters."""
    return fit(rank, Fit(**vars(run))).parameters
