"""One plain training loop, described once, done twice: by ranks under `Join` and by one process."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.emulator import place
from tests.needs import has
from tests.support.cases import Batch, backward, flatten, weights
from tests.support.cases import Case as DataCase
from tests.support.collectives import averages
from tests.support.inside import planned_rows
from torch_join import Join, JoinableModel, JoinableOptimizer, JoinableState

FEATURES, CLASSES = 4, 3
PLAIN_EPOCHS, PLAIN_STEPS = 3, 2  # of DDP without any Join, afterwards
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# What a random program's step may do with others.
COLLECTIVES = (None, *(kind for kind in REDUCTIONS if kind != "avg" or averages()), "all_gather", "objects", "barrier")


@dataclass(frozen=True)
class Program:
    """What a step does.

    `lengths` holds the number of batches by rank, or by epoch and rank where it changes.
    """

    lengths: Sequence[Any]
    optimizer: str = "adam"  # several are joined by "+": one for the encoder, one for the head
    weighting: str = "world"
    loss: str = "simple"  # or "penalty", "two forwards", "two models", "two backwards"
    clear: str = "before"  # or "after", "model"; "before, zeros" and "after, zeros" leave gradients of zero
    clip: float | None = None
    scheduler: str | None = None  # or "step", "plateau"
    scaler: bool = (
        False  # a GradScaler, for which some batches overflow; gradients are unscaled before they are clipped
    )
    accumulate: int = 1
    loop: str = "sized"  # or "iterable", "wrong length", "plain", "heartbeat"
    norm: bool = False
    epochs: int = 3
    ragged: bool = False
    collective: str | None = None  # in each step: one of REDUCTIONS, "all_gather", "objects" or "barrier"
    asynchronous: bool = False
    grouped: bool = False  # the collective is on a process group of its own
    evaluation: str | None = None  # a forward-only loop after each epoch, in the same `with`: "no_grad", "inference"
    one_context: bool = False  # one `with` for all epochs
    leaves: bool = False  # by `break`, before the loader's end
    rebalance: bool = False

    @property
    def data(self) -> "Data":
        ragged = self.ragged or self.weighting in ("samples", "count")
        return Data(self.lengths, ragged=ragged, weighting=self.weighting, overflows=self.scaler)

    @property
    def world_size(self) -> int:
        return self.data.world_size

    def rows(self, epoch: int) -> list[dict[int, tuple[int, int]]]:
        """By step and rank that trains: whose batch, and which of its."""
        lengths = self.data.lengths_in(epoch)
        if self.rebalance:
            return planned_rows(lengths, [None] * len(lengths) if self.loop == "iterable" else None)
        return [{r: (r, step) for r, n in enumerate(lengths) if step < n} for step in range(max(lengths))]


@dataclass(frozen=True)
class Data(DataCase):
    """The batches of all ranks."""

    overflows: bool = False

    def batch(self, rank: int, epoch: int, index: int) -> Batch:
        x, y = super().batch(rank, epoch, index)
        return x, torch.full_like(y, torch.inf) if self.overflows and (rank + 2 * epoch + index) % 5 == 3 else y

    def evaluated(self, rank: int, epoch: int) -> list[Batch]:
        """What a rank evaluates on: as many batches as another rank trains on."""
        return [self.batch(rank, 70 + epoch, index) for index in range(self.lengths_in(epoch)[-1 - rank])]


class Models(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(3)
        works = program.loss != "two forwards" or has("DDP's two forwards with BatchNorm before a backward")
        norm = [nn.BatchNorm1d(5)] if program.norm and works else []
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


def build_optimizer(kind: str, parameters: Any, sharded: bool) -> torch.optim.Optimizer:
    if kind == "plain":
        return torch.optim.SGD(parameters, lr=0.05)
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
    if kind == "zero" and sharded:
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.05)
    return torch.optim.Adam(parameters, lr=0.05)


def build_scheduler(program: Program, optimizer: torch.optim.Optimizer) -> Any:
    if program.scheduler == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
    if program.scheduler == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)
    return None


class Training:
    """What has a state, and what is done to it; the same on a rank and in one process."""

    def __init__(self, program: Program, sharded: bool) -> None:
        self.program = program
        self.models = Models(program)
        kinds = program.optimizer.split("+")
        parts = [self.models] if len(kinds) == 1 else [self.models.encoder, self.models.head]
        self.optimizers = [build_optimizer(k, m.parameters(), sharded) for k, m in zip(kinds, parts, strict=True)]
        self.scheduler = build_scheduler(program, self.optimizers[0])
        self.scaler = torch.amp.GradScaler(place().type, init_scale=8.0, growth_interval=2) if program.scaler else None

    @property
    def lr(self) -> list[float]:
        return [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]

    def begin_epoch(self) -> None:
        if self.program.accumulate > 1:
            self.models.zero_grad()

    def begin_step(self, step: int) -> None:
        if self.program.clear.startswith("before") and step % self.program.accumulate == 0:
            self.clear()

    def clear(self) -> None:
        if self.program.clear == "model":
            self.models.zero_grad()
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none="zeros" not in self.program.clear)

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def syncs(self, step: int) -> bool:
        return (step + 1) % self.program.accumulate == 0

    def finish_step(self, step: int) -> None:
        if self.program.clip:
            for optimizer in self.optimizers if self.scaler is not None else ():
                self.scaler.unscale_(optimizer)  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(self.models.parameters(), self.program.clip)
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        if self.program.scheduler == "step":
            self.scheduler.step()
        elif self.program.scheduler == "plateau":
            self.scheduler.step(float(step))  # a value that a joined rank does not know
        if not self.program.clear.startswith("before"):
            self.clear()

    def scaler_state(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()


# ---------------------------------------------------------------- one process


@dataclass
class Expected:
    """What one process computes besides the parameters."""

    lr: list[float]
    scaler: dict[str, Any]
    evaluated: list[list[float]]  # by rank and epoch
    plain: list[Tensor]  # the parameters after the epochs of plain DDP


def reference(program: Program) -> tuple[Models, Expected]:
    training, data = Training(program, sharded=False), program.data
    evaluated: list[list[float]] = [[] for _ in range(program.world_size)]
    for epoch in range(program.epochs):
        training.begin_epoch()
        for step, row in enumerate(program.rows(epoch)):
            batches = {rank: data.batch(owner, epoch, index) for rank, (owner, index) in row.items()}
            training.begin_step(step)
            _accumulate(training, batches, weights(data, data.sizes(batches)))
            if training.syncs(step):
                training.finish_step(step)
        for rank in range(program.world_size if program.evaluation else 0):
            evaluated[rank].append(evaluate(training.models, training.models, data.evaluated(rank, epoch)))
    models, lr, scaler = copy.deepcopy(training.models), training.lr, training.scaler_state()
    everyone = range(program.world_size)
    for epoch in range(PLAIN_EPOCHS):
        for step in range(PLAIN_STEPS):
            training.models.zero_grad()
            _accumulate(
                training,
                {rank: data.batch(rank, 50 + epoch, step) for rank in everyone},
                dict.fromkeys(everyone, 1 / program.world_size),
            )
            training.finish_step(step)
    return models, Expected(lr, scaler, evaluated, list(training.models.parameters()))


def _accumulate(training: Training, batches: dict[int, Batch], weight: dict[int, float]) -> None:
    buffers = dict(training.models.named_buffers())
    before = copy.deepcopy(buffers)
    for rank in sorted(batches, reverse=True):
        # Every rank starts from the same buffers; those of the lowest rank are kept.
        for name, buffer in buffers.items():
            buffer.copy_(before[name])
        for loss in losses(training.program, training.models, batches[rank]):
            backward(training.models.parameters(), loss, weight[rank], training.backward)


def evaluate(models: Models, model: Apply, batches: Iterable[Batch]) -> float:
    models.eval()
    total = 0.0
    with torch.no_grad():
        for x, _ in batches:
            total += model(x).pow(2).sum().item()
    models.train()
    return total


# ---------------------------------------------------------------- the ranks


class Stream(IterableDataset[Batch]):
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Claims:
    """A sized loader that does not hold what its length says, and takes `seconds` for a batch."""

    def __init__(self, batches: list[Batch], claimed: int, seconds: float = 0.0) -> None:
        self.batches, self.claimed, self.seconds = batches, claimed, seconds

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            time.sleep(self.seconds)
            yield batch


@dataclass
class Outcome:
    """What one rank holds after training."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    optimizer: Any
    scheduler: Any
    lr: Any
    gradients: list[Tensor | None]
    scaler: dict[str, Any] = field(default_factory=dict)
    evaluated: list[float] = field(default_factory=list)  # by epoch
    exchanged: list[list[tuple[float, Any]]] = field(default_factory=list)  # by epoch and loss: given, got
    plain: "Outcome | None" = None  # after the epochs of plain DDP


