"""One training run, described once: ranks do it on each front end, and one plain process does it here, in float64.

The reference knows nothing of this project: it applies the formulas of the weightings to the batches of all ranks.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.emulator import place
from tests.needs import has
from tests.support.inside import planned_rows

TOLERANCE = 1e-10
FEATURES, CLASSES, ROWS = 4, 3, 6
Batch = tuple[Tensor, ...]
Place = tuple[int, int]  # a rank, and which of its batches; or an epoch, and a step of it
Steps = list[dict[int, Batch]]  # by step, and by rank that trains in it
Own = TypeVar("Own", bound="Run")
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "plain": partial(torch.optim.SGD, lr=0.05),
    "nesterov": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.05),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=0.02, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


def count_of(batch: Any) -> float:
    """Return what a batch counts where `weighting` is "count": a number that is no integer, and now and then 0."""
    first = batch["x"] if isinstance(batch, dict) else batch[0]
    if not first.is_floating_point():  # numbers of samples
        assert all(part.device.type == "cpu" for part in batch), "it is on an accelerator already"
        return float((first % 3).sum()) / 7
    number = float(first.flatten()[0].abs())
    return number if number > 0.3 else 0.0


def weights_of(weighting: str, world_size: int, sizes: Mapping[int, float]) -> dict[int, float]:
    """Return what each active rank's mean gradient counts, given their batch sizes, or what their batches count."""
    if weighting in ("samples", "count"):
        return {rank: n and n / sum(sizes.values()) for rank, n in sizes.items()}
    return dict.fromkeys(sizes, 1 / (world_size if weighting == "world" else len(sizes)))


