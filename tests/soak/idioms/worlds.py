"""Two worlds that one program runs in: ranks under `Join`, and plain DDP where every rank runs every step.

In the reference world a rank without a batch runs the batch of the first active rank. Its gradients are multiplied by
zero at the parameters, and a communication hook applies the weights of the formula. In collectives it contributes the
neutral value. Nothing of torch_join computes there.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from torch_join import Join, windows

Batch = tuple[Tensor, Tensor]
Found = dict[str, Tensor]
SUM, AVG, MAX, MIN = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "MIN"))
NEUTRAL = {SUM: 0.0, AVG: 0.0, MAX: -torch.inf, MIN: torch.inf}
FEATURES, OUTPUTS = 6, 3


def count(batch: Any) -> float:
    """Return what a batch, or a window of batches, counts under `weighting="count"`: now and then nothing."""
    if isinstance(batch, list):
        return sum(map(count, batch))
    number = float(batch[1].abs().mean())
    return number if number > 0.4 else 0.0


def halved(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average, and halve the average."""
    return allreduce_hook(dist.group.WORLD, bucket).then(lambda future: future.value().div_(2))


HOOKS: dict[str, Callable[..., Any]] = {"average": allreduce_hook, "halved": halved}


class Joined:
    """What a program asks the world for, under `Join`."""

    reference = False

    def __init__(self, rank: int, lengths: Sequence[int], weighting: str) -> None:
        self.rank, self.lengths, self.weighting = rank, lengths, weighting
        self.size = len(lengths)
        self.found: Found = {}

    @property
    def option(self) -> Any:
        return count if self.weighting == "count" else self.weighting

    def data(self, salt: int, length: int, rows: int | None) -> list[Batch]:
        """Return as many batches of this rank, of so many rows, or of two to five."""
        batches = []
        for index in range(length):
            generator = torch.Generator().manual_seed(1_000_000 * salt + 1000 * self.rank + index)
            size = rows or int(torch.randint(2, 6, (), generator=generator))
            x, y = (torch.randn(size, width, generator=generator) for width in (FEATURES, OUTPUTS))
            batches.append((x, y))
        return batches

    def ddp(self, net: nn.Module, hook: str | None = None, **options: Any) -> DistributedDataParallel:
        model = DistributedDataParallel(net, **options)
        if hook is not None:
            model.register_comm_hook(dist.group.WORLD, HOOKS[hook])
        return model

    def join(self, given: Sequence[Any], **options: Any) -> Any:
        return Join(given, weighting=self.option, **options)

    def plain(self, join: Any, batches: Iterable[Any]) -> Iterable[Any]:
        """Return what a plain `for` goes through."""
        return batches

    def windows(self, batches: Iterable[Any], size: int) -> Iterable[Any]:
        return windows(batches, size)

    def limit(self, length: int) -> int:
        """Return how many batches a rank counts that has so many."""
        return length

    def shorten(self, batches: list[Any], limit: int) -> list[Any]:
        """Return the batches of a rank that will leave its loop after some."""
        return batches

    def all_reduce(self, tensor: Tensor, op: Any = SUM) -> Tensor:
        dist.all_reduce(tensor, op=op)
        return tensor

    def reduce_gradient(self, gradient: Tensor, average: bool) -> None:
        """Reduce a gradient of `no_sync` by hand."""
        self.all_reduce(gradient, AVG if average else SUM)
        if not average:
            gradient /= self.size

    def own(self, value: Tensor) -> Tensor:
        """Return what this rank counts for itself: zero where it has no batch."""
        return value

    def rows(self, join: Any, tensor: Tensor) -> Tensor:
        """Return all ranks' rows, with gradients, as the library gathers them."""
        return join.all_gather(tensor, sync_grads=True).flatten(0, 1)  # type: ignore[no-any-return]

    def rows_of_all(self, join: Any, tensor: Tensor) -> Tensor:
        """The same, as a package gathers them which knows nothing of the library."""
        return torch.cat(dnn.all_gather(tensor.contiguous()))  # type: ignore[no-untyped-call]

    def objects(self, value: Any) -> list[Any]:
        """Gather an object of each rank; return those of the active ones."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value)
        return [each for each in every if each is not None]

    def keep(self, name: str, thing: Any) -> None:
        """Keep what there is of something now, to compare it."""
        _flatten(name, thing, self.found)


class Reference(Joined):
    """The same in plain DDP."""

    reference = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begin_all()

    def begin_all(self) -> None:
        self.active, self.ghost, self.weights = list(range(self.size)), False, [1 / self.size] * self.size

    def begin(self, sizes: Sequence[float | None]) -> None:
        """Begin a step in which ranks have batches of these sizes, or none."""
        self.active = [rank for rank, size in enumerate(sizes) if size is not None]
        self.ghost = self.rank not in self.active
        if self.weighting == "world":
            self.weights = [1 / self.size] * self.size
        elif self.weighting == "active":
            self.weights = [(size is not None) / len(self.active) for size in sizes]
        else:
            total = sum(size or 0.0 for size in sizes)
            self.weights = [(size or 0.0) / total if total else 0.0 for size in sizes]

    @property
    def weight(self) -> float:
        return self.weights[self.rank]

    def size_of(self, batch: Any) -> float:
        return count(batch) if self.weighting == "count" else len(batch[0])

    def ddp(self, net: nn.Module, hook: str | None = None, **options: Any) -> DistributedDataParallel:
        sparse = any(getattr(module, "sparse", False) for module in net.modules())
        for p in net.parameters():
            if p.requires_grad:
                factor = (lambda: self.size * self.weight) if sparse else (lambda: 1.0)
                p.register_hook(lambda g, factor=factor: g * (0.0 if self.ghost else factor()))
        model = DistributedDataParallel(net, **options)
        if not sparse:
            model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket, hook))
        return model

    def _reduce(self, bucket: dist.GradBucket, hook: str | None) -> torch.futures.Future[Tensor]:
        bucket.buffer().mul_(self.weight * self.size)
        return HOOKS[hook or "average"](dist.group.WORLD, bucket)  # type: ignore[no-any-return]

    def join(self, given: Sequence[Any], **options: Any) -> Any:
        return StandIn(self)

    def plain(self, join: Any, batches: Iterable[Any]) -> Iterable[Any]:
        return join.batches(batches)  # type: ignore[no-any-return]

    def windows(self, batches: Iterable[Any], size: int) -> Iterable[Any]:
        batches = [*batches]
        return [batches[first : first + size] for first in range(0, len(batches), size)]

    def limit(self, length: int) -> int:
        return 10**9

    def shorten(self, batches: list[Any], limit: int) -> list[Any]:
        return batches[:limit]

    def all_reduce(self, tensor: Tensor, op: Any = SUM) -> Tensor:
        sent = torch.full_like(tensor, NEUTRAL[op]) if self.ghost else tensor.clone()
        dist.all_reduce(sent, op=SUM if op == AVG else op)
        return tensor.copy_(sent / len(self.active) if op == AVG else sent)

    def reduce_gradient(self, gradient: Tensor, average: bool) -> None:
        # Under "world" nothing is weighted, so that an average is one over the ranks that have a batch.
        gradient *= 1 / len(self.active) if average and self.weighting == "world" else self.weight
        dist.all_reduce(gradient)

    def own(self, value: Tensor) -> Tensor:
        return value * 0.0 if self.ghost else value

    def rows(self, join: Any, tensor: Tensor) -> Tensor:
        every = dnn.all_gather(tensor.contiguous())  # type: ignore[no-untyped-call]
        return torch.cat([every[rank] for rank in self.active])

    rows_of_all = rows

    def objects(self, value: Any) -> list[Any]:
        return super().objects(None if self.ghost else value)


class StandIn:
    """What a program does with a `Join`, in the reference world."""

    def __init__(self, world: Reference) -> None:
        self.world, self.step, self.start = world, -1, 0

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.world.begin_all()

    @property
    def active_ranks(self) -> list[int]:
        return self.world.active

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.start = state["step"] + 1

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        world = self.world
        world.begin_all()
        every = world.objects([*batches])
        start, self.start = self.start, 0
        for self.step in range(start, max(map(len, every))):
            world.begin([world.size_of(each[self.step]) if self.step < len(each) else None for each in every])
            yield copy.deepcopy(every[world.active[0] if world.ghost else world.rank][self.step])
        world.begin_all()


def _flatten(name: str, thing: Any, into: Found) -> None:
    if isinstance(thing, Tensor):
        value = thing.detach()
        into[name] = (value.to_dense() if value.is_sparse else value).clone().contiguous()
    elif isinstance(thing, nn.Module):
        for key, p in thing.named_parameters():
            _flatten(f"{name}.{key}", p, into)
        for key, buffer in thing.named_buffers():
            _flatten(f"{name}.buffer {key}", buffer, into)
        _flatten(
            f"{name} flags",
            [*(p.requires_grad for p in thing.parameters()), *(m.training for m in thing.modules())],
            into,
        )
    elif isinstance(thing, torch.optim.Optimizer):
        _flatten(f"{name} groups", [{k: v for k, v in g.items() if k != "params"} for g in thing.param_groups], into)
        if not isinstance(thing, ZeroRedundancyOptimizer):  # whose ranks have a shard each
            _flatten(f"{name} state", [thing.state.get(p) for g in thing.param_groups for p in g["params"]], into)
    elif isinstance(thing, (int, float)):
        into[name] = torch.tensor(float(thing))
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            _flatten(f"{name}.{key}", value, into)
    elif isinstance(thing, (list, tuple)):
        _flatten(f"{name} length", len(thing), into)
        for place, value in enumerate(thing):
            _flatten(f"{name}.{place}", value, into)
    elif hasattr(thing, "state_dict"):
        _flatten(name, thing.state_dict(), into)


def digests(found: Found) -> dict[str, str]:
    """Return a digest of the bits of each value."""
    return {
        name: hashlib.sha1(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in found.items()
    }


def differences(found: Found, expected: Found, tolerance: float) -> dict[str, float]:
    """Return by how much each value is off, if it is by more than a tolerance, relative to values above 1."""
    off = {}
    for name, right in expected.items():
        value = found.get(name)
        if value is None or value.shape != right.shape:
            off[name] = torch.inf
            continue
        a, b = (torch.view_as_real(each) if each.is_complex() else each.double() for each in (value, right))
        distance = (a - b).abs() / b.abs().clamp(min=1.0)
        distance[(a == b) | (a.isnan() & b.isnan())] = 0.0
        most = float(distance.nan_to_num(torch.inf).max()) if distance.numel() else 0.0
        if most > tolerance:
            off[name] = most
    return off