def train(rank: int, program: Program, joins: str = "ours", plain: bool = False) -> Outcome:
    """Train under our `Join`, or torch's, and then perhaps for some epochs of even inputs under none.

    `joins` is "ours", "torch", or one of these with our joinables: "our joinables", "torch's with joinables".
    """
    training = Training(program, sharded=True)
    models = training.models
    if program.loss == "two models":
        wrapped: list[nn.Module] = [DistributedDataParallel(models.encoder), DistributedDataParallel(models.head)]
        model: Apply = lambda x: wrapped[1](wrapped[0](x))  # noqa: E731
    else:
        wrapped = [DistributedDataParallel(models)]
        model = wrapped[0]
    group = dist.new_group() if program.grouped else None
    evaluated: list[float] = []
    exchanged: list[list[tuple[float, Any]]] = []

    def train_epoch(join: Any, epoch: int) -> None:
        batches = program.data.batches(rank, epoch)
        loader = [*batches, *batches[: 1 + rank]] if program.leaves else batches
        exchanged.append([])
        for step, batch in enumerate(loop(program, join, loader)):
            training.begin_step(step)
            with ExitStack() as unsynced:
                for ddp in wrapped:
                    unsynced.enter_context(nullcontext() if training.syncs(step) else ddp.no_sync())  # type: ignore[operator]
                for loss in losses(program, model, batch):
                    exchanged[-1].append((loss.item(), exchange(program, loss, group)))
                    training.backward(loss)
            if training.syncs(step):
                training.finish_step(step)
            if program.leaves and step + 1 == len(batches):
                break
        if program.evaluation:
            with torch.inference_mode() if program.evaluation == "inference" else nullcontext():
                evaluated.append(evaluate(models, model, loop(program, join, program.data.evaluated(rank, epoch))))

    with context(program, joins, wrapped, training) if program.one_context else nullcontext() as outer:
        for epoch in range(program.epochs):
            training.begin_epoch()
            with nullcontext(outer) if program.one_context else context(program, joins, wrapped, training) as join:
                train_epoch(join, epoch)
    outcome = outcome_of(rank, training)
    outcome.evaluated, outcome.exchanged = evaluated, exchanged
    if plain:
        for epoch in range(PLAIN_EPOCHS):
            for step in range(PLAIN_STEPS):
                models.zero_grad()
                for loss in losses(program, model, program.data.batch(rank, 50 + epoch, step)):
                    training.backward(loss)
                training.finish_step(step)
        outcome.plain = outcome_of(rank, training)
    return outcome