@dataclass(frozen=True)
class Run:
    """What is trained, and how; what only some front ends have is a field of a class of theirs, or in `extra`.

    `lengths` holds the number of batches by rank, or by epoch and rank where it changes.
    """

    lengths: Sequence[Any] = ()
    epochs: int = 3
    model: str = "mlp"
    optimizer: str = "adam"  # several are joined by "+": one for the first layers, one for the last
    weighting: str = "world"
    accumulate: int = 1  # micro-batches of a step, whose mean counts
    # What an epoch's shorter, last window does; or it "goes on" in the next one, is "added" to its first, or "dropped".
    rest: str = "steps"
    loss: str = "simple"  # or "penalty"; "two forwards", or three; "two models"; "two backwards"
    masked: int = -1  # the rank whose losses count nothing
    clear: str = "before"  # or "after", "model"; "before, zeros" and "after, zeros" leave gradients of zero
    clip: float | None = None
    clip_by: str = "norm"  # or "value"
    scheduler: str | None = None  # or "step", "epoch", "plateau", "onecycle"
    scaler: float = 0.0  # the first scale of a GradScaler, for which some batches overflow
    ragged: bool = False  # batches of different sizes
    iterable: bool = False  # without a length
    may_break: bool = False
    rebalance: bool = False
    placeholder: Any = None
    evaluation: str | None = None  # after each epoch, and how
    limit: int | float | None = None  # batches of a rank in an epoch
    max_steps: int = -1
    stops: int = 0  # the step at whose end all ranks leave the loop
    compiled: bool = False
    hooked: bool = False  # a parameter has a hook of its own
    seed: int = 0
    dtype: torch.dtype = torch.float64
    ddp: dict[str, Any] = field(default_factory=dict)  # what DDP is made with
    extra: dict[str, Any] = field(default_factory=dict)  # what the front end's own object is made with

    @property
    def world_size(self) -> int:
        return len(self.lengths_in(0))

    @property
    def option(self) -> Any:
        """What the ranks' `weighting` is."""
        return count_of if self.weighting == "count" else self.weighting

    def __str__(self) -> str:
        """Say in what it is no usual run."""
        changed = {
            one.name: getattr(self, one.name) for one in fields(self)[1:] if getattr(self, one.name) != one.default
        }
        told = [f"{name}={value!r}" for name, value in changed.items() if value != {}]
        return f"{type(self).__name__}({', '.join([str(self.lengths), *told])})"

    def but(self: Own, **changes: Any) -> Own:
        return replace(self, **changes)

    # ------------------------------------------------------------ the data

    def lengths_in(self, epoch: int) -> Sequence[int]:
        return self.lengths[epoch] if self.lengths and isinstance(self.lengths[0], (tuple, list)) else self.lengths

    def batch(self, rank: int, epoch: int, index: int) -> Batch:
        generator = torch.Generator().manual_seed(100_000 * self.seed + 10_000 * epoch + 100 * rank + index)
        size = 2 + (rank + 2 * index) % 4 if self.ragged else 3
        x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        if self.model == "sparse":
            x[:, 0] = torch.randint(ROWS, (size,), generator=generator)
        y = torch.randn(size, CLASSES, generator=generator, dtype=torch.float64)
        if self.scaler and (rank + 2 * epoch + index) % 5 == 3:
            y = torch.full_like(y, torch.inf)
        return x.to(self.dtype), y.to(self.dtype)

    def batches(self, rank: int, epoch: int) -> list[Batch]:
        """The batches of one rank in one epoch, before `limit`."""
        return [self.batch(rank, epoch, index) for index in range(self.lengths_in(epoch)[rank])]

    def evaluated(self, rank: int, epoch: int) -> list[Batch]:
        """What a rank evaluates on: as many batches as another rank trains on."""
        return [self.batch(rank, 70 + epoch, index) for index in range(self.lengths_in(epoch)[-1 - rank])]

    def trained(self, rank: int, epoch: int) -> list[Batch]:
        """The batches that are trained on, after `limit`."""
        batches = self.batches(rank, epoch)
        if self.limit is None:
            return batches
        return batches[: self.limit if isinstance(self.limit, int) else int(len(batches) * self.limit)]

    def rows(self, epoch: int) -> list[dict[int, Place]]:
        """By step and rank that trains: whose batch, and which of its."""
        lengths = [len(self.trained(rank, epoch)) for rank in range(self.world_size)]
        if self.rebalance:
            return planned_rows(lengths, self.said(lengths))
        steps = range(self.stops or max(lengths))
        return [{r: (r, step) for r, n in enumerate(lengths) if step < n} for step in steps]

    def said(self, lengths: list[int]) -> list[int | None] | None:
        """What loaders say of their lengths, where it is not the truth: a stream nothing, or its limit."""
        return [self.limit if isinstance(self.limit, int) else None] * len(lengths) if self.iterable else None

    def steps(self, epoch: int) -> Steps:
        return [{r: self.batch(owner, epoch, i) for r, (owner, i) in row.items()} for row in self.rows(epoch)]

    def length(self, epoch: int) -> int:
        """The number of steps."""
        return len(self.rows(epoch))

    def total_steps(self) -> int:
        """How often the optimizer steps."""
        return sum(-(-self.length(epoch) // self.accumulate) for epoch in range(self.epochs))

    def begins_window(self, epoch: int, step: int) -> bool:
        return self._number(epoch, step) % self.accumulate == 0

    def ends_window(self, epoch: int, step: int, length: int | None = None) -> bool:
        """Whether the optimizer steps; `length` is the number of steps, where another one than the run's."""
        if (self._number(epoch, step) + 1) % self.accumulate == 0:
            return True
        return self.rest == "steps" and step + 1 == (self.length(epoch) if length is None else length)

    def _number(self, epoch: int, step: int) -> int:
        return step + sum(map(self.length, range(epoch))) if self.rest == "goes on" else step

    def weights(self, batches: dict[int, Batch], epoch: int) -> dict[int, float]:
        """What each rank's mean gradient counts in a step."""
        count = count_of if self.weighting == "count" else lambda batch: len(batch[0])
        return weights_of(self.weighting, self.world_size, {rank: count(batch) for rank, batch in batches.items()})

    # ------------------------------------------------------------ what is trained

    def build(self) -> Any:
        torch.manual_seed(7)
        net = Net(self).to(self.dtype)
        if self.hooked:
            net.first.weight.register_hook(lambda grad: 3 * grad)
        return net

    def optimizers(self, net: Any, sharded: bool = False) -> list[torch.optim.Optimizer]:
        """Return them; `sharded` is whether ZeRO is among several processes."""
        kinds = self.optimizer.split("+")
        parts = [net] if len(kinds) == 1 else net.parts()
        return [self.make_optimizer(part.parameters(), kind, sharded) for kind, part in zip(kinds, parts, strict=True)]

    def make_optimizer(self, parameters: Iterable[Any], kind: str = "", sharded: bool = False) -> torch.optim.Optimizer:
        kind = kind or self.optimizer
        if kind == "zero" and sharded:
            return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.05)
        made: torch.optim.Optimizer = OPTIMIZERS["adam" if kind == "zero" else kind](parameters)
        return made

    def make_scheduler(self, optimizer: Any, times: int = 1, steps: float | None = None) -> Any:
        """Return a scheduler that is stepped so many times where it should step once."""
        if self.scheduler == "plateau":
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)
        if self.scheduler and self.scheduler.startswith("onecycle"):
            total = int(self.total_steps() if steps is None else steps)
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total, cycle_momentum=False)
        if self.scheduler == "epoch":
            return torch.optim.lr_scheduler.StepLR(optimizer, times, 0.5)
        return torch.optim.lr_scheduler.StepLR(optimizer, 2 * times, 0.8) if self.scheduler else None

    def make_scaler(self, make: Any = torch.amp.GradScaler) -> Any:
        return make(place().type, init_scale=float(self.scaler), growth_interval=2) if self.scaler else None

    def scheduled(self, when: str, synced: bool, skipped: bool) -> int:
        """How often the scheduler is stepped after a "step", or an "epoch"; whether an optimizer has."""
        return int(bool(self.scheduler) and synced and when == ("epoch" if self.scheduler == "epoch" else "step"))

    # ------------------------------------------------------------ what is done in a step

    def before_step(self, net: Any, epoch: int, step: int) -> None:
        """Do what is done to the model itself before a step; before an epoch where the step is -1."""

    def zero(self, net: Any, optimizers: list[Any]) -> None:
        """Clear gradients."""
        if self.clear == "model":
            net.zero_grad()
        else:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none="zeros" not in self.clear)

    def in_turn(self, optimizers: list[Any], step: int) -> list[Any]:
        """Those that step."""
        return optimizers

    def in_turn_to_clear(self, optimizers: list[Any], step: int) -> list[Any]:
        """Those whose gradients are cleared."""
        return optimizers

    def losses(
        self, model: Callable[..., Any], batch: Batch, rank: int, epoch: int = 0, step: int = 0
    ) -> Iterator[Any]:
        """Yield the losses of a step, each of which gets a backward of its own."""
        x, y = batch[-2:]
        counts = 0.0 if rank == self.masked else 1.0
        extra = [True] if self.uses_extra(rank, step) else []
        if self.loss == "penalty":
            x = x.clone().requires_grad_()
            out = model(x, *extra)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            yield ((out - y).pow(2).mean() + slope.pow(2).mean()) * counts
            return
        loss = (model(x, *extra).to(y.dtype) - y).pow(2).mean()  # older torch has no backward of two dtypes
        for number in range(1, 1 + ("two forwards" in self.loss) + 2 * ("three forwards" in self.loss)):
            loss = loss + model((number + 1) * x).pow(2).mean() / number
        yield loss * counts if self.masked >= 0 else loss
        if "two backwards" in self.loss:
            yield model(2 * x).pow(2).mean() * counts

    def uses_extra(self, rank: int, step: int) -> bool:
        """Whether a step uses the extra parameters.

        `sometimes`: only a rank that joins early does, so that all active ones leave them out.
        `turns`: every other step does.
        """
        if self.model == "turns":
            return step % 2 == 0
        lengths = self.lengths_in(0)
        return self.model == "sometimes" and lengths[rank] == min(n for n in lengths if n)

    def joint_losses(self, net: Any, batches: dict[int, Batch], epoch: int, step: int) -> dict[int, Tensor] | None:
        """Return the losses by rank where they come from all active ranks together."""
        return None

    def fill_gradients(self, net: Any) -> None:
        """Set what else has a gradient, in one process."""


