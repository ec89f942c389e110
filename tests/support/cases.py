"""One training run, described once, done twice: by Lightning's ranks and by one plain process.

The reference knows nothing of this project: it applies the formulas of the three weightings to the
batches of all ranks, in float64.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import lightning_join
from tests.emulator.frameworks import lightning_accelerator
from tests.needs import known
from tests.support.inside import planned_rows

# Where Lightning has no such argument it reads any file.
ANY_CHECKPOINT = known(pl.Trainer.fit, weights_only=False)
TOLERANCE = 1e-10
FEATURES, CLASSES, ROWS = 4, 3, 6
Batch = tuple[Tensor, Tensor]


def count_of(batch: Any) -> float:
    """Return what a batch counts where `weighting` is "count": a number that is no integer, and now and then 0."""
    first = (batch["x"] if isinstance(batch, dict) else batch[0]).flatten()[0].abs().item()
    return float(first) if first > 0.3 else 0.0


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    `lengths` holds the number of batches by rank, or by epoch and rank where it changes.
    """

    lengths: Sequence[Any]
    epochs: int = 3
    model: str = "mlp"
    optimizer: str = "adam"
    weighting: str = "world"
    accumulate: int = 1
    clip: float | None = None
    clip_by: str = "norm"  # or "value"
    scheduler: str | None = None
    iterable: bool = False
    ragged: bool = False  # batches of different sizes
    max_steps: int = -1
    reload: int = 0
    limit: int | float | None = None
    compiled: bool = False
    hooked: bool = False  # a parameter has a hook of its own
    zeros: bool = False  # gradients are cleared by zeros, in place
    rebalance: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.lengths_in(0))

    @property
    def option(self) -> Any:
        """What the ranks' `weighting` is."""
        return count_of if self.weighting == "count" else self.weighting

    def sizes(self, batches: dict[int, Batch]) -> dict[int, float]:
        """What `weights` goes by."""
        return {rank: count_of(one) if self.weighting == "count" else len(one[0]) for rank, one in batches.items()}

    def lengths_in(self, epoch: int) -> Sequence[int]:
        return self.lengths[epoch] if isinstance(self.lengths[0], (tuple, list)) else self.lengths

    def batches(self, rank: int, epoch: int) -> list[Batch]:
        """The batches of one rank in one epoch, before `limit`."""
        return [self.batch(rank, epoch, index) for index in range(self.lengths_in(epoch)[rank])]

    def batch(self, rank: int, epoch: int, index: int) -> Batch:
        generator = torch.Generator().manual_seed(10_000 * epoch + 100 * rank + index)
        size = 2 + (rank + 2 * index) % 4 if self.ragged else 3
        x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        if self.model == "sparse":
            x[:, 0] = torch.randint(ROWS, (size,), generator=generator)
        return x, torch.randn(size, CLASSES, generator=generator, dtype=torch.float64)

    def trained(self, rank: int, epoch: int) -> list[Batch]:
        """The batches that are trained on, after `limit`."""
        batches = self.batches(rank, epoch)
        if self.limit is None:
            return batches
        most = self.limit if isinstance(self.limit, int) else int(len(batches) * self.limit)
        return batches[:most]

    def rows(self, epoch: int) -> list[dict[int, tuple[int, int]]]:
        """By step and rank that trains: whose batch, and which of its."""
        lengths = [len(self.trained(rank, epoch)) for rank in range(self.world_size)]
        if self.rebalance:
            limit = self.limit if isinstance(self.limit, int) else None  # what a stream says of itself
            said = [limit if length > 1 else length for length in lengths] if self.iterable else None
            return planned_rows(lengths, said)
        return [{r: (r, step) for r, n in enumerate(lengths) if step < n} for step in range(max(lengths))]


