"""A `Run` of a sharded model, and what its blocks do that sharding must follow."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support import run
from tests.support.run import TOLERANCE, Batch, Place, Run

LOOSE = 2e-6  # of float32
SIZE, EPOCHS = 6, 3


@dataclass(frozen=True)
class Recipe(Run):
    """A run of a sharded model.

    In each second epoch the ranks' lengths are swapped, so that a rank that has joined early trains on.
    """

    lengths: tuple[int, ...] = (5, 2)
    optimizer: str = "adamw"
    api: str = "fsdp2"
    split: int = 1  # optimizers, each of its share of the parameters
    groups: int = 1  # of an optimizer, with rates of their own
    no_sync: bool = False
    no_all_reduce: bool = False  # of replicas, before a window's end
    clears: str = "zero_grad"  # `clear` may be "between" forward and backward, too
    loop: str = "batches"  # or "plain"
    options: dict[str, Any] = field(default_factory=dict)  # of FSDP
    framework: dict[str, Any] = field(default_factory=dict)  # what else Lightning or Accelerate is to do

    @property
    def peers(self) -> int:
        """How many ranks compute each batch together."""
        return int(self.options.get("tensor", 1))

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.dtype == torch.float64 else LOOSE

    def lengths_in(self, epoch: int) -> tuple[int, ...]:
        return self.lengths[::-1] if epoch % 2 else self.lengths

    def batch(self, rank: int, epoch: int, index: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * epoch + 50 * rank + index)
        rows = 2 + (rank + 2 * index + epoch) % 4
        x, y = (torch.randn(rows, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
        # By this number the models below choose their path: alike on all ranks that have this step.
        x[:, 0] = 0.5 if (epoch + index) % 2 else -0.5
        return x.to(self.dtype), y.to(self.dtype)

    def evaluated(self, rank: int, epoch: int) -> list[Batch]:
        return self.batches(rank, epoch)

    def length(self, epoch: int) -> int:
        """The number of steps, where ranks break too: a window that they leave goes on, if at all, as far on."""
        return max(self.lengths)

    def ends_window(self, epoch: int, step: int, length: int | None = None) -> bool:
        return super().ends_window(epoch, step, self.length(epoch))

    def build(self) -> "Net":
        torch.manual_seed(1)
        return Net(self.model).to(self.dtype)

    def optimizers(self, net: nn.Module, sharded: bool = False) -> list[torch.optim.Optimizer]:
        parameters = [*net.parameters()]
        return [self.make_optimizer(parameters[index :: self.split]) for index in range(self.split)]

    def make_optimizer(self, parameters: Iterable[Any], kind: str = "", sharded: bool = False) -> torch.optim.Optimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        shares = [trained[index :: self.groups] for index in range(self.groups)]
        optimizer = super().make_optimizer([{"params": share} for share in shares if share])
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] /= index + 1
        return optimizer

    def fill_gradients(self, net: Any) -> None:
        """Set zeros, from the first use on, where the others have no gradient, if FSDP does."""
        if self.options.get("unused"):
            used = net.__dict__.setdefault("used", set())
            used |= {p for p in net.parameters() if p.grad is not None or self.model == "partly used"}
            for p in used:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad


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
    """What a training ends with; `norms` by step, `losses` by epoch, of a rank its own, or of each."""

    state: dict[str, Tensor]
    moments: dict[str, Tensor]
    norms: dict[Place, float]
    losses: dict[int, Any]
    rate: float


def expected_of(recipe: Recipe) -> Trained:
    """Train in one process on the union of the batches."""
    training = run.reference(recipe)
    trained = training.training
    moments = {
        f"{name}.{key}": value
        for name, p in training.net.named_parameters()
        for optimizer in trained.optimizers
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }
    state = {name: value.detach() for name, value in training.net.state_dict().items()}
    return Trained(state, moments, trained.norms, dict(enumerate(zip(*training.losses, strict=True))), training.lr)


def differences(mine: Trained, rank: int, wanted: Trained, recipe: Recipe) -> dict[str, float]:
    """Return how far a rank is off, in each thing that it knows."""
    found = {f"parameter {name}": _apart(mine.state[name], value) for name, value in wanted.state.items()}
    found |= {f"state {name}": _apart(value, wanted.moments[name]) for name, value in mine.moments.items()}
    found |= {f"norm at {step}": abs(norm - wanted.norms[step]) for step, norm in mine.norms.items()}
    for epoch, value in mine.losses.items():
        found[f"loss of epoch {epoch}"] = abs(value - wanted.losses[epoch][rank])
    found["learning rate"] = abs(mine.rate - wanted.rate)
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())
