"""Runs with collectives in forward, loss and backward, which one process does on the union of the ranks' batches."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.core.backward.synced import SyncNorm
from tests.emulator import place
from tests.needs import has
from tests.support.front_ends import plain
from tests.support.front_ends.plain import Loop
from tests.support.run import TOLERANCE, Batch, difference, reference, same_bits
from torch_join import Join

WIDTH, ROWS = 6, 3  # rows of each rank, in a contrastive loss
NORMS = ("linear", "norm", "relu", "block", "linear")
PLACES = ("linear", "linear", "relu", "norm", "norm in another group", "checkpointed norm", "sum", "rows", "own")
if not has("parameter hooks that a checkpoint's rerun keeps"):  # what such a norm does there is refused
    PLACES = tuple("norm" if place == "checkpointed norm" else place for place in PLACES)
# What an option stands for.
FIELDS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "scaler": {"scaler": 2.0**10},
    "stream": {"iterable": True},
    "heartbeat": {"may_break": True},
    "rebalance": {"rebalance": True},
    "accumulates": {"accumulate": 2},
}


@dataclass(frozen=True)
class Program(Loop):
    """A run of a model whose layers, or whose losses, the ranks compute together.

    Every name in `options` is looked for below; so is every layer's, in `Net`.
    """

    epochs: int = 2
    optimizer: str = "sgd"
    rest: str = "steps"
    one_context: bool = True
    options: frozenset[str] = frozenset()
    layers: tuple[str, ...] = NORMS

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in self.options & FIELDS.keys():
            for name, value in FIELDS[option].items():
                object.__setattr__(self, name, value)
        if "subgroup" in self.options and "no switch" not in self.options:
            object.__setattr__(self, "extra", {"backward_collectives": True})

    def batch(self, rank: int, epoch: int, index: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * rank + index + 77 * epoch + 9999 * self.seed)
        rows = ROWS + (rank + 2 * index) % 4
        x, y = (torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
        return x, y

    def build(self) -> Any:
        """Return a model, or two; on ranks with groups of their own, where they are asked for."""
        group = None
        if dist.is_initialized() and "subgroup" in self.options:
            # By default a rank whose peer has ended with an error waits for half an hour.
            pairs = [range(2), range(2, self.world_size)]
            group = [dist.new_group(pair, timeout=timedelta(seconds=20)) for pair in pairs][dist.get_rank() >= 2]
        elif dist.is_initialized() and ("group" in self.options or "norm in another group" in self.layers):
            group = dist.new_group(range(self.world_size))
        net = Net(self, group)
        if not {"summed", "chained"} & self.options:
            return net
        second = Net(self)
        for parameter in second.parameters():
            parameter.data.mul_(0.7)
        return nn.ModuleList([net, second])

    def make_optimizer(self, parameters: Any, kind: str = "", sharded: bool = False) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, 1e-2, eps=1e-2)
        return torch.optim.SGD(parameters, 0.05, momentum=0.9)

    def wrap(self, net: Any) -> tuple[list[nn.Module], Any]:
        """Have DDP, or FSDP of one generation, average the gradients."""
        models = list(map(self._wrapped, net if isinstance(net, nn.ModuleList) else [net]))
        return models, models

    def _wrapped(self, net: "Net") -> Any:
        if "fsdp2" in self.options:
            for layer in net.layers:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer)
            return fully_shard(net)
        if "fsdp1" in self.options:
            return FullyShardedDataParallel(net, device_id=place(), use_orig_params=True)
        model: Any = torch.compile(net, backend="aot_eager") if "compiled" in self.options else net
        ddp = DistributedDataParallel(model, **{"bucket_cap_mb": 0.0005, **self.ddp})
        if "hook" in self.options:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        if "fp16 hook" in self.options:
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return ddp

    # ------------------------------------------------------------ the losses, of one rank or of all

    def losses_with(self, join: Any, model: Any, batch: Batch, rank: int, epoch: int, step: int) -> Iterator[Tensor]:
        how = "functional" if "functional" in self.options else "ours" if "ours" in self.options else ""
        if "evaluates" in self.options:
            model[0].eval()
            with torch.no_grad():
                model[0](batch[0])
            model[0].train()
        yield self.loss_on(model, batch, Ranks(join, rank, how), step)

    def loss_on(self, models: Any, batch: Batch, ranks: "Ranks", step: int) -> Tensor:
        """The loss of one rank."""
        x, y = batch
        x.requires_grad_("penalty" in self.options)
        outputs = self.outputs(models, [x], ranks, step)
        return self.terms(outputs, [y], [x], ranks, [ranks.rank])[0]

    def joint_losses(self, net: Any, batches: dict[int, Batch], epoch: int, step: int) -> dict[int, Tensor]:
        models = net if isinstance(net, nn.ModuleList) else [net]
        active = sorted(batches)
        model_parallel_groups = (
            [[r for r in active if r < 2], [r for r in active if r >= 2]] if "subgroup" in self.options else [active]
        )
        inputs = [batches[rank][0].requires_grad_("penalty" in self.options) for rank in active]
        outputs: list[Tensor] = []
        for peers in filter(None, model_parallel_groups):  # in order of the ranks
            outputs += self.outputs(models, [batches[rank][0] for rank in peers], Together(peers), step)
        losses = self.terms(outputs, [batches[rank][1] for rank in active], inputs, Together(active), active)
        return dict(zip(active, losses, strict=True))

    def outputs(self, models: Any, inputs: list[Tensor], ranks: Any, step: int) -> list[Tensor]:
        outputs = models[0](inputs, ranks, step)
        if "summed" in self.options:
            return [a + b for a, b in zip(outputs, models[1](inputs, ranks, step), strict=True)]
        return models[1](outputs, ranks, step) if "chained" in self.options else outputs  # type: ignore[no-any-return]

    def terms(
        self, outputs: list[Tensor], targets: list[Tensor], inputs: list[Tensor], ranks: Any, mine: list[int]
    ) -> list[Tensor]:
        losses = [(x - y).square().mean() for x, y in zip(outputs, targets, strict=True)]
        if "penalty" in self.options:
            for index, (out, x) in enumerate(zip(outputs, inputs, strict=True)):
                (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
                losses[index] = losses[index] + gradient.square().mean()
        if "contrast" in self.options:
            everyone = torch.cat(ranks.rows([x[:ROWS] for x in outputs]))
            for index, rank in enumerate(mine):
                first = ranks.active.index(rank) * ROWS
                labels = torch.arange(first, first + ROWS)
                losses[index] = losses[index] + cross_entropy(outputs[index][:ROWS] @ everyone.T / 4, labels)
        if "mean" in self.options:
            mean = ranks.total([x.mean(0) for x in outputs]) / len(ranks.active)
            losses = [loss + mean.square().sum() for loss in losses]
        return losses


class Ranks:
    """What the ranks compute together: here each in a process of its own."""

    def __init__(self, join: Any, rank: int, how: str = "") -> None:
        self.join, self.rank, self.how = join, rank, how

    @property
    def active(self) -> list[int]:
        return list(self.join.active_ranks)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return dnn.all_reduce(parts[0])  # type: ignore[no-any-return,no-untyped-call]

    def rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if self.how == "ours":
            return list(self.join.all_gather(parts[0], sync_grads=True))
        if self.how == "functional":
            gathered: Any = all_gather_tensor_autograd(parts[0].contiguous(), 0, dist.group.WORLD)
            every = gathered.chunk(dist.get_world_size())
        else:
            every = dnn.all_gather(parts[0])  # type: ignore[no-untyped-call]
        return [every[rank] for rank in self.active]

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


class Together:
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
    """Layers, one after the other, of the inputs of one rank or of all."""

    def __init__(self, program: Program, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1 + program.seed)
        self.options = program.options
        make = nn.Identity if "no norm" in program.options else SyncNorm
        kinds: dict[str, Any] = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "norm": partial(make, WIDTH, group if program.options & {"group", "subgroup"} else None),
            "checkpointed norm": partial(SyncNorm, WIDTH),
            "norm in another group": partial(SyncNorm, WIDTH, group),
        }
        self.kinds: list[str] = []
        for kind in program.layers:  # a block is recomputed as a whole
            self.kinds += ["linear", "norm", "relu"] if kind == "block" else [kind]
        self.first_of_block = program.layers.index("block") if "block" in program.layers else -1
        self.layers = nn.ModuleList(kinds.get(kind, nn.Identity)() for kind in self.kinds)
        self.extra = nn.Linear(WIDTH, WIDTH) if "unused" in program.options else None
        if "frozen" in program.options:
            self.layers[self.first_of_block].requires_grad_(False)
        self.double()

    def forward(self, x: Any, ranks: Any = None, step: int = 0) -> Any:
        """Return the outputs of some inputs, or of one."""
        ranks = Ranks(None, 0) if ranks is None else ranks
        parts, index = [x] if isinstance(x, Tensor) else list(x), 0
        while index < len(self.kinds):
            end = index + 1
            if index == self.first_of_block and "checkpoint" in self.options:
                end = index + 3
                run = partial(self._run, ranks, index, end)
                parts = list(checkpoint(lambda *xs, run=run: tuple(run(list(xs))), *parts, use_reentrant=False))
            else:
                parts = self._run(ranks, index, end, parts)
            index = end
        if self.extra is not None and step % 2:
            parts = [self.extra(part) for part in parts]
        return parts[0] if isinstance(x, Tensor) else parts

    def _run(self, ranks: Any, start: int, end: int, parts: list[Tensor]) -> list[Tensor]:
        for kind, layer in zip(self.kinds[start:end], self.layers[start:end], strict=True):
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
        return parts


def train(rank: int, program: Program) -> list[Tensor]:
    """Train this rank's share; return parameters and buffers."""
    outcome = plain.train(rank, program)
    return [*outcome.parameters, *outcome.buffers]