class Net(nn.Module):
    """Small models, each with something that DDP treats in its own way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        # Before a norm a bias has a gradient of rounding errors only, which Adam would blow up.
        self.first = nn.Linear(FEATURES, 5, bias=kind != "norm")
        self.norm = nn.BatchNorm1d(5) if kind == "norm" else nn.Identity()
        self.last = nn.Linear(5, CLASSES)
        if kind in ("unused", "sometimes", "turns"):
            self.extra = nn.Linear(FEATURES, CLASSES)
        if kind == "sparse":
            self.rows = nn.Embedding(ROWS, FEATURES, sparse=True)

    def forward(self, x: Tensor, use_extra: bool = False) -> Tensor:
        if self.kind == "sparse":
            x = x + self.rows(x[:, 0].long())
        hidden = torch.tanh(self.norm(self.first(x)))
        more = self.extra(x) if use_extra else 0.0  # in the middle of the way
        out: Tensor = self.last(hidden)
        return out + more if use_extra else out


def uses_extra(case: Case, rank: int, step: int) -> bool:
    """Whether a step uses the extra parameters.

    `sometimes`: only a rank that joins early does, so that all active ones leave them out.
    `turns`: every other step does.
    """
    if case.model == "turns":
        return step % 2 == 0
    return case.model == "sometimes" and case.lengths_in(0)[rank] == min(n for n in case.lengths_in(0) if n)


def loss_of(net: Net, batch: Batch, use_extra: bool = False) -> Tensor:
    return (net(batch[0], use_extra) - batch[1]).pow(2).mean()


def build_net(case: Case) -> Net:
    torch.manual_seed(7)
    net = Net(case.model).double()
    if case.hooked:
        net.first.weight.register_hook(lambda grad: 3 * grad)
    return net


def build_optimizer(case: Case, net: nn.Module, sharded: bool) -> torch.optim.Optimizer:
    parameters = list(net.parameters())
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)
    if case.optimizer == "plain":
        return torch.optim.SGD(parameters, lr=0.05)
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
    if case.optimizer == "zero" and sharded:
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.05)
    return torch.optim.Adam(parameters, lr=0.05)


def build_scheduler(
    case: Case, optimizer: torch.optim.Optimizer, steps: float
) -> torch.optim.lr_scheduler.LRScheduler | None:
    if case.scheduler == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
    if case.scheduler == "epoch":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if case.scheduler in ("onecycle", "onecycle-setup"):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps), cycle_momentum=False)
    return None


# ---------------------------------------------------------------- one plain process


@dataclass
class Reference:
    """What one process computes; `history` holds the state after every optimizer step, by step."""

    net: Net
    history: dict[int, dict[str, Tensor]]
    lr: float
    steps: int
    last: tuple[int, int] | None = None  # the epoch and batch at which `max_steps` ended it


def weights(case: Case, sizes: Mapping[int, float]) -> dict[int, float]:
    """The weight of each active rank's mean gradient, given their batch sizes, or what their batches count."""
    if case.weighting == "active":
        return {rank: 1 / len(sizes) for rank in sizes}
    if case.weighting in ("samples", "count"):
        return {rank: n and n / sum(sizes.values()) for rank, n in sizes.items()}
    return dict.fromkeys(sizes, 1 / case.world_size)


def backward(parameters: Iterable[Tensor], loss: Tensor, weight: float, run: Callable[[Tensor], Any]) -> None:
    """Add a loss's gradients times a weight; for one of 0 zeros, whatever they are."""
    if weight:
        run(loss * weight)
        return
    parameters = [*parameters]
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    run(loss)
    for parameter, was in zip(parameters, before, strict=True):
        if parameter.grad is not None:
            parameter.grad = torch.zeros_like(parameter.grad) if was is None else was


def longest(case: Case, epoch: int) -> int:
    return len(case.rows(epoch))


