"""One plain training loop, described once, done twice: by ranks under `Join` and by one process."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.cases import Batch, weights
from tests.cases import Case as DataCase
from torch_join import Join

FEATURES, CLASSES = 4, 3


@dataclass(frozen=True)
class Program:
    """What a step does.

    `lengths` holds the number of batches by rank, or by epoch and rank where it changes.
    """

    lengths: Sequence[Any]
    optimizer: str = "adam"
    weighting: str = "world"
    loss: str = "simple"  # or "penalty", "two forwards", "two models", "two backwards"
    clear: str = "before"  # or "after", "zeros", "model"
    clip: float | None = None
    scheduler: str | None = None  # or "step", "plateau"
    accumulate: int = 1
    loop: str = "sized"  # or "iterable", "plain", "heartbeat"
    norm: bool = False
    epochs: int = 3
    ragged: bool = False
    collective: str | None = None

    @property
    def data(self) -> DataCase:
        return DataCase(self.lengths, ragged=self.ragged or self.weighting == "samples", weighting=self.weighting)

    @property
    def world_size(self) -> int:
        return self.data.world_size


class Models(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(3)
        norm = [nn.BatchNorm1d(5)] if program.norm else []
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 5, bias=not norm), *norm, nn.Tanh())
        self.head = nn.Linear(5, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x))
        return out


Apply = Callable[[Tensor], Tensor]


def losses(program: Program, model: Apply, batch: Batch) -> Iterator[Tensor]:
    """The losses of a step, each of which gets a backward of its own."""
    x, y = batch
    if program.loss == "penalty":
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        yield (out - y).pow(2).mean() + slope.pow(2).mean()
    elif program.loss == "two forwards":
        yield (model(x) - y).pow(2).mean() + model(2 * x).pow(2).mean()
    elif program.loss == "two backwards":
        yield (model(x) - y).pow(2).mean()
        yield model(2 * x).pow(2).mean()
    else:
        yield (model(x) - y).pow(2).mean()


def build_optimizer(program: Program, parameters: Any, sharded: bool) -> torch.optim.Optimizer:
    if program.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)
    if program.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
    if program.optimizer == "zero" and sharded:
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.05)
    return torch.optim.Adam(parameters, lr=0.05)


def build_scheduler(program: Program, optimizer: torch.optim.Optimizer) -> Any:
    if program.scheduler == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
    if program.scheduler == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)
    return None


def clear(program: Program, models: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if program.clear == "model":
        models.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=program.clear != "zeros")


def finish_step(program: Program, models: nn.Module, optimizer: Any, scheduler: Any, step: int) -> None:
    if program.clip:
        torch.nn.utils.clip_grad_norm_(models.parameters(), program.clip)
    optimizer.step()
    if program.scheduler == "step":
        scheduler.step()
    elif program.scheduler == "plateau":
        scheduler.step(float(step))  # a value that a joined rank does not know
    if program.clear != "before":
        clear(program, models, optimizer)


# ---------------------------------------------------------------- one process


def reference(program: Program) -> tuple[Models, float]:
    models = Models(program)
    optimizer = build_optimizer(program, models.parameters(), sharded=False)
    scheduler = build_scheduler(program, optimizer)
    data = program.data
    for epoch in range(program.epochs):
        shards = [data.batches(rank, epoch) for rank in range(program.world_size)]
        if program.accumulate > 1:
            models.zero_grad()
        for step in range(max(map(len, shards))):
            batches = {rank: shard[step] for rank, shard in enumerate(shards) if step < len(shard)}
            weight = weights(data, {rank: len(batch[0]) for rank, batch in batches.items()})
            if program.clear == "before" and step % program.accumulate == 0:
                optimizer.zero_grad()
            before = copy.deepcopy(dict(models.named_buffers()))
            for rank in sorted(batches, reverse=True):
                for name, buffer in models.named_buffers():
                    buffer.copy_(before[name])
                for loss in losses(program, models, batches[rank]):
                    (loss * weight[rank]).backward()
            if (step + 1) % program.accumulate == 0:
                finish_step(program, models, optimizer, scheduler, step)
    return models, optimizer.param_groups[0]["lr"]


# ---------------------------------------------------------------- the ranks


class Stream(IterableDataset[Batch]):
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


@dataclass
class Outcome:
    """What one rank holds after training."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    optimizer: Any
    scheduler: Any
    lr: float
    gradients: list[Tensor | None]


def train(rank: int, program: Program, joins: str = "ours", plain_epochs: int = 0) -> Outcome:
    """Train under our `Join`, or torch's, and then for some epochs of even inputs under none."""
    models = Models(program)
    if program.loss == "two models":
        wrapped: list[nn.Module] = [DistributedDataParallel(models.encoder), DistributedDataParallel(models.head)]
        model: Apply = lambda x: wrapped[1](wrapped[0](x))  # noqa: E731
    else:
        wrapped = [DistributedDataParallel(models)]
        model = wrapped[0]
    optimizer = build_optimizer(program, models.parameters(), sharded=True)
    scheduler = build_scheduler(program, optimizer)
    data = program.data
    for epoch in range(program.epochs):
        batches = data.batches(rank, epoch)
        if program.accumulate > 1:
            models.zero_grad()
        with context(program, joins, wrapped, optimizer, scheduler) as join:
            for step, batch in enumerate(loop(program, join, batches)):
                if program.clear == "before" and step % program.accumulate == 0:
                    clear(program, models, optimizer)
                syncs = (step + 1) % program.accumulate == 0
                with nullcontext() if syncs else wrapped[0].no_sync():  # type: ignore[operator]
                    for loss in losses(program, model, batch):
                        loss.backward()
                if syncs:
                    finish_step(program, models, optimizer, scheduler, step)
    for epoch in range(plain_epochs):
        for step in range(2):
            optimizer.zero_grad()
            next(losses(program, model, data.batch(rank, 50 + epoch, step))).backward()
            optimizer.step()
    return Outcome(
        [p.detach().clone() for p in models.parameters()],
        [b.clone() for b in models.buffers()],
        optimizer_state(rank, optimizer),
        None if scheduler is None else {k: v for k, v in scheduler.state_dict().items() if not callable(v)},
        optimizer.param_groups[0]["lr"],
        [None if p.grad is None else p.grad.clone() for p in models.parameters()],
    )


def context(
    program: Program, joins: str, wrapped: list[nn.Module], optimizer: Any, scheduler: Any
) -> AbstractContextManager[Any]:
    if joins == "torch":
        sharded = [optimizer] if isinstance(optimizer, ZeroRedundancyOptimizer) else []
        return TorchJoin([*wrapped, *sharded], divide_by_initial_world_size=program.weighting == "world")  # type: ignore[list-item, return-value]
    stateful = [thing for thing in (optimizer, scheduler) if thing is not None]
    return Join([*wrapped, *stateful], weighting=program.weighting, heartbeat=program.loop == "heartbeat")


def loop(program: Program, join: Any, batches: list[Batch]) -> Iterable[Batch]:
    if program.loop == "plain" or not isinstance(join, Join):
        return batches
    if program.loop == "iterable":
        return join.batches(DataLoader(Stream(batches), batch_size=None))
    return join.batches(batches)


def optimizer_state(rank: int, optimizer: Any) -> Any:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        state = [optimizer.state_dict()["state"] if rank == 0 else None]
        dist.broadcast_object_list(state)
        return state[0]
    return optimizer.state_dict()["state"]