def outcome_of(rank: int, training: Training) -> Outcome:
    models, scheduler = training.models, training.scheduler
    return Outcome(
        [p.detach().clone() for p in models.parameters()],
        [b.clone() for b in models.buffers()],
        {index: optimizer_state(rank, optimizer) for index, optimizer in enumerate(training.optimizers)},
        None if scheduler is None else {k: v for k, v in scheduler.state_dict().items() if not callable(v)},
        training.lr,
        [None if p.grad is None else p.grad.clone() for p in models.parameters()],
        training.scaler_state(),
    )


def context(program: Program, joins: str, wrapped: list[nn.Module], training: Training) -> AbstractContextManager[Any]:
    if joins.endswith("joinables"):
        given: list[Any] = [*map(JoinableModel, wrapped), *map(JoinableOptimizer, training.optimizers)]
        given += [JoinableState(thing) for thing in (training.scheduler, training.scaler) if thing is not None]
        if joins == "our joinables":
            return Join(given, weighting=program.weighting)
        options: dict[str, Any] = {"divide_by_initial_world_size": program.weighting == "world"}
        if program.weighting == "samples":
            options = {"weighting": "samples"}
        return TorchJoin(given, **options)  # type: ignore[return-value]
    if joins == "torch":
        sharded = [optimizer for optimizer in training.optimizers if isinstance(optimizer, ZeroRedundancyOptimizer)]
        return TorchJoin([*wrapped, *sharded], divide_by_initial_world_size=program.weighting == "world")  # type: ignore[list-item]
    stateful = [thing for thing in (training.scheduler, training.scaler) if thing is not None]
    joinables = [*wrapped, *training.optimizers, *stateful]
    options = {"may_break": program.loop == "heartbeat", "rebalance": program.rebalance}
    return Join(joinables, weighting=program.data.option, **options)


def loop(program: Program, join: Any, batches: list[Batch]) -> Iterable[Batch]:
    if program.loop == "plain" or not isinstance(join, Join):
        return batches
    if program.loop == "iterable":
        return join.batches(DataLoader(Stream(batches), batch_size=None))
    if program.loop == "wrong length":
        claimed = len(batches) + (-1 if len(batches) % 3 == 1 else 2)
        return join.batches(Claims(batches, claimed, seconds=0.02 * (len(batches) % 2)))
    return join.batches(batches)


def exchange(program: Program, value: Tensor, group: Any) -> Any:
    """The collective of a step, as a user would write it."""
    value, world_size = value.detach(), dist.get_world_size()
    kind, asynchronous = program.collective, program.asynchronous
    work: Any = None
    result: Any = None
    if kind in REDUCTIONS:
        result = value.clone()
        work = dist.all_reduce(result, REDUCTIONS[kind], group=group, async_op=asynchronous)
    elif kind == "all_gather":
        result = [torch.zeros_like(value) for _ in range(world_size)]
        work = dist.all_gather(result, value, group=group, async_op=asynchronous)
    elif kind == "objects":
        result = [None] * world_size
        dist.all_gather_object(result, {"loss": value.item()}, group=group)
    elif kind == "barrier":
        work = dist.barrier(group=group, async_op=asynchronous)
    if work is not None:
        work.wait()
    if kind == "all_gather":
        return [tensor.item() for tensor in result]
    return result.item() if kind in REDUCTIONS else result


def optimizer_state(rank: int, optimizer: Any) -> Any:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        state = [optimizer.state_dict()["state"] if rank == 0 else None]
        dist.broadcast_object_list(state)
        return copy.deepcopy(state[0])
    return copy.deepcopy(optimizer.state_dict()["state"])


def tensors_of(outcome: Outcome) -> list[Tensor]:
    """All tensors that must be the same on all ranks."""
    return [*outcome.parameters, *flatten(outcome.optimizer)]