class Net(nn.Module):
    """Small models, each with something that DDP treats in its own way."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.kind = run.model
        # What DDP sends before a second forward changes what the first has saved for backward, in older torch.
        norm = run.model == "norm" and (
            run.loss != "two forwards" or has("DDP's two forwards with BatchNorm before a backward")
        )
        # Before a norm a bias has a gradient of rounding errors only, which Adam would blow up.
        self.first = nn.Linear(FEATURES, 5, bias=not norm)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.last = nn.Linear(5, CLASSES)
        if self.kind in ("unused", "sometimes", "turns"):
            self.extra = nn.Linear(FEATURES, CLASSES)
        if self.kind == "sparse":
            self.rows = nn.Embedding(ROWS, FEATURES, sparse=True)

    def forward(self, x: Tensor, use_extra: bool = False) -> Tensor:
        if self.kind == "sparse":
            x = x + self.rows(x[:, 0].long())
        hidden = torch.tanh(self.norm(self.first(x)))
        more = self.extra(x) if use_extra else 0.0  # in the middle of the way
        out: Tensor = self.last(hidden)
        return out + more if use_extra else out

    def parts(self) -> list[nn.Module]:
        """Two models, of which one comes after the other."""
        return [nn.Sequential(self.first, self.norm, nn.Tanh()), self.last]


def loss_of(net: Any, batch: Batch, use_extra: bool = False) -> Tensor:
    loss: Tensor = (net(batch[0], use_extra) - batch[1]).pow(2).mean()
    return loss


class Training:
    """What has a state, and what is done to it: the same on a rank and in one process."""

    def __init__(self, run: Run, net: Any = None, sharded: bool = False) -> None:
        self.run = run
        self.net = run.build() if net is None else net
        self.optimizers = run.optimizers(self.net, sharded)
        self.schedulers = [made for each in self.optimizers if (made := run.make_scheduler(each)) is not None]
        self.scaler = run.make_scaler()
        self.norms: dict[Place, float] = {}
        self.steps, self.skipped = 0, False
        self.updates = 0  # steps in which some parameter had a gradient

    @property
    def rates(self) -> list[float]:
        return [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]

    @property
    def given(self) -> list[Any]:
        """What besides the model has a state."""
        return [*self.optimizers, *self.schedulers, *([] if self.scaler is None else [self.scaler])]

    def begin_epoch(self, epoch: int) -> None:
        self.run.before_step(self.net, epoch, -1)
        if self.run.accumulate > 1 and self.run.rest == "dropped":
            self.net.zero_grad()

    def begin_step(self, epoch: int, step: int) -> None:
        self.run.before_step(self.net, epoch, step)
        if self.run.clear.startswith(("before", "between")) and self.run.begins_window(epoch, step):
            self.clear(step)

    def clear(self, step: int) -> None:
        self.run.zero(self.net, self.run.in_turn_to_clear(self.optimizers, step))

    def backward(self, loss: Tensor) -> None:
        loss = loss / self.run.accumulate
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def end_step(self, epoch: int, step: int, length: int | None = None) -> None:
        if synced := self.run.ends_window(epoch, step, length):
            self.update(epoch, step)
        self.schedule("step", synced, step)
        if synced and self.run.clear.startswith(("after", "model")):
            self.clear(step)

    def end_epoch(self) -> None:
        self.schedule("epoch", True, 0)

    def update(self, epoch: int, step: int) -> None:
        """Clip, and step the optimizers."""
        if self.run.clip:
            for optimizer in self.optimizers if self.scaler is not None else ():
                self.scaler.unscale_(optimizer)
            if (norm := self.clip()) is not None:
                self.norms[epoch, step] = float(norm)
        for optimizer in self.run.in_turn(self.optimizers, step):
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            before = self.scaler.get_scale()
            self.scaler.update()
            self.skipped = self.scaler.get_scale() < before
        self.steps += 1
        self.updates += any(p.grad is not None for p in self.net.parameters())

    def clip(self) -> Any:
        limit: Any = self.run.clip
        if self.run.clip_by == "value":
            return nn.utils.clip_grad_value_(self.net.parameters(), limit)
        return nn.utils.clip_grad_norm_(self.net.parameters(), limit)

    def schedule(self, when: str, synced: bool, step: int) -> None:
        with warnings.catch_warnings():  # where the scaler has skipped the first step
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for scheduler in self.schedulers * self.run.scheduled(when, synced, self.skipped):
                # A value that a joined rank does not know.
                scheduler.step(*([float(step)] if self.run.scheduler == "plateau" else []))

    @torch.no_grad()
    def evaluate(self, model: Callable[[Tensor], Tensor], batches: Iterable[Batch]) -> float:
        """Return the sum of the batches' losses."""
        self.net.eval()
        total = sum(float((model(x) - y).pow(2).mean()) for x, y in batches)
        self.net.train()
        return total


