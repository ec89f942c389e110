"""One training of a sharded model, described once, and done by one plain process: what all combinations share."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

TOLERANCE = 1e-10
LOOSE = 2e-6  # of float32
SIZE, EPOCHS = 6, 3
Batch = tuple[Tensor, Tensor]
Step = tuple[int, int]  # its epoch, and its number in it
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "plain": partial(torch.optim.SGD, lr=0.05),
    "nesterov": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.02),
    "amsgrad": partial(torch.optim.Adam, lr=0.02, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


@dataclass(frozen=True)
class Recipe:
    """A training.

    In each second epoch the ranks' lengths are swapped, so that a rank that has joined early trains on.
    """

    lengths: tuple[int, ...] = (5, 2)
    api: str = "fsdp2"
    kind: str = "mlp"
    weighting: str = "world"
    optimizer: str = "adamw"
    optimizers: int = 1  # each of its share of the parameters
    groups: int = 1  # of an optimizer, with rates of their own
    scheduled: bool = False
    per_epoch: bool = False  # the scheduler steps
    clip: float = 0.0
    clip_by: str = "norm"  # or "value"
    window: int = 1  # micro-batches of a step
    no_sync: bool = False
    cut: bool = False  # a window goes on in the next epoch
    no_all_reduce: bool = False  # of replicas, before a window's end
    clears: str = "zero_grad"
    where: str = "before"  # a window's first forward; "between" that and its backward; "after" the step
    masked: int = -1  # the rank whose losses count nothing
    forwards: int = 1  # of each backward
    doubled: bool = False  # each step has two forwards, each with its backward
    evaluates: str = ""  # in the same `with`, in another one, or without a loop's batches
    loop: str = "batches"
    may_break: bool = False
    scaled: float = 0.0  # the scale of a `GradScaler` to begin with
    stops: int = 0  # the step at whose end all ranks break
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)  # of FSDP
    framework: dict[str, Any] = field(default_factory=dict)  # what else Lightning or Accelerate is to do

    @property
    def world_size(self) -> int:
        return len(self.lengths)

    @property
    def team(self) -> int:
        """How many ranks compute each batch together."""
        return int(self.options.get("tensor", 1))

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.dtype == torch.float64 else LOOSE

    def but(self, **changes: Any) -> "Recipe":
        return replace(self, **changes)

    def lengths_in(self, epoch: int) -> tuple[int, ...]:
        return self.lengths[::-1] if epoch % 2 else self.lengths

    def batches(self, epoch: int, rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1000 * epoch + rank)
        found = []
        for step in range(self.lengths_in(epoch)[rank]):
            rows = 2 + (rank + 2 * step + epoch) % 4
            x = torch.randn(rows, SIZE, generator=generator, dtype=torch.float64)
            # By this number the models below choose their path: alike on all ranks that have this step.
            x[:, 0] = 0.5 if (epoch + step) % 2 else -0.5
            y = torch.randn(rows, SIZE, generator=generator, dtype=torch.float64)
            found.append((x.to(self.dtype), y.to(self.dtype)))
        return found

    def ends_window(self, epoch: int, step: int) -> bool:
        longest = max(self.lengths)
        number = epoch * longest + step if self.cut else step
        return (number + 1) % self.window == 0 or (not self.cut and step + 1 == longest)

    def begins_window(self, epoch: int, step: int) -> bool:
        longest = max(self.lengths)
        return (epoch * longest + step if self.cut else step) % self.window == 0

    def model(self) -> "Net":
        torch.manual_seed(1)
        return Net(self.kind).to(self.dtype)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        make = OPTIMIZERS[self.optimizer]
        rate = make.keywords["lr"]
        shares = [trained[index :: self.groups] for index in range(self.groups)]
        groups = [{"params": share, "lr": rate / (index + 1)} for index, share in enumerate(shares) if share]
        found: torch.optim.Optimizer = make(groups)
        return found

    def make_optimizers(self, parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return [self.make_optimizer(trained[index :: self.optimizers]) for index in range(self.optimizers)]

    def make_scheduler(self, optimizer: Any, times: int = 1) -> Any:
        """Return one that is stepped so many times where this should step once."""
        every = 1 if self.per_epoch else 3
        return torch.optim.lr_scheduler.StepLR(optimizer, every * times, 0.5) if self.scheduled else None

    def losses(self, model: Callable[[Tensor], Tensor], batch: Batch, rank: int) -> Iterator[Tensor]:
        """Yield what each backward of a step begins with."""
        x, y = batch
        counts = (0.0 if rank == self.masked else 1.0) / self.window
        loss = functional.mse_loss(model(x).to(y.dtype), y)  # older torch has no backward of two dtypes
        for number in range(1, self.forwards):
            loss = loss + 0.5 * model(x / (number + 1)).pow(2).mean()
        yield loss * counts
        if self.doubled:
            yield model(2 * x).pow(2).mean() * counts


class Block(nn.Module):
    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        width = 2 * SIZE + (kind != "of even width")  # an odd one is not divided evenly
        self.wide, self.narrow = nn.Linear(SIZE, width), nn.Linear(width, SIZE)
        self.kind, self.other_way = kind, False
        if kind == "partly used":
            self.gate = nn.Parameter(torch.ones(SIZE))
        if kind == "frozen" and index == 1:
            self.requires_grad_(False)
        if kind == "partly frozen":
            self.wide.weight.requires_grad_(False)

    def inner(self, x: Tensor) -> Tensor:
        if self.kind == "partly used" and self.other_way:
            return x + self.gate * self.narrow(functional.gelu(self.wide(x)))
        return x + self.narrow(functional.gelu(self.wide(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("checkpointed"):
            found: Tensor = checkpoint(self.inner, x, use_reentrant=self.kind.endswith("reentrant"))
            return found
        return self.inner(x)


class Net(nn.Module):
    """Blocks between two layers; the batch decides which of them run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(Block(kind, index) for index in range(3))
        self.last = nn.Linear(SIZE, SIZE)
        if kind == "tied":
            self.last.weight = self.first.weight
        if kind == "unused":
            self.sometimes = Block("mlp", 9)

    def forward(self, x: Tensor) -> Tensor:
        other_way = bool(x[0, 0] > 0)
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if (self.kind == "skipping" and other_way and index == 1) or (
                self.kind == "either" and index == (2 if other_way else 1)
            ):
                continue
            block.other_way = other_way
            x = block(x)
            if self.kind == "repeating" and other_way:
                x = block(x)
        if self.kind == "unused" and other_way:
            x = self.sometimes(x)
        found: Tensor = self.last(x)
        return found


