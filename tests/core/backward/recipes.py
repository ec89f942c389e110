"""Random programs with collectives at random places of forward, loss and backward, and what one process computes."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.core.backward.programs import whole_parameters
from tests.core.backward.synced import SyncNorm
from tests.emulator import place
from tests.needs import has
from torch_join import Join

WIDTH, ROWS = 6, 2
PLACES = ("linear", "linear", "relu", "norm", "norm in another group", "checkpointed norm", "sum", "rows", "own")
if not has("hooks that a checkpoint's second run leaves"):  # what such a norm does there is refused
    PLACES = tuple("norm" if place == "checkpointed norm" else place for place in PLACES)


@dataclass(frozen=True)
class Recipe:
    seed: int
    lengths: tuple[int, ...]
    layers: tuple[str, ...]
    losses: tuple[str, ...]
    weighting: str
    window: int
    api: str
    wrapper: tuple[tuple[str, Any], ...]
    stream: bool
    may_break: bool
    extra: bool
    adam: bool
    epochs: int = 2

    @property
    def world_size(self) -> int:
        return len(self.lengths)

    def batch(self, rank: int, step: int, epoch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 7919 + rank * 101 + step * 13 + epoch)
        rows = ROWS + int(torch.randint(3, (), generator=generator))
        x, y = (torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
        return x, y

    def syncs(self, step: int) -> bool:
        return (step + 1) % self.window == 0 or step + 1 == max(self.lengths)


def draw(seed: int) -> Recipe:
    """Draw a program."""
    pick = random.Random(seed)
    world_size = pick.choice((2, 2, 3, 3, 4))
    lengths = [pick.randrange(6) for _ in range(world_size)]
    lengths[pick.randrange(world_size)] = pick.randrange(2, 6)
    middle = [pick.choice(PLACES) for _ in range(pick.randrange(1, 6))]
    losses = pick.sample(["contrast", "mean"], pick.randrange(3))
    api = pick.choice(("ddp",) * 6 + ("fsdp2", "fsdp1"))
    weighting = pick.choice(("world", "active", "samples") if api == "ddp" else ("world", "active"))
    window = pick.choice((1, 1, 2)) if api == "ddp" else 1
    extra = api == "ddp" and pick.random() < 0.25
    wrapper: dict[str, Any] = {"bucket_cap_mb": pick.choice((0.0002, 0.0005, 25))}
    if extra:
        wrapper["find_unused_parameters"] = True
    elif pick.random() < 0.15 and window == 1:
        wrapper["static_graph"] = True
    if pick.random() < 0.3:
        wrapper["gradient_as_bucket_view"] = True
    layers = ("linear", *middle, "linear")
    options = tuple(wrapper.items()) if api == "ddp" else ()
    booleans = [pick.random() < 0.3, pick.random() < 0.2, extra, pick.random() < 0.5]
    return Recipe(seed, tuple(lengths), layers, tuple(losses), weighting, window, api, options, *booleans)


class _Ranks:
    """What the ranks compute together: here each in a process of its own."""

    def __init__(self, join: Join, rank: int) -> None:
        self.join, self.rank = join, rank

    @property
    def active(self) -> list[int]:
        return list(self.join.active_ranks)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return dnn.all_reduce(parts[0])  # type: ignore[no-any-return,no-untyped-call]

    def rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(self.join.all_gather(parts[0], sync_grads=True))

    def norm(self, norm: nn.Module, parts: Sequence[Tensor]) -> list[Tensor]:
        return [norm(parts[0])]

    def own(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [_Own.apply(parts[0])]  # type: ignore[no-untyped-call]


class _Own(torch.autograd.Function):
    """A collective in forward and one in backward, whose sum is thrown away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x.new_ones(3))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient.new_ones(5))
        return gradient