# ---------------------------------------------------------------- one plain process


@dataclass
class Expected:
    """What one process computes; `history` holds the state after every step of the optimizer, by step."""

    training: Training
    history: dict[int, dict[str, Tensor]]
    losses: list[list[float]]  # of an evaluation, by rank and epoch
    last: Place | None = None  # the epoch and batch at which `max_steps` ended it

    @property
    def net(self) -> Any:
        return self.training.net

    @property
    def parameters(self) -> list[Tensor]:
        return [p.detach() for p in self.net.parameters()]

    @property
    def buffers(self) -> list[Tensor]:
        return list(self.net.buffers())

    @property
    def optimizer(self) -> Any:
        """The state of the first optimizer."""
        return self.training.optimizers[0].state_dict()["state"]

    @property
    def steps(self) -> int:
        return self.training.steps

    @property
    def lr(self) -> float:
        return self.training.rates[0]

    @property
    def scaler(self) -> dict[str, Any]:
        return {} if self.training.scaler is None else self.training.scaler.state_dict()


def reference(run: Run, steps: Callable[[int], Steps] | None = None, epochs: int | None = None) -> Expected:
    """Train in one process on the union of the batches; or on `steps` of an epoch, in so many epochs."""
    training = Training(run)
    expected = Expected(training, {}, [[] for _ in range(run.world_size)])
    for epoch in range(run.epochs if epochs is None else epochs):
        training.begin_epoch(epoch)
        of_all = (steps or run.steps)(epoch)
        for step, batches in enumerate(of_all):
            training.begin_step(epoch, step)
            add_gradients(training, batches, run.weights(batches, epoch), epoch, step)
            run.fill_gradients(training.net)
            before = training.steps
            training.end_step(epoch, step, len(of_all))
            if training.steps > before:
                expected.history[training.steps] = copy.deepcopy(training.net.state_dict())
            if training.steps == run.max_steps:
                expected.last = epoch, step
                return expected
        training.end_epoch()
        for rank, losses in enumerate(expected.losses if run.evaluation else []):
            losses.append(training.evaluate(training.net, run.evaluated(rank, epoch)))
    return expected