def total_steps(case: Case) -> int:
    return sum(-(-longest(case, epoch) // case.accumulate) for epoch in range(case.epochs))


def reference(case: Case) -> Reference:
    net = build_net(case)
    optimizer = build_optimizer(case, net, sharded=False)
    scheduler = build_scheduler(case, optimizer, total_steps(case))
    history: dict[int, dict[str, Tensor]] = {}
    steps = 0
    for epoch in range(case.epochs):
        for step, row in enumerate(case.rows(epoch)):
            batches = {rank: case.batch(owner, epoch, index) for rank, (owner, index) in row.items()}
            weight = weights(case, case.sizes(batches))
            if step % case.accumulate == 0:
                optimizer.zero_grad(set_to_none=not case.zeros)
            before = copy.deepcopy(dict(net.named_buffers()))
            for rank in sorted(batches, reverse=True):
                # Every rank starts from the same buffers; those of the lowest rank are kept.
                for name, buffer in net.named_buffers():
                    buffer.copy_(before[name])
                loss = loss_of(net, batches[rank], uses_extra(case, rank, step))
                backward(net.parameters(), loss / case.accumulate, weight[rank], torch.autograd.backward)
            if (step + 1) % case.accumulate == 0 or step + 1 == longest(case, epoch):
                if case.clip:
                    by = torch.nn.utils.clip_grad_norm_ if case.clip_by == "norm" else torch.nn.utils.clip_grad_value_
                    by(net.parameters(), case.clip)
                optimizer.step()
                steps += 1
                if scheduler is not None and case.scheduler != "epoch":
                    scheduler.step()
                history[steps] = copy.deepcopy(net.state_dict())
                if steps == case.max_steps:
                    return Reference(net, history, optimizer.param_groups[0]["lr"], steps, (epoch, step))
        if scheduler is not None and case.scheduler == "epoch":
            scheduler.step()
    return Reference(net, history, optimizer.param_groups[0]["lr"], steps)


# ---------------------------------------------------------------- Lightning's ranks


class Shard(Dataset[Batch]):
    """A rank's data, addressed by (epoch, index)."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank

    def __getitem__(self, place: tuple[int, int]) -> Batch:
        return self.case.batch(self.rank, *place)


class EpochSampler(Sampler[tuple[int, int]]):
    """Its length may change with the epoch."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.epoch = case, rank, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.case.lengths_in(min(self.epoch, self.case.epochs - 1))[self.rank]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(self.epoch, index) for index in range(len(self))])


class Stream(IterableDataset[Batch]):
    """A rank's data without a length."""

    def __init__(self, case: Case, rank: int, module: pl.LightningModule) -> None:
        self.case, self.rank, self.module = case, rank, module

    def __iter__(self) -> Iterator[Batch]:
        yield from self.case.batches(self.rank, self.module.trainer.current_epoch)


class Module(pl.LightningModule):
    """Trains a `Case` and notes what happens."""

    noted: Any  # what else a test wants to know of its rank

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.net = build_net(case)
        self.trained: list[tuple[int, int]] = []
        self.noted = []
        self.steps_seen_in_setup: float | None = None

    def setup(self, stage: str) -> None:
        if self.case.scheduler == "onecycle-setup":
            self.steps_seen_in_setup = self.trainer.estimated_stepping_batches

    def train_dataloader(self) -> DataLoader[Batch]:
        rank = self.trainer.global_rank
        if self.case.iterable:
            return DataLoader(Stream(self.case, rank, self), batch_size=None)
        return DataLoader(Shard(self.case, rank), batch_size=None, sampler=EpochSampler(self.case, rank))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.trained.append((self.trainer.current_epoch, batch_idx))
        return loss_of(self.net, batch, uses_extra(self.case, self.trainer.global_rank, batch_idx))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=not self.case.zeros)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.case, self.net, sharded=True)
        steps = self.steps_seen_in_setup
        if steps is None and self.case.scheduler == "onecycle":
            steps = self.trainer.estimated_stepping_batches
        scheduler = build_scheduler(self.case, optimizer, steps or 0)
        if scheduler is None:
            return optimizer
        interval = "epoch" if self.case.scheduler == "epoch" else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


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


def build_trainer(case: Case, **overrides: Any) -> pl.Trainer:
    strategy = overrides.pop("strategy", None) or lightning_join.DDPJoinStrategy(
        weighting=case.option, rebalance=case.rebalance, **case.ddp
    )
    options = {
        "accelerator": lightning_accelerator(),
        "devices": case.world_size,
        "strategy": strategy,
        "max_epochs": case.epochs,
        "max_steps": case.max_steps,
        "accumulate_grad_batches": case.accumulate,
        "gradient_clip_val": case.clip,
        "gradient_clip_algorithm": None if case.clip_by == "norm" else case.clip_by,
        "reload_dataloaders_every_n_epochs": case.reload,
        "limit_train_batches": case.limit,
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
        optimizer=optimizer_state(trainer),
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


def optimizer_state(trainer: pl.Trainer) -> Any:
    """The state of the first optimizer; of ZeRO the consolidated one, by way of the first rank."""
    optimizer: Any = trainer.optimizers[0]
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        state = [optimizer.state_dict()["state"] if trainer.global_rank == 0 else None]
        torch.distributed.broadcast_object_list(state)
        return state[0]
    return optimizer.state_dict()["state"]


def fit(
    rank: int,
    case: Case,
    make: Callable[[Case], Module] = Module,
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


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def flatten(state: Any) -> list[Tensor]:
    """All tensors in an optimizer's state, in one order."""
    if isinstance(state, dict):
        return [tensor for key in sorted(state, key=str) for tensor in flatten(state[key])]
    if isinstance(state, Tensor):
        return [state.to_dense() if state.is_sparse else state]
    return []


def assert_same_bits(results: Sequence[Result]) -> None:
    first = results[0]
    for other in results[1:]:
        for mine, its in (
            (first.parameters, other.parameters),
            (flatten(first.optimizer), flatten(other.optimizer)),
        ):
            assert len(mine) == len(its)
            assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
        assert first.lr == other.lr
        assert (first.global_step, first.epoch, first.batches) == (other.global_step, other.epoch, other.batches)


def assert_exact(case: Case, results: Sequence[Result]) -> None:
    """Parameters, learning rate and counters are the reference's, the same bits on all ranks."""
    expected = reference(case)
    assert_same_bits(results)
    for rank, result in enumerate(results):
        assert difference(result.parameters, list(expected.net.parameters())) < TOLERANCE
        assert result.lr == expected.lr
        assert result.global_step == expected.steps
        once = [(e, i) for e in range(case.epochs) for i, row in enumerate(case.rows(e)) if rank in row]
        assert result.trained == [place for place in once if expected.last is None or place <= expected.last]
