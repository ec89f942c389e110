"""SyncBatchNorm on a CPU: torch has the five kernels of its autograd function for accelerators only."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as Synced
from torch.nn.parallel import DistributedDataParallel

_libraries: list[Any] = []


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *([1] * (x.dim() - 2)))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean = x.mean(_dims(x))
    return mean, ((x - _wide(mean, x)).square().mean(_dims(x)) + eps).rsqrt()


def _gather_stats(
    _: Tensor, mean: Tensor, invstd: Tensor, running_mean: Any, running_var: Any, *rest: Any
) -> tuple[Tensor, Tensor]:
    momentum, eps, counts = rest
    total, weights = counts.sum(), counts.view(-1, 1)
    common = (mean * weights).sum(0) / total
    variance = ((invstd.square().reciprocal() - eps + (mean - common).square()) * weights).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(common * momentum)
        running_var.mul_(1 - momentum).add_(variance * total / (total - 1) * momentum)
    return common, (variance + eps).rsqrt()


def _elements(x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, _: float) -> Tensor:
    y = (x - _wide(mean, x)) * _wide(invstd, x)
    y = y if weight is None else y * _wide(weight, x)
    return y if bias is None else y + _wide(bias, x)


def _backward_reduce(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, *_: Any) -> tuple[Tensor, ...]:
    total, product = dy.sum(_dims(x)), (dy * (x - _wide(mean, x))).sum(_dims(x))
    return total, product, product * invstd, total.clone()


def _backward_elements(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, total: Tensor, product: Tensor, counts: Tensor
) -> Tensor:
    n = counts.sum().to(x.dtype)
    centered = (x - _wide(mean, x)) * _wide(invstd.square() * product / n, x)
    gradient = (dy - _wide(total / n, x) - centered) * _wide(invstd, x)
    return gradient if weight is None else gradient * _wide(weight, x)


@functools.cache
def register() -> None:
    """Give torch the kernels, in this process; for the emulated device too."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for name, kernel in (
        ("batch_norm_stats", _stats),
        ("batch_norm_gather_stats_with_counts", _gather_stats),
        ("batch_norm_elemt", _elements),
        ("batch_norm_backward_reduce", _backward_reduce),
        ("batch_norm_backward_elemt", _backward_elements),
    ):
        for key in ("CPU", "PrivateUse1"):
            library.impl(name, kernel, key)
    # DDP takes these modules on accelerators only.
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # type: ignore[method-assign]


class SyncNorm(nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` without its look at the device; in one process a batch norm."""

    def __init__(self, features: int, group: Any = None) -> None:
        super().__init__(features, process_group=group)
        register()
        with torch.no_grad():
            self.weight.copy_(torch.linspace(0.5, 1.5, features))
            self.bias.copy_(torch.linspace(-0.2, 0.3, features))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized()):
            return nn.BatchNorm1d.forward(self, x)  # type: ignore[arg-type]
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        group = self.process_group or dist.group.WORLD
        buffers = self.running_mean, self.running_var
        args = self.weight, self.bias, *buffers, self.eps, self.momentum, group, group.size()
        return Synced.apply(x, *args)  # type: ignore[no-any-return,no-untyped-call]