def add_gradients(
    training: Training, batches: dict[int, Batch], weight: dict[int, float], epoch: int, step: int
) -> None:
    """Add what the ranks' batches give, each times its weight."""
    run, net = training.run, training.net
    if (found := run.joint_losses(net, batches, epoch, step)) is not None:
        if found:
            training.backward(torch.stack([weight[rank] * loss for rank, loss in found.items()]).sum())
        return
    buffers = dict(net.named_buffers())
    before = copy.deepcopy(buffers)
    for rank in sorted(batches, reverse=True):
        # Every rank starts from the same buffers; those of the lowest rank are kept.
        for name, buffer in buffers.items():
            buffer.copy_(before[name])
        for loss in run.losses(net, batches[rank], rank, epoch, step):
            backward(net.parameters(), loss, weight[rank], training.backward)


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


# ---------------------------------------------------------------- comparing


def difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The greatest difference of two elements, and infinity where only one is NaN, which `max` would not see."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True)]
    largest = [float((a - b).masked_fill(a.isnan() & b.isnan(), 0).abs().max()) for a, b in pairs]
    return math.inf if any(map(math.isnan, largest)) else max(largest, default=0.0)


def flatten(state: Any) -> list[Tensor]:
    """All tensors in an optimizer's state, in one order."""
    if isinstance(state, dict):
        return [tensor for key in sorted(state, key=str) for tensor in flatten(state[key])]
    if isinstance(state, Tensor):
        return [state.to_dense() if state.is_sparse else state]
    return []


def same_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def whole_state(rank: int, optimizer: Any) -> Any:
    """The state of an optimizer; of ZeRO the consolidated one, by way of the first rank. All ranks call it."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.consolidate_state_dict(to=0)
    state = [optimizer.state_dict()["state"] if rank == 0 else None]
    torch.distributed.broadcast_object_list(state)
    return copy.deepcopy(state[0])