class _Together:
    """The same in one process, for all of them at once."""

    def __init__(self, active: list[int]) -> None:
        self.active = active

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts)).sum(0)

    def rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def norm(self, norm: nn.Module, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(norm(torch.cat(list(parts))).split([len(part) for part in parts]))

    def own(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)


class Net(nn.Module):
    def __init__(self, recipe: Recipe, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.kinds = recipe.layers
        groups = {"norm": None, "checkpointed norm": None, "norm in another group": group}
        self.layers = nn.ModuleList(
            SyncNorm(WIDTH, groups[kind])
            if kind in groups
            else nn.Linear(WIDTH, WIDTH)
            if kind == "linear"
            else nn.Identity()
            for kind in recipe.layers
        )
        self.extra = nn.Linear(WIDTH, WIDTH) if recipe.extra else None
        self.double()

    def forward(self, parts: list[Tensor], ranks: Any, uses_extra: bool = False) -> list[Tensor]:
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind == "linear":
                parts = [layer(x) for x in parts]
            elif kind == "relu":
                parts = [x.relu() for x in parts]
            elif kind == "checkpointed norm":
                parts = list(checkpoint(lambda *xs, n=layer: tuple(ranks.norm(n, xs)), *parts, use_reentrant=False))
            elif "norm" in kind:
                parts = ranks.norm(layer, parts)
            elif kind == "sum":
                total = ranks.total([x.mean(0) for x in parts]) / len(ranks.active)
                parts = [x + total for x in parts]
            elif kind == "rows":
                rows = ranks.rows([x.mean(0) for x in parts])
                parts = [x * torch.stack(rows).square().mean(0).add(1).rsqrt() for x in parts]
            else:
                parts = ranks.own(parts)
        return [self.extra(x) for x in parts] if self.extra is not None and uses_extra else parts


def losses_of(
    recipe: Recipe, outputs: list[Tensor], targets: list[Tensor], ranks: Any, mine: list[int]
) -> list[Tensor]:
    losses = [(x - y).square().mean() for x, y in zip(outputs, targets, strict=True)]
    if "contrast" in recipe.losses:
        everyone = torch.cat(ranks.rows([x[:ROWS] for x in outputs]))
        for index, rank in enumerate(mine):
            first = ranks.active.index(rank) * ROWS
            labels = torch.arange(first, first + ROWS)
            losses[index] = losses[index] + cross_entropy(outputs[index][:ROWS] @ everyone.T / 4, labels)
    if "mean" in recipe.losses:
        mean = ranks.total([x.mean(0) for x in outputs]) / len(ranks.active)
        losses = [loss + mean.square().sum() for loss in losses]
    return losses


def _optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    if recipe.adam:
        return torch.optim.Adam(model.parameters(), 1e-2, eps=1e-2)
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def reference(recipe: Recipe) -> list[Tensor]:
    net = Net(recipe)
    optimizer = _optimizer(recipe, net)
    for epoch in range(recipe.epochs):
        optimizer.zero_grad()
        for step in range(max(recipe.lengths)):
            active = [rank for rank, length in enumerate(recipe.lengths) if length > step]
            batches = [recipe.batch(rank, step, epoch) for rank in active]
            ranks = _Together(active)
            outputs = net([x for x, _ in batches], ranks, step % 2 == 1)
            losses = losses_of(recipe, outputs, [y for _, y in batches], ranks, active)
            sizes = [len(x) for x, _ in batches]
            share = {"world": 1 / recipe.world_size, "active": 1 / len(active)}
            shares = [share.get(recipe.weighting, size / sum(sizes)) for size in sizes]
            torch.stack([loss * part for loss, part in zip(losses, shares, strict=True)]).sum().backward()
            if recipe.syncs(step):
                optimizer.step()
                optimizer.zero_grad()
    return [*(p.detach() for p in net.parameters()), *net.buffers()]


def train(rank: int, recipe: Recipe) -> list[Tensor]:
    net = Net(recipe, dist.new_group(range(recipe.world_size)))
    model: Any
    if recipe.api == "fsdp2":
        for layer in net.layers:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        model = fully_shard(net)
    elif recipe.api == "fsdp1":
        model = FullyShardedDataParallel(net, device_id=place(), use_orig_params=True)
    else:
        model = DistributedDataParallel(net, **dict(recipe.wrapper))
    optimizer = _optimizer(recipe, model)
    with Join([model, optimizer], weighting=recipe.weighting, may_break=recipe.may_break) as join:  # type: ignore[arg-type]
        ranks = _Ranks(join, rank)
        for epoch in range(recipe.epochs):
            batches = [recipe.batch(rank, step, epoch) for step in range(recipe.lengths[rank])]
            optimizer.zero_grad()
            for x, y in join.batches(iter(batches) if recipe.stream else batches):
                step = join.step
                syncs = recipe.syncs(step)
                with nullcontext() if syncs else model.no_sync():
                    outputs = model([x], ranks, step % 2 == 1)
                    losses_of(recipe, outputs, [y], ranks, [rank])[0].backward()
                if syncs:
                    optimizer.step()
                    optimizer.zero_grad()
    return [*whole_parameters(net, model), *(b.detach().clone() for b in net.buffers())]