def draw(seed: int) -> Program:
    """Draw a program."""
    pick = random.Random(seed)
    world_size = pick.choice((2, 2, 3, 3, 4))
    lengths = [pick.randrange(6) for _ in range(world_size)]
    lengths[pick.randrange(world_size)] = pick.randrange(2, 6)
    middle = [pick.choice(PLACES) for _ in range(pick.randrange(1, 6))]
    api = pick.choice(("ddp",) * 6 + ("fsdp2", "fsdp1"))
    options = {*pick.sample(["contrast", "mean"], pick.randrange(3)), api, pick.choice(("ours", "functional", ""))}
    options |= {name for name, chance in (("stream", 0.3), ("heartbeat", 0.2), ("adam", 0.5)) if pick.random() < chance}
    wrapper: dict[str, Any] = {"bucket_cap_mb": pick.choice((0.0002, 0.0005, 25))}
    if api == "ddp":
        options |= {"accumulates"} if pick.random() < 0.33 else set()
        if pick.random() < 0.25:
            options |= {"unused"}
            wrapper["find_unused_parameters"] = True
        elif pick.random() < 0.15 and "accumulates" not in options:
            wrapper["static_graph"] = True
        if pick.random() < 0.3:
            wrapper["gradient_as_bucket_view"] = True
    weighting = pick.choice(("world", "active", "samples") if api == "ddp" else ("world", "active"))
    layers = ("linear", *middle, "linear")
    program = Program(tuple(lengths), weighting=weighting, options=frozenset(options), layers=layers, seed=seed)
    return replace(program, ddp=wrapper)


