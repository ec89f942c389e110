"""BatchNorm statistics that are computed anew over an epoch."""

from torch import nn

from lightning_join._compat import BatchNorm
from lightning_join._protocol import JoiningStrategy


def merge_statistics(module: nn.Module, strategy: JoiningStrategy) -> None:
    """Give all ranks the statistics of all ranks' batches; all ranks meet.

    `StochasticWeightAveraging` ends with an epoch in which nothing is trained and each BatchNorm takes the
    plain average over its batches (`momentum=None`). Each rank has averaged over its own.
    """
    for norm in module.modules():
        if not isinstance(norm, BatchNorm) or norm.momentum is not None or norm.num_batches_tracked is None:
            continue
        count = norm.num_batches_tracked
        total = strategy.reduce(count.clone(), reduce_op="sum")
        for average in (norm.running_mean, norm.running_var) if total > 0 else ():
            assert average is not None
            average.copy_(strategy.reduce(average * count, reduce_op="sum") / total)
        count.copy_(total)