class Trained(NamedTuple):
    """What a training ends with; `norms` and `losses` by step and epoch, of a rank only its own."""

    state: dict[str, Tensor]
    moments: dict[str, Tensor]
    norms: dict[Step, float]
    losses: dict[int, list[float]]
    rate: float


def weights(weighting: str, world_size: int, rows: dict[int, int]) -> dict[int, float]:
    """Return by rank what its loss counts."""
    if weighting == "samples":
        return {rank: mine / sum(rows.values()) for rank, mine in rows.items()}
    return dict.fromkeys(rows, 1 / (world_size if weighting == "world" else len(rows)))


def reference(recipe: Recipe) -> Trained:
    """Train in one process on the union of the batches."""
    net = recipe.model()
    optimizers = recipe.make_optimizers(net.parameters())
    schedulers = [recipe.make_scheduler(optimizer) for optimizer in optimizers if recipe.scheduled]
    norms: dict[Step, float] = {}
    losses: dict[int, list[float]] = {}
    used: set[nn.Parameter] = set()
    for epoch in range(EPOCHS):
        data = [recipe.batches(epoch, rank) for rank in range(recipe.world_size)]
        for step in range(recipe.stops or max(recipe.lengths)):
            here = {rank: mine[step] for rank, mine in enumerate(data) if step < len(mine)}
            counts = weights(recipe.weighting, recipe.world_size, {rank: len(x) for rank, (x, _) in here.items()})
            if recipe.begins_window(epoch, step):
                net.zero_grad()
            for rank, batch in here.items():
                for loss in recipe.losses(net, batch, rank):
                    (counts[rank] * loss).backward()
            if recipe.options.get("unused"):  # zeros, from the first use on, where the others have no gradient
                used |= {p for p in net.parameters() if p.grad is not None or recipe.kind == "partly used"}
                for p in used:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if recipe.ends_window(epoch, step):
                if recipe.clip and recipe.clip_by == "value":
                    nn.utils.clip_grad_value_(net.parameters(), recipe.clip)
                elif recipe.clip:
                    norms[epoch, step] = float(nn.utils.clip_grad_norm_(net.parameters(), recipe.clip))
                for each in [*optimizers, *([] if recipe.per_epoch else schedulers)]:
                    each.step()
        for scheduler in schedulers if recipe.per_epoch else []:
            scheduler.step()
        with torch.no_grad():
            scored = data if recipe.evaluates else []
            losses[epoch] = [sum(functional.mse_loss(net(x), y).item() for x, y in mine) for mine in scored]
    moments = {
        f"{name}.{key}": value
        for name, p in net.named_parameters()
        for optimizer in optimizers
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }
    state = {name: value.detach() for name, value in net.state_dict().items()}
    return Trained(state, moments, norms, losses, optimizers[0].param_groups[0]["lr"])


def differences(mine: Trained, rank: int, wanted: Trained, recipe: Recipe) -> dict[str, float]:
    """Return how far a rank is off, in each thing that it knows."""
    found = {f"parameter {name}": _apart(mine.state[name], value) for name, value in wanted.state.items()}
    found |= {f"state {name}": _apart(value, wanted.moments[name]) for name, value in mine.moments.items()}
    found |= {f"norm at {step}": abs(norm - wanted.norms[step]) for step, norm in mine.norms.items()}
    for epoch, values in mine.losses.items():
        found[f"loss of epoch {epoch}"] = abs(sum(values) - wanted.losses[epoch][rank])
    found["learning rate"] = abs(mine.rate - wanted.rate)
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())