def assert_exact(program: Program, results: list[list[Tensor]], buffers: bool = True) -> None:
    expected = reference(program)
    want = [*expected.parameters, *(expected.buffers if buffers else ())]
    for mine in results:
        assert difference(mine[: len(want)], want) <= TOLERANCE
        assert same_bits(mine[: len(want)], results[0][: len(want)])


def loses_hooks(program: Program) -> bool:
    return "checkpoint" in program.options and not has("parameter hooks that a checkpoint's rerun keeps")


UNUSED = (("find_unused_parameters", True),)


STATIC = (("static_graph", True),)


KINDS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]] = {
    "norms": ((), ()),
    "norms, Adam": (("adam",), ()),
    "norms, checkpoint": (("checkpoint",), ()),
    "norms, accumulation": (("accumulates",), ()),
    "norms, evaluation in between": (("evaluates",), ()),
    "norms in a group of their own": (("group",), ()),
    "norms, unused parameters": (("unused",), UNUSED),
    "norms, unused parameters, accumulation": (("unused", "accumulates"), UNUSED),
    "norms, static graph": ((), STATIC),
    "norms, bucket views": ((), (("gradient_as_bucket_view", True),)),
    "norms, one bucket": ((), (("bucket_cap_mb", 25),)),
    "norms, communication hook": (("hook",), ()),
    "norms, buffers of each rank's own": ((), (("broadcast_buffers", False),)),
    "norms, streams": (("stream",), ()),
    "norms, heartbeat": (("may_break",), ()),
    "norms, frozen parameters": (("frozen",), ()),
    "norms, scaler": (("scaler",), ()),
    "norms, two models summed": (("summed",), ()),
    "norms, two models chained": (("chained",), ()),
    "mean over ranks, gradient penalty": (("no norm", "mean", "penalty"), ()),
    "contrastive loss, compiled": (("no norm", "contrast", "compiled"), (("bucket_cap_mb", 25),)),
    "contrastive loss by a functional collective": (("no norm", "contrast", "functional"), ()),
    "contrastive loss": (("no norm", "contrast"), ()),
    "contrastive loss by our gather": (("no norm", "contrast", "ours"), ()),
    "mean over ranks": (("no norm", "mean"), ()),
    "all of it": (("mean", "contrast", "checkpoint", "accumulates"), ()),
}


class Reentrant(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(2, 2).double(), SyncNorm(2).double()
        self.last = nn.Linear(2, 2).double() if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.norm, self.first(x), use_reentrant=True))  # type: ignore[no-any-return]


def train_reentrant(rank: int, last: bool) -> None:
    model = DistributedDataParallel(Reentrant(last), bucket_cap_mb=1e-5)
    with Join([model]) as join:
        for step in join.batches(range(1 + 3 * rank)):
            model(torch.rand(3, 2, dtype=torch.float64) + step).square().sum().backward()


class Sum(torch.autograd.Function):
    """Passes on, and sums gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient
